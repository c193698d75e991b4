"""vLLM's own process and ours: who hears Ctrl-C, who outlives whom, and which card it sees. Without vLLM."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swarmnode.extensions.vllm import compat
from swarmnode.extensions.vllm.compat import deaf_to_the_terminal, only_card, starting_vllm

PATIENCE_S = 30.0
"""For processes of a busy machine. Nothing is measured with it."""

HEARS = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.2)
print("still here")
"""

TREE = """
import os, subprocess, sys, time
role = sys.argv[1]
if role == "starter":
    environment = {**os.environ, "SWARMNODE_VLLM_STARTED_BY": str(os.getpid())}
    below = "engine" if sys.argv[2] == "three" else "worker"
    child = subprocess.Popen([sys.executable, __file__, below], env=environment)
elif role == "engine":
    print("engine", os.getpid(), flush=True)
    child = subprocess.Popen([sys.executable, __file__, "worker"])
else:
    from swarmnode.extensions.vllm.compat import end_with_whoever_started_us
    end_with_whoever_started_us()
    print("worker", os.getpid(), flush=True)
time.sleep(600)
"""

UNGUARDED = """
from multiprocessing import get_context
from time import sleep
from swarmnode.extensions.vllm.compat import starting_vllm

print("the script runs", flush=True)
with starting_vllm(in_process=False):
    child = get_context("spawn").Process(target=sleep, args=(0,))
    child.start()
    child.join()
assert child.exitcode == 0
"""


def test_a_process_started_deaf_does_not_hear_ctrl_c_and_we_still_do() -> None:
    with deaf_to_the_terminal():
        deaf = subprocess.run([sys.executable, "-c", HEARS], capture_output=True, text=True, check=False)
    assert deaf.stdout == "still here\n"
    hearing = subprocess.run([sys.executable, "-c", HEARS], capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in hearing.stderr and not hearing.stdout
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_vllms_process_does_not_run_a_script_again_that_has_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("the script runs\n", 0), ran.stderr


@pytest.mark.parametrize("processes", ["two", "three"])
def test_vllms_processes_end_with_the_node_however_it_ends(tmp_path: Path, processes: str) -> None:
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    command = [sys.executable, str(script), "starter", processes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        lines = [starter.stdout.readline().split() for _ in range(1 if processes == "two" else 2)]
        below = [psutil.Process(int(number)) for _, number in lines]
        starter.kill()
        gone, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
    assert not alive and len(gone) == len(below)


def test_a_model_in_this_process_waits_for_nobodys_end() -> None:
    before = {thread.name for thread in compat.threading.enumerate()}
    compat.end_with_whoever_started_us()
    assert {thread.name for thread in compat.threading.enumerate()} == before


@pytest.mark.parametrize(
    ("visible", "card", "expected"),
    [(None, 1, "1"), ("2,5", 1, "5"), (None, 0, None), ("3", 0, "3"), (None, None, None)],
)
def test_vllm_sees_the_card_that_we_train_on(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, card: int | None, expected: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with starting_vllm(in_process=False, card=card):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert compat.STARTED_BY not in os.environ
    assert only_card(None) == {}
