"""Which process of a task is asked, and what becomes of the others meanwhile."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from swarmnode.errors import JudgementLost, TaskError
from swarmnode.tasks.processes.worker_messages import Digest, Digested, Loaded, OtherExample
from swarmnode.tasks.processes.worker_pool import WorkerPool

REQUEST = Digest()


class FakeProcess:
    """Answers with its number, once it may; the tests say when, and how."""

    name = "sums"

    def __init__(self, number: int) -> None:
        self.number = number
        self.starts = 0
        self.may_load, self.may_answer = threading.Event(), threading.Event()
        self.asked = threading.Semaphore(0)
        self.error: Exception | None = None
        self.closed = False
        self.may_load.set()
        self.may_answer.set()

    def start(self):
        self.may_load.wait()
        self.starts += 1
        if self.error is not None:
            raise self.error
        return Loaded("sums", "1")

    def ask(self, request):
        self.asked.release()
        self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return Digested(str(self.number))

    def interrupt(self):
        self.error = JudgementLost("stopped")
        self.may_answer.set()

    def close(self):
        self.closed = True


def started(count: int, may_grow: Callable[[], bool] = lambda: True):
    processes = [FakeProcess(number) for number in range(count)]
    pool = WorkerPool(processes, may_grow=may_grow)
    pool.start()
    return pool, processes


class Asking:
    """Requests that threads of their own make."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._threads = ThreadPoolExecutor(8)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._threads.shutdown()

    def __call__(self, affinity: int | None = None) -> "Future[int]":
        return self._threads.submit(lambda: int(self._pool.ask(REQUEST, affinity).digest))


def test_while_the_first_is_free_no_other_is_started():
    pool, processes = started(4)
    assert [pool.ask(REQUEST).digest for _ in range(5)] == ["0"] * 5
    assert [process.starts for process in processes] == [1, 0, 0, 0]


def test_a_request_that_finds_it_busy_has_another_started():
    pool, (first, second, third) = started(3)
    first.may_answer.clear()
    with Asking(pool) as ask:
        one = ask()
        first.asked.acquire()
        assert ask().result() == 1
        first.may_answer.set()
        assert one.result() == 0
    assert (second.starts, third.starts) == (1, 0)


def test_nobody_waits_for_one_that_loads_while_another_becomes_free():
    pool, (first, second) = started(2)
    first.may_answer.clear()
    second.may_load.clear()
    with Asking(pool) as ask:
        one, other = ask(), ask()
        first.asked.acquire()
        first.may_answer.set()
        assert (one.result(), other.result()) == (0, 0)
        second.may_load.set()


def test_a_large_task_has_one_process():
    pool, (first, second) = started(2, may_grow=lambda: False)
    first.may_answer.clear()
    with Asking(pool) as ask:
        asked = [ask(), ask(), ask(affinity=1)]
        first.may_answer.set()
        assert [one.result() for one in asked] == [0, 0, 0]
    assert second.starts == 0


def test_one_that_is_lost_holds_up_none_of_the_others():
    pool, (first, second) = started(2)
    first.may_answer.clear()
    with Asking(pool) as ask:
        hanging = ask()
        first.asked.acquire()
        assert [ask().result() for _ in range(3)] == [1, 1, 1]
        first.error = JudgementLost("it overran")
        first.may_answer.set()
        with pytest.raises(JudgementLost, match="overran"):
            hanging.result()
        assert ask().result() == 1, "what loads again is not waited for"
    second.error = None


def test_the_only_one_is_asked_again_after_it_was_lost():
    pool, (first,) = started(1)
    first.error = JudgementLost("it overran")
    with pytest.raises(JudgementLost):
        pool.ask(REQUEST)
    first.error = None
    assert pool.ask(REQUEST).digest == "0"


def test_requests_of_one_affinity_go_to_one_process():
    pool, processes = started(3)
    assert [pool.ask(REQUEST, affinity).digest for affinity in (4, 1, 2, 5, 3, 0)] == [*"112200"]
    assert [process.asked._value for process in processes] == [2, 2, 2]


def test_what_cannot_be_started_a_second_time_leaves_the_others_working(caplog):
    pool, (first, second) = started(2)
    second.error = TaskError("no memory")
    first.may_answer.clear()
    with Asking(pool) as ask:
        asked = [ask() for _ in range(3)]
        first.asked.acquire()
        first.may_answer.set()
        assert [one.result() for one in asked] == [0, 0, 0]
    for _ in range(3000):  # It is told in the thread that starts the second one.
        if caplog.text:
            break
        time.sleep(0.01)
    assert second.starts == 1 and "continues with fewer processes: no memory" in caplog.text


def test_an_interrupt_lets_those_return_that_wait_for_their_turn():
    pool, (first,) = started(1)
    first.may_answer.clear()
    with Asking(pool) as ask:
        asked = [ask() for _ in range(3)]
        first.asked.acquire()
        pool.interrupt()
        for one in asked:
            with pytest.raises(JudgementLost, match="stopped"):
                one.result()


def test_after_its_end_nobody_is_asked():
    pool, processes = started(2)
    pool.close()
    with pytest.raises(JudgementLost, match="task sums was stopped"):
        pool.ask(REQUEST)
    assert all(process.closed for process in processes)


def test_what_only_one_knows_is_found():
    pool, (_, second) = started(2)
    pool.ask(REQUEST, 1)
    assert pool.first_of_all(REQUEST, lambda reply: reply == Digested("1")) == Digested("1")
    assert pool.first_of_all(REQUEST, lambda reply: isinstance(reply, OtherExample)) is None
    assert second.asked._value == 3
