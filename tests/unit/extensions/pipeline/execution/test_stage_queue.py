"""The compute of a member: one task at a time, in the order of the plan, and something else meanwhile."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue, task_sort_key
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan, Policy
from swarmnode.extensions.pipeline.scheduling.simulator import Kind

LINK = ((0.0, 1.0), (1.0, 0.0))
PLAN = Plan(
    Instance(("a", "b"), (1.0, 1.0), LINK, (2, 2), ((0,), (1,)), path_length=2, waves=1, gap_s=0.0),
    ((0, 1), (0, 1)),
)


@pytest.mark.parametrize(("policy", "first"), [("fifo", "f3"), ("backward_first", "b1"), ("ranked", "f0")])
def test_the_policy_says_whose_turn_it_is(policy: Policy, first: str) -> None:
    ready: list[tuple[str, Kind, int]] = [("f3", "forward", 3), ("b1", "backward", 1), ("f0", "forward", 0)]
    keys = {
        name: task_sort_key(policy, kind, rank, number) for number, (name, kind, rank) in enumerate(ready)
    }
    assert min(keys, key=lambda name: keys[name]) == first


async def order_of_tasks(policy: Policy, tasks: list[tuple[Kind, int]]) -> list[tuple[Kind, int]]:
    """How tasks are run that all become ready while another one runs."""
    ran: list[tuple[Kind, int]] = []
    go_on = threading.Event()
    async with StageQueue() as queue, asyncio.TaskGroup() as group:
        queue.adopt(policy, ranks=(2, 1, 0))
        group.create_task(queue.perform("forward", 0, go_on.wait))
        await asyncio.sleep(0.01)
        for kind, agent in tasks:
            group.create_task(queue.perform(kind, agent, lambda k=kind, a=agent: ran.append((k, a))))
        await asyncio.sleep(0.01)
        go_on.set()
    return ran


async def test_ready_tasks_are_taken_in_the_order_of_the_policy() -> None:
    tasks: list[tuple[Kind, int]] = [("forward", 0), ("forward", 1), ("backward", 1), ("forward", 2)]
    assert await order_of_tasks("fifo", tasks) == tasks
    assert (await order_of_tasks("backward_first", tasks))[0] == ("backward", 1)
    assert [agent for _, agent in await order_of_tasks("ranked", tasks)] == [2, 1, 1, 0]


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
