"""Trainers of several policies meet: together when they can, never held up for long by one that is late."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from swarmnode.training.cohort import Cohort

PATIENCE_S = 30.0
"""For threads of a busy machine; no test waits for it to run out."""


class Room:
    """A cohort of three whose common run squares numbers, waits at a gate, and remembers who was there."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.cohort: Cohort[int, int] = Cohort("abc", self.run, patience_s)
        self.meetings: list[list[int]] = []
        self.began = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.at_once = 0
        self.error: Exception | None = None
        self.pool = ThreadPoolExecutor(8)

    def run(self, works: list[int]) -> list[int]:
        self.at_once += 1
        assert self.at_once == 1, "two meetings at once"
        self.meetings.append(works)
        self.began.set()
        assert self.gate.wait(PATIENCE_S)
        self.at_once -= 1
        if self.error is not None:
            raise self.error
        return [work * work for work in works]

    def comes(self, member: str, work: int) -> "Future[int]":
        """Returns once the member is there."""
        before = len(self.cohort.present)
        future = self.pool.submit(self.cohort.train, member, work)
        until(lambda: len(self.cohort.present) > before or self.began.is_set() or future.done())
        return future


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    for member in "abc":
        room.cohort.leave(member)
    room.gate.set()
    room.pool.shutdown()


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("waited in vain")


def results(futures: list["Future[int]"]) -> list[int]:
    return [future.result(PATIENCE_S) for future in futures]


def test_one_run_for_all_in_the_order_of_the_members(room: Room) -> None:
    futures = [room.comes(member, work) for member, work in (("c", 4), ("a", 2), ("b", 3))]
    assert results(futures) == [16, 4, 9]
    assert room.meetings == [[2, 3, 4]]
    assert not room.cohort.missed


def test_nobody_trains_before_the_last_has_come(room: Room) -> None:
    futures = [room.comes("a", 1), room.comes("b", 2)]
    assert room.meetings == [] and not any(future.done() for future in futures)
    futures.append(room.comes("c", 3))
    assert results(futures) == [1, 4, 9]


def test_who_leaves_is_not_waited_for(room: Room) -> None:
    futures = [room.comes("a", 1), room.comes("b", 2)]
    room.cohort.leave("c")
    assert results(futures) == [1, 4]
    assert room.meetings == [[1, 2]]
    room.cohort.leave("b")
    assert room.cohort.train("a", 5) == 25


def test_who_has_left_while_it_waits_still_gets_its_result(room: Room) -> None:
    future = room.comes("a", 3)
    for member in "abc":
        room.cohort.leave(member)
    assert future.result(PATIENCE_S) == 9
    with pytest.raises(ValueError, match="not a member"):
        room.cohort.train("a", 1)


def test_without_patience_each_trains_alone_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(patience_s=0.0)
    assert room.cohort.train("b", 3) == 9
    assert room.meetings == [[3]]
    assert room.cohort.missed == {"a": 1, "c": 1}
    with caplog.at_level("INFO", "swarmnode"):
        for member in "ba":
            room.cohort.leave(member)
    assert caplog.messages[-1:] == ["a was late for 1 joint training rounds"]


def test_common_work_is_done_in_nobodys_name() -> None:
    name = ContextVar("name", default="")
    cohort: Cohort[int, str] = Cohort("ab", run=lambda works: [name.get()] * len(works))

    def come(member: str) -> str:
        name.set(member)
        return cohort.train(member, 0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(come, "ab")) == ["", ""]


def test_who_comes_during_a_meeting_is_in_the_next_one(room: Room) -> None:
    room.gate.clear()
    first = [room.comes(member, 1) for member in "abc"]
    assert room.began.wait(PATIENCE_S)
    late = [room.pool.submit(room.cohort.train, member, 2) for member in "abc"]
    until(lambda: len(room.cohort.present) == 3 or room.at_once > 1)
    assert len(room.meetings) == 1, "two of them would train one model at once"
    room.gate.set()
    assert results(first) == [1, 1, 1]
    assert results(late) == [4, 4, 4]
    assert room.meetings == [[1, 1, 1], [2, 2, 2]]


def test_an_error_reaches_all_who_were_there_and_the_next_meeting_is_sound(room: Room) -> None:
    room.error = RuntimeError("out of memory")
    futures = [room.comes(member, 1) for member in "abc"]
    assert [future.exception(PATIENCE_S) for future in futures] == [room.error] * 3
    room.error = None
    assert results([room.comes(member, 2) for member in "abc"]) == [4, 4, 4]


def test_a_result_for_each_work_or_an_error_for_all() -> None:
    cohort: Cohort[int, int] = Cohort("a", run=lambda works: [])
    with pytest.raises(ValueError):
        cohort.train("a", 1)


def test_many_rounds_of_many_members_lose_nothing() -> None:
    members = [str(number) for number in range(6)]
    cohort: Cohort[tuple[str, int], tuple[str, int]] = Cohort(members, run=list, patience_s=PATIENCE_S)

    def live(member: str, rounds: int) -> bool:
        right = all(cohort.train(member, (member, round)) == (member, round) for round in range(rounds))
        cohort.leave(member)
        return right

    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(live, member, 20 + 10 * place) for place, member in enumerate(members)]
        assert all(future.result(PATIENCE_S) for future in futures)
    assert not cohort.missed
