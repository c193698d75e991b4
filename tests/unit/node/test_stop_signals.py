import asyncio
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from swarmnode.errors import INTERRUPTED, StoppedEarly
from swarmnode.node.stop_signals import SAME_REQUEST_S, StopSignals

LOADS_FOR_EVER = """
import ctypes, itertools, logging, sys
from swarmnode.node.stop_signals import StopSignals
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
lock, held = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
with StopSignals(clock=itertools.count(0, 2).__next__):
    lock(held)
    print("loading", flush=True)
    lock(held)
"""
INSIDE_A_DEL = """
import os, signal
from swarmnode.errors import StoppedEarly
from swarmnode.node.stop_signals import StopSignals
class Model:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
with StopSignals() as signals:
    Model()
    while True:
        signals.check()
"""


class Heard(StopSignals):
    """Signals with a clock that a test sets, and an end that it sees."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ended = queue.Queue[int]()
        super().__init__(self.ended.put, lambda: self.now_s)


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        threading.Event().wait(0.001)


def is_asked(signals: StopSignals) -> bool:
    try:
        signals.check()
    except StoppedEarly:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_raises_nothing_where_it_comes_and_stops_the_start_at_the_next_part(
    number: signal.Signals,
) -> None:
    with Heard() as signals:
        signals.check()
        signal.raise_signal(number)
        until(lambda: is_asked(signals))
        with pytest.raises(StoppedEarly, match="before the node had started") as caught:
            signals.check()
    assert caught.value.exit_code == INTERRUPTED and signals.ended.empty()


def test_a_request_is_not_lost_in_a_del_where_python_ignores_what_is_raised() -> None:
    done = subprocess.run([sys.executable, "-c", INSIDE_A_DEL], capture_output=True, text=True, timeout=60)
    assert "StoppedEarly: stopped before the node had started" in done.stderr
    assert "Exception ignored" not in done.stderr


async def test_a_running_node_is_asked_once_and_the_second_request_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = asyncio.Queue[str]()
    with Heard() as signals, caplog.at_level("INFO", "swarmnode"):
        signals.hand_to(lambda: asked.put_nowait("stop"), "stopping: saying goodbye to peers")
        signal.raise_signal(signal.SIGINT)
        await asked.get()
        signals.now_s = SAME_REQUEST_S + 0.1
        signal.raise_signal(signal.SIGINT)
        assert await asyncio.to_thread(signals.ended.get) == INTERRUPTED
    assert asked.empty()
    assert [record.getMessage() for record in caplog.records] == [
        "stopping: saying goodbye to peers; press Ctrl-C again to stop immediately",
        "stopped immediately",
    ], "a seed has no checkpoint"


async def test_what_a_terminal_and_a_supervisor_both_send_is_one_request() -> None:
    asked = asyncio.Queue[str]()
    with Heard() as signals:
        signals.hand_to(lambda: asked.put_nowait("stop"))
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        await asked.get()
    assert signals.ended.empty(), "all that is sent before the end is heard"


async def test_a_node_that_comes_up_after_the_request_hears_of_it() -> None:
    asked: list[str] = []
    with Heard() as signals:
        signal.raise_signal(signal.SIGINT)
        await asyncio.to_thread(until, lambda: is_asked(signals))
        signals.hand_to(lambda: asked.append("stop"))
        assert asked == ["stop"]


def test_the_second_request_ends_a_load_that_is_deep_in_c() -> None:
    command = [sys.executable, "-c", LOADS_FOR_EVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as loading:
        assert loading.stdout is not None and loading.stdout.readline() == "loading\n"
        loading.send_signal(signal.SIGINT)
        assert "again to stop immediately" in loading.stdout.readline()
        loading.send_signal(signal.SIGINT)
        assert loading.stdout.readline() == "stopped before the node had started\n"
        assert loading.wait(60) == INTERRUPTED
