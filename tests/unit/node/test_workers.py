import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from contextvars import ContextVar
from typing import Any, cast

import pytest

from swarmnode.errors import EngineError, StorageError
from swarmnode.node.workers import CheckpointWriter, Saving, Workers
from swarmnode.training.records import Counters

PATIENCE_S = 30.0


class Snapshot:
    def __init__(self, number: int) -> None:
        self.number = number


class SlowDisk:
    """Takes what it is given when it is told to go on."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.written: list[int] = []
        self.threads: set[int] = set()
        self.full = False

    def write(self, snapshot: Snapshot) -> str:
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE_S)
        if self.full:
            raise StorageError("the disk is full")
        self.written.append(snapshot.number)
        self.threads.add(threading.get_ident())
        return f"round-{snapshot.number}"

    def wait_until_begun(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)


async def test_a_stop_iteration_of_the_work_is_an_error_and_no_wait_for_ever() -> None:
    workers = Workers()
    for run in (workers.learn, workers.generate):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(run(next, iter(())), PATIENCE_S)
    await workers.close()


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def writer(disk: SlowDisk) -> Any:
    writer = CheckpointWriter(disk.write)
    yield writer
    for _ in range(10):
        disk.may_end.release()
    writer.close()


def test_a_snapshot_is_on_disk_when_its_result_is_there(
    writer: CheckpointWriter[Snapshot], disk: SlowDisk
) -> None:
    written = writer.submit(Snapshot(1))
    disk.wait_until_begun()
    assert not written.done() and disk.written == []
    disk.may_end.release()
    assert written.result(PATIENCE_S) == "round-1" and disk.written == [1]
    assert threading.get_ident() not in disk.threads


def test_of_those_that_wait_only_the_newest_is_written(
    writer: CheckpointWriter[Snapshot], disk: SlowDisk
) -> None:
    first = writer.submit(Snapshot(1))
    disk.wait_until_begun()
    later = [writer.submit(Snapshot(number)) for number in (2, 3, 4)]
    assert [future.cancelled() for future in (first, *later)] == [False, True, True, False]
    for _ in range(2):
        disk.may_end.release()
    wait([first, later[-1]], PATIENCE_S)
    assert disk.written == [1, 4]


def test_a_snapshot_that_gave_way_or_was_written_is_let_go_of(
    writer: CheckpointWriter[Snapshot], disk: SlowDisk
) -> None:
    writer.submit(Snapshot(1))
    disk.wait_until_begun()
    waiting, newest = Snapshot(2), Snapshot(3)
    alive = [weakref.ref(waiting), weakref.ref(newest)]
    futures = [writer.submit(waiting), writer.submit(newest)]
    del waiting
    assert alive[0]() is None, "it does not wait in memory for its turn"
    del newest
    for _ in range(2):
        disk.may_end.release()
    assert futures[-1].result(PATIENCE_S) == "round-3"
    writer.close()
    assert alive[1]() is None


def test_an_error_is_the_result_of_its_own_snapshot_alone(
    writer: CheckpointWriter[Snapshot], disk: SlowDisk
) -> None:
    disk.full = True
    failed = writer.submit(Snapshot(1))
    disk.may_end.release()
    with pytest.raises(StorageError):
        failed.result(PATIENCE_S)
    disk.full = False
    disk.may_end.release()
    assert writer.submit(Snapshot(2)).result(PATIENCE_S) == "round-2"


def test_the_end_waits_for_all_that_is_to_be_written(
    writer: CheckpointWriter[Snapshot], disk: SlowDisk
) -> None:
    writer.submit(Snapshot(1))
    disk.wait_until_begun()
    writer.submit(Snapshot(2))
    for _ in range(2):
        disk.may_end.release()
    writer.close()
    assert disk.written == [1, 2]


def test_what_is_logged_while_writing_is_said_in_the_name_of_who_saved() -> None:
    name = ContextVar("name", default="nobody")
    writer = CheckpointWriter[int](lambda snapshot: name.get())
    name.set("policy 1")
    assert writer.submit(1).result(PATIENCE_S) == "policy 1"
    writer.close()


async def test_a_round_whose_snapshot_could_not_be_taken_does_not_count_as_saved() -> None:
    class InThisThread:
        async def learn(self, work: Callable[..., Any], *given: Any) -> Any:
            return work(*given)

    class Fails:
        def save(self, counters: Counters) -> None:
            raise EngineError("somebody's step has failed")

    class Board:
        def enter(self, phase: str, detail: str) -> None: ...

    saving = Saving(cast(Any, Fails()), cast(Any, InThisThread()), cast(Any, Board()))
    async with asyncio.TaskGroup() as tasks:
        saving.report_in(tasks)
        with pytest.raises(EngineError):
            await saving.save(Counters(round=3))
    assert saving.tried_round is None
