"""A reward does what it likes, and the node ends when it is told to, with what it has learnt."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Join = Callable[..., Any]

pytestmark = pytest.mark.slow

SOURCE = """
import pathlib, random

def examples(seed):
    rng = random.Random(seed)
    while True:
        yield {{"prompt": f"{{rng.randrange(1000)}}=", "answer": "1"}}

judged = 0

def reward(completions, **columns):
    global judged
    judged += 1
    mark = pathlib.Path({mark!r})
    if judged > {after} or mark.exists():
        mark.touch()
{body}
    return [float(len(text) % 2) for text in completions]
"""
HANGS = {
    "sleeps": "        import time; time.sleep(3600)",
    "holds the interpreter": "        import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
    "catches everything": (
        "        while True:\n            try:\n                while True: pass\n"
        "            except BaseException: pass"
    ),
}
ROUNDS = 3
GROUPS, EVALUATED = 4, 8
SETTINGS = ("--seed", "0", "--set", f"rollout.groups={GROUPS}", "--set", "exchange.local_groups=4")
ENDS_WITHIN_S = 60.0
"""It takes two to four on an idle machine; one that did not end would not end in this time either."""


def task_that_hangs(
    folder: Path, kind: str, after: int = EVALUATED + ROUNDS * GROUPS + 1
) -> tuple[Path, Path]:
    """The task, and a file that is there once its reward begins to hang."""
    path, mark = folder / "mine.py", folder / "hangs"
    path.write_text(SOURCE.format(after=after, mark=str(mark), body=HANGS[kind]))
    return path, mark


@pytest.mark.parametrize(
    ("kind", "number", "overlap"),
    [
        # More ways to hang are in tests/unit/tasks/processes/test_isolated_task.py: to a node they are one.
        ("holds the interpreter", signal.SIGTERM, "--overlap"),
        ("catches everything", signal.SIGINT, "--no-overlap"),
    ],
)
def test_a_signal_ends_the_node_with_a_checkpoint_whatever_a_reward_does(
    join: Join, tmp_path: Path, kind: str, number: signal.Signals, overlap: str
) -> None:
    task, mark = task_that_hangs(tmp_path, kind)
    node = join(*SETTINGS, "--task", str(task), overlap)
    node.until(mark.exists)
    node.kill(number)
    assert node.wait(ENDS_WITHIN_S) == 0, node.story
    before = node.summary()
    assert before["stopped"] == "stopped on request"
    assert before["rounds"] == before["saved_round"] >= ROUNDS - 1

    if overlap == "--no-overlap":
        return  # One of them goes on: what it saved is told above of both.
    mark.unlink()
    again = join(*SETTINGS, "--task", str(task), "--rounds", str(before["rounds"] + 1))
    assert again.summary()["rounds"] == before["rounds"] + 1
    assert f"resumed after round {before['rounds']}" in again.story


def test_a_signal_ends_a_node_whose_first_evaluation_hangs(join: Join, tmp_path: Path) -> None:
    task, mark = task_that_hangs(tmp_path, "holds the interpreter", after=2)
    node = join(*SETTINGS, "--task", str(task))
    node.until(mark.exists)
    node.kill(signal.SIGTERM)
    assert node.wait(ENDS_WITHIN_S) == 0, node.story


def test_ctrl_c_in_a_terminal_ends_it_while_the_panel_runs(
    join: Join, tmp_path: Path, quick_model: Path
) -> None:
    task, mark = task_that_hangs(tmp_path, "holds the interpreter")
    command = [sys.executable, "-m", "swarmnode", "join", "--home", str(tmp_path / "node"), *SETTINGS]
    policy = ["--model", str(quick_model), "--preset", "tiny", "--set", f"tasks.eval_examples={EVALUATED}"]
    ours, theirs = pty.openpty()
    node = subprocess.Popen(
        [*command, *policy, "--set", "network.listen=127.0.0.1", "--task", str(task)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # The terminal is the node's own: Ctrl-C reaches its whole process group.
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    threading.Thread(target=read_all, args=(ours,), daemon=True).start()
    try:
        deadline = time.monotonic() + 90
        while not mark.exists():
            assert node.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.write(ours, b"\x03")
        assert node.wait(ENDS_WITHIN_S) == 0
    finally:
        node.kill()
        node.wait()
    assert list((tmp_path / "node").rglob("round-*/state.json"))


def take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_all(terminal: int) -> None:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        pass


def test_a_reward_that_always_hangs_ends_the_run_with_a_clear_error_and_the_checkpoint(
    join: Join, tmp_path: Path
) -> None:
    task, _ = task_that_hangs(tmp_path, "holds the interpreter")
    node = join(*SETTINGS, "--task", str(task), "--set", "tasks.score_timeout_s=0.5")
    assert node.wait() == 6
    # Several are judged at once: one more may have failed by the time.
    assert re.search(r"task mine was given up after [3-9] groups in a row", node.story), node.story
    assert f"it was at {task} line " in node.story and "swarmnode task check" in node.story
    assert "Traceback" not in node.story
    assert list(node.paths.checkpoints.rglob("round-*/state.json"))
