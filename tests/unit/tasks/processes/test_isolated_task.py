"""The code of a task file in a process of its own: what it may do, and that the node goes on."""

import itertools
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from swarmnode.chat import Turn
from swarmnode.errors import JudgementLost, JudgementOverran, TaskError
from swarmnode.tasks.deadlines.daemon_threads import in_daemon_thread
from swarmnode.tasks.loader import load_task, spec_of
from swarmnode.tasks.processes import worker
from swarmnode.tasks.processes import worker_messages as wire
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate
from swarmnode.tasks.processes.worker_messages import Score
from swarmnode.tasks.task import DEMONSTRATED_SEED
from swarmnode.testing import FakeTask
from swarmnode.types import Example

SUMS = """
import random

def examples(seed):
    rng = random.Random(seed)
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b), "kept": {a}, "lost": object()}
"""
RIGHT = "    return [float(c == a) for c, a in zip(completions, answer, strict=True)]\n"

HANGS = {
    "sleeps": "    import time; time.sleep(3600)\n",
    "spins": "    while True: pass\n",
    "holds the interpreter": "    import re; re.match(r'(a+)+$', 'a' * 40 + 'b')\n",
    "waits for a process": "    import subprocess; subprocess.run(['sleep', '3600'])\n",
}
ENDS = {"crashes": ("    import ctypes; ctypes.string_at(0)\n", "signal 11")}

Start = Callable[..., IsolatedTask]

T = TypeVar("T")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a task of this source; its processes end with the test."""
    started: list[IsolatedTask] = []

    def isolated(
        source: str, timeout_s: float = 60.0, name: str = "sums.py", workers: int = 1
    ) -> IsolatedTask:
        path = tmp_path / name
        path.write_text(source)
        task = isolate(str(path), timeout_s, workers=workers)
        assert isinstance(task, IsolatedTask)
        started.append(task)
        return task

    yield isolated
    for task in started:
        task.close()


def with_reward(body: str) -> str:
    return f"{SUMS}\ndef reward(completions, answer, **columns):\n{body}"


def first(task: IsolatedTask, count: int = 1):
    return list(itertools.islice(task.examples(0), count))


def test_it_draws_and_judges_as_the_file_does_in_this_process(start: Start) -> None:
    task = start(with_reward(RIGHT))
    here = load_task(task.spec)
    assert (task.name, task.version, spec_of(task)) == (here.name, here.version, task.spec)
    mine, theirs = first(task, 300), list(itertools.islice(here.examples(0), 300))
    assert [e.key for e in mine] == [e.key for e in theirs]
    assert [(e.prompt, e.columns["answer"]) for e in mine] == [
        (e.prompt, e.columns["answer"]) for e in theirs
    ]
    answer = str(mine[7].columns["answer"])
    assert task.score(mine[7], [answer, "no"]) == [{"reward": 1.0}, {"reward": 0.0}]


def test_a_column_that_cannot_be_written_down_still_reaches_the_reward(start: Start) -> None:
    body = "    return [float(type(columns['lost'][0]) is object and type(columns['kept'][0]) is set)]\n"
    task = start(with_reward(body))
    (example,) = first(task)
    assert "lost" not in example.columns
    assert task.score(example, ["a"]) == [{"reward": 1.0}]


OBJECT = """
import numpy

class Sums:
    name, version, most_turns, exchangeable = "sums", "1", 2, False

    def examples(self, seed):
        yield "1+1=", "2"

    def score(self, example, completions):
        return [{7: 1.0} if said == "odd" else {"right": numpy.float32(1)} for said in completions]

    def observe(self, example, turns):
        return "no messages"
"""


def test_what_an_object_should_not_return_is_an_error_of_the_task_and_its_process_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(OBJECT)
    task = isolate(f"{tmp_path / 'mine.py'}:Sums", 60.0)
    assert isinstance(task, IsolatedTask)
    with task:
        (example,) = first(task)
        with pytest.raises(TaskError, match="returned an invalid value: Expected `str`"):
            task.score(example, ["odd"])
        with pytest.raises(TaskError, match="returned an invalid value: Expected `array"):
            task.observe(example, [Turn("?")])
        assert task.score(example, ["2"]) == [{"right": 1.0}]


def test_a_reply_that_is_too_long_or_cannot_be_written_is_an_error_of_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Odd(FakeTask):
        def score(self, example, completions):
            return [{object(): 1.0}]  # type: ignore[dict-item]

    def load(request: wire.Load) -> tuple[worker.TaskWorker, wire.Loaded]:
        return worker.TaskWorker(Odd()), wire.Loaded("sum", "1")

    monkeypatch.setattr(worker, "_load", load)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 400)
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as trace:
        served = in_daemon_thread(lambda: worker.serve(theirs, trace.fileno()))
        reader = wire.MessageReader(ours)

        def asked(request: wire.Request) -> wire.Reply:
            ours.sendall(wire.frame(wire.Order(request, None)))
            return msgspec.msgpack.decode(reader.read(time.monotonic() + 30.0) or b"", type=wire.Reply)

        assert isinstance(asked(wire.Load("sum", None)), wire.Loaded)
        assert isinstance(asked(wire.Draw(0, 0, 2)), wire.Drawn)
        for request in (wire.Draw(0, 0, 256), wire.Score(0, 0, next(FakeTask().examples(0)).prompt, ("2",))):
            assert isinstance(asked(request), wire.Failure)
        ours.close()
        served.result(30.0)


def test_an_example_that_stands_in_no_draw_is_judged_by_the_columns_it_was_given_with(start: Start) -> None:
    task = start(with_reward(RIGHT), workers=2)
    key = replace(first(task)[0].key, seed=DEMONSTRATED_SEED)
    shown = Example(key, "six times seven", {"answer": "42", "unsent": object()})
    assert task.score(shown, ["42", "41"]) == [{"reward": 1.0}, {"reward": 0.0}]


@pytest.mark.parametrize("body", HANGS.values(), ids=HANGS)
def test_a_reward_that_hangs_is_given_up_and_says_where_it_was(start: Start, body: str) -> None:
    task = start(with_reward(body), timeout_s=0.5)
    example = next(load_task(task.spec).examples(0))
    given_up = overrun(task, example, lambda error: error.hint.endswith("in reward"))
    assert repr(example.prompt) in given_up.message and "0.5 s" in given_up.message
    assert given_up.hint.startswith(f"it was at {task.spec} line ")


def overrun(
    task: IsolatedTask, example: Example, began: Callable[[JudgementOverran], bool]
) -> JudgementOverran:
    """The error of a reward that hangs, once it had begun: a busy machine may need the deadline to begin
    it, and then everything is tried again."""
    for _ in range(100):
        with pytest.raises(JudgementOverran) as caught:
            task.score(example, ["a"])
        if began(caught.value):
            return caught.value
    raise AssertionError("the reward never began")


@pytest.mark.parametrize(("body", "how"), ENDS.values(), ids=ENDS)
def test_a_reward_that_takes_its_process_along_costs_one_judgement(start: Start, body: str, how: str) -> None:
    once = "    if completions[0] == 'bad':\n    " + body + RIGHT
    task = start(with_reward(once))
    (example,) = first(task)
    with pytest.raises(JudgementLost, match=how) as caught:
        task.score(example, ["bad"])
    assert not isinstance(caught.value, JudgementOverran)
    assert task.score(example, ["good"]) == [{"reward": 0.0}], "it is started again"


NASTY = """
def reward(completions, answer, **columns):
    what, passed = completions[0], [float(c == a) for c, a in zip(completions, answer, strict=True)]
    match what:
        case "regular expression": __import__("re").match(r"(a|aa)+$", "a" * 60 + "b")
        case "huge power": 9 ** 9 ** 9
        case "catches everything":
            while True:
                try: raise SystemExit
                except BaseException: pass
        case "os._exit": __import__("os")._exit(0)
        case "kill": __import__("os").kill(__import__("os").getpid(), 9)
        case "memory": bytearray(1 << 40)
        case "memory bit by bit":
            kept = []
            while True: kept.append(bytearray(1 << 22))
        case "long digits": int("9" * 100_000)
        case "sys.exit": __import__("sys").exit(0)
        case "recursion":
            def down(): return down()
            down()
        case "threads":
            import threading, time
            for _ in range(20): threading.Thread(target=time.sleep, args=(3600,)).start()
        case "output":
            for _ in range(200): print("x" * 100_000)
        case "long line": print("x" * 20_000_000)
        case "handlers":
            import signal, sys
            signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGALRM, signal.SIG_IGN)
            sys.setrecursionlimit(100); sys.stdout.close()
    return passed
"""


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedTask]:
    """One task, with two processes, for all that a judge may do and come back from."""
    path = tmp_path_factory.mktemp("nasty") / "nasty.py"
    path.write_text(SUMS + NASTY)
    with isolate(str(path), 60.0, workers=2, memory_mb=512) as task:
        yield task


@pytest.fixture(scope="module")
def impatient(nasty: IsolatedTask) -> Iterator[IsolatedTask]:
    """The same task, for what never comes back."""
    with isolate(nasty.spec, 0.5, workers=2, memory_mb=512) as task:
        yield task


def judges_on(task: IsolatedTask) -> bool:
    (example,) = first(task)
    return task.score(example, ["?", str(example.columns["answer"])]) == [{"reward": 0.0}, {"reward": 1.0}]


@pytest.mark.parametrize("what", ["regular expression", "huge power", "catches everything"])
def test_what_never_ends_costs_its_deadline(nasty: IsolatedTask, impatient: IsolatedTask, what: str) -> None:
    with pytest.raises(JudgementOverran, match=r"did not return within 0\.5 s"):
        impatient.score(first(nasty)[0], [what])
    assert once_in_time(lambda: judges_on(impatient))


def once_in_time(ask: Callable[[], T]) -> T:
    """What is answered within a deadline that a busy machine may miss, again and again."""
    for _ in range(100):
        with suppress(JudgementLost):
            return ask()
    raise AssertionError("it never answers")


@pytest.mark.parametrize("what", ["os._exit", "kill", "memory", "memory bit by bit"])
def test_what_takes_the_process_along_costs_one_judgement(nasty: IsolatedTask, what: str) -> None:
    with pytest.raises(JudgementLost) as caught:
        nasty.score(first(nasty)[0], [what])
    assert ("ran out of memory" in caught.value.message) == what.startswith("memory")
    assert judges_on(nasty)


@pytest.mark.parametrize(
    ("what", "error"),
    [("long digits", "ValueError"), ("sys.exit", "SystemExit"), ("recursion", "RecursionError")],
)
def test_what_raises_is_an_error_with_its_traceback(nasty: IsolatedTask, what: str, error: str) -> None:
    with pytest.raises(TaskError, match=error) as caught:
        nasty.score(first(nasty)[0], [what])
    (shown,) = caught.value.__notes__
    assert f'File "{nasty.spec}", line ' in shown and ", in reward" in shown and error in shown
    assert len(shown) < 10_000
    assert judges_on(nasty)


@pytest.mark.parametrize("what", ["threads", "output", "long line", "handlers"])
def test_what_is_only_bad_manners_is_put_up_with(nasty: IsolatedTask, what: str) -> None:
    assert nasty.score(first(nasty)[0], [what]) == [{"reward": 0.0}]
    assert judges_on(nasty)


def test_while_one_process_hangs_the_other_judges(start: Start, tmp_path: Path) -> None:
    task = start(with_reward(hanging_after(began := tmp_path / "began") + RIGHT), workers=2, timeout_s=3600.0)
    (example,) = first(task)
    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(task.score, example, ["hang"])
        await_file(began)
        assert [task.score(example, ["?"]) for _ in range(3)] == [[{"reward": 0.0}]] * 3
        assert not hanging.done()
        task.interrupt()
        with pytest.raises(JudgementLost, match="stopped"):
            hanging.result()


def hanging_after(began: Path) -> str:
    """The lines of a reward that never ends on "hang", and tells with a file that it has begun."""
    return (
        "    if completions[0] == 'hang':\n"
        f"        import pathlib; pathlib.Path({str(began)!r}).touch()\n"
        "        while True: pass\n"
    )


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_takes_no_more_orders_is_given_up_too(start: Start) -> None:
    """One that stands still does not empty its socket, and an order may be larger than that holds."""
    task = start(with_reward(RIGHT), timeout_s=0.5)
    example = next(load_task(task.spec).examples(0))
    child = task._process._slots[0].runner._child  # type: ignore[attr-defined]
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(JudgementOverran):
        in_daemon_thread(lambda: task.score(example, ["x" * (4 << 20)])).result(timeout=60)
    assert once_in_time(lambda: task.score(example, ["?"])) == [{"reward": 0.0}]


def test_a_process_that_was_killed_between_two_requests_costs_no_answer(start: Start) -> None:
    task = start(with_reward(RIGHT))
    example = first(task)[0]
    child = task._process._slots[0].runner._child  # type: ignore[attr-defined]
    assert child is not None
    child.kill()
    child.wait()
    assert task.score(example, ["?"]) == [{"reward": 0.0}]


def test_examples_of_a_process_that_dies_are_drawn_once_more(start: Start, tmp_path: Path) -> None:
    died = tmp_path / "died"
    dies = f"    import os, pathlib\n    died = pathlib.Path({str(died)!r})\n"
    dies += "    if not died.exists():\n        died.touch()\n        os.kill(os.getpid(), 9)\n"
    task = start(f"def examples(seed):\n{dies}    yield '1+1=', '2'\n")
    assert first(task)[0].prompt == "1+1=" and died.exists()
    always = start(
        "import os\n\ndef examples(seed):\n    os.kill(os.getpid(), 9)\n    yield\n", name="dies.py"
    )
    with pytest.raises(JudgementLost, match="signal 9"):
        first(always)


def test_what_a_process_draws_that_is_lost_can_still_be_judged_by_another(start: Start) -> None:
    task = start("import random\n\ndef examples(seed):\n    yield f'{random.random()}', '1'\n", workers=2)
    (example,) = first(task)
    task._process.ask(Score(0, 0, "another", ("1",)), affinity=1)
    task._process._slots.reverse()
    assert task.score(example, ["1"]) == [{"correct": 1.0}]


def test_what_a_reward_does_wrong_is_the_error_that_it_is_here(start: Start) -> None:
    task = start(with_reward("    return [1 / 0]\n"))
    with pytest.raises(TaskError, match="ZeroDivisionError") as caught:
        task.score(first(task)[0], ["a"])
    assert "line 11" in caught.value.hint
    with pytest.raises(TaskError, match="SystemExit"):
        leaving = start(with_reward("    raise SystemExit\n"), name="leaving.py")
        leaving.score(first(leaving)[0], ["a"])


def test_a_reward_may_start_a_thread_that_never_ends(start: Start) -> None:
    hangs = "    import threading, time; threading.Thread(target=time.sleep, args=(3600,)).start()\n"
    task = start(with_reward(hangs + RIGHT))
    assert task.score(first(task)[0], ["a"]) == [{"reward": 0.0}]
    task.close()


def test_examples_that_hang_are_given_up_too(start: Start) -> None:
    task = start("def examples(seed):\n    yield '1+1=', '2'\n    while True: pass\n", timeout_s=0.5)
    with pytest.raises(JudgementOverran, match=r"examples\(0\) of task sums"):
        first(task)


def test_a_file_that_cannot_be_loaded_is_the_error_that_it_is_here(start: Start) -> None:
    with pytest.raises(TaskError, match="syntax error"):
        start("def examples(seed)")
    with pytest.raises(JudgementLost, match="exit code 5"):
        start("import os; os._exit(5)", name="leaving.py")


def test_an_interrupt_ends_what_is_under_way_and_the_next_request_starts_again(
    start: Start, tmp_path: Path
) -> None:
    task = start(with_reward(hanging_after(began := tmp_path / "began") + RIGHT), timeout_s=3600.0)
    (example,) = first(task)
    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(task.score, example, ["hang"])
        await_file(began)
        task.interrupt()
        with pytest.raises(JudgementLost, match="stopped"):
            hanging.result()
    assert task.score(example, ["good"]) == [{"reward": 0.0}]


def test_an_interrupted_process_that_was_idle_loses_nothing(start: Start) -> None:
    task = start(with_reward(RIGHT))
    (example,) = first(task)
    task.interrupt()
    assert task.score(example, ["a"]) == [{"reward": 0.0}]


def test_after_its_end_nothing_is_started_any_more(start: Start) -> None:
    task = start(with_reward(RIGHT))
    (example,) = first(task)
    task.close()
    with pytest.raises(JudgementLost, match="stopped"):
        task.score(example, ["a"])


def test_what_it_started_ends_with_it(start: Start, tmp_path: Path) -> None:
    body = (
        "    import subprocess, pathlib\n"
        "    child = subprocess.Popen(['sleep', '3600'])\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "    child.wait()\n"
    )
    task = start(with_reward(body), timeout_s=2.0)
    overrun(task, next(load_task(task.spec).examples(0)), lambda _: (tmp_path / "pid").exists())
    assert ends(int((tmp_path / "pid").read_text()))


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_strangers_answers_are_judged_in_a_process_of_their_own(start: Start) -> None:
    body = "    if completions[0] == 'bad':\n        while True: pass\n" + RIGHT
    own = start(with_reward(body))
    (example,) = first(own)
    with own.for_strangers(0.5) as theirs:
        assert (theirs.name, theirs.version) == (own.name, own.version)
        assert once_in_time(lambda: first(theirs)) == [example]
        with pytest.raises(JudgementOverran):
            theirs.score(example, ["bad"])
        assert own.score(example, ["good"]) == [{"reward": 0.0}]


def test_a_stranger_does_not_pay_for_a_file_that_is_long_in_loading(start: Start, tmp_path: Path) -> None:
    (may_load := tmp_path / "may_load").touch()
    waits = f"import os, time\nwhile not os.path.exists({str(may_load)!r}): time.sleep(0.01)\n"
    own = start(waits + with_reward(RIGHT))
    may_load.unlink()
    with own.for_strangers(1.0) as theirs:
        with pytest.raises(JudgementLost, match="still being loaded") as caught:
            first(theirs)
        assert not isinstance(caught.value, JudgementOverran)
        may_load.touch()
        assert once_in_time(lambda: first(theirs)) == first(own)


def test_a_file_that_is_changed_meanwhile_stays_what_it_was(start: Start) -> None:
    task = start(with_reward(RIGHT))
    (example,) = first(task)
    Path(task.spec).write_text("def examples(seed):\n    yield 'other', '1'\n")
    task.interrupt()
    answer = str(example.columns["answer"])
    assert task.score(example, [answer]) == [{"reward": 1.0}]


def test_a_task_that_draws_otherwise_each_time_is_not_judged_by_a_wrong_answer(start: Start) -> None:
    task = start("import random\n\ndef examples(seed):\n    yield f'{random.random()}', '1'\n")
    (example,) = first(task)
    assert task.score(example, ["1"]) == [{"correct": 1.0}]
    task.interrupt()
    with pytest.raises(TaskError, match="different examples each time"):
        task.score(example, ["1"])


def test_what_it_prints_is_logged_without_control_characters(start: Start, caplog) -> None:
    caplog.set_level("INFO")
    task = start(with_reward("    print('judging\\x1b[2J')\n" + RIGHT))
    task.score(first(task)[0], ["a"])
    deadline = time.monotonic() + 30
    while "sums prints: judging[2J" not in caplog.messages:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_built_in_tasks_stay_in_this_process() -> None:
    assert isolate("rev", 1.0) is load_task("rev")
    assert spec_of(load_task("rev")) == "rev"
