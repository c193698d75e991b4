"""The compute of a member: one task at a time, as they come, and something else meanwhile."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue
from swarmnode.extensions.pipeline.scheduling.simulator import Kind


async def test_ready_tasks_are_taken_in_the_order_in_which_they_came() -> None:
    tasks: list[tuple[Kind, int]] = [("forward", 0), ("forward", 1), ("backward", 1), ("forward", 2)]
    ran: list[tuple[Kind, int]] = []
    go_on = threading.Event()
    async with StageQueue() as queue, asyncio.TaskGroup() as group:
        group.create_task(queue.perform("forward", 0, go_on.wait))
        await asyncio.sleep(0.01)
        for kind, agent in tasks:
            group.create_task(queue.perform(kind, agent, lambda k=kind, a=agent: ran.append((k, a))))
        await asyncio.sleep(0.01)
        go_on.set()
    assert ran == tasks


async def test_what_a_task_raises_reaches_who_asked_for_it_and_nobody_else() -> None:
    def fail() -> None:
        raise ValueError("no")

    async with StageQueue() as queue:
        with pytest.raises(ValueError, match="no"):
            await queue.perform("forward", 0, fail)
        assert await queue.perform("forward", 0, lambda: 7) == 7
        assert await queue.call(lambda: 8) == 8


async def test_what_is_called_for_does_not_count_as_work_of_the_stage() -> None:
    async with StageQueue() as queue:
        await queue.call(time.sleep, 0.02)
        with pytest.raises(ZeroDivisionError):
            await queue.call(lambda: 1 / 0)
        assert queue.busy_s == 0.0


async def test_a_task_that_nobody_waits_for_is_not_run() -> None:
    ran: list[str] = []
    go_on = threading.Event()
    async with StageQueue() as queue, asyncio.TaskGroup() as group:
        group.create_task(queue.perform("forward", 0, go_on.wait))
        await asyncio.sleep(0.01)
        unwanted = group.create_task(queue.perform("forward", 1, lambda: ran.append("unwanted")))
        await asyncio.sleep(0.01)
        unwanted.cancel()
        group.create_task(queue.perform("forward", 2, lambda: ran.append("wanted")))
        await asyncio.sleep(0.01)
        go_on.set()
    assert ran == ["wanted"]


async def until(reached: Callable[[], object]) -> None:
    while not reached():  # noqa: ASYNC110 (nothing tells when)
        await asyncio.sleep(0.005)
