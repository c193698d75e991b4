"""Runs work for several members at once, and returns the results by member.

liveness.py, proposal_round.py, replica_exchange.py, state_service.py -> [of_each]
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")


async def of_each(keys: Iterable[K], work: Callable[[K], Coroutine[Any, Any, T]]) -> dict[K, T]:
    """Return the result of the work for each key. All run at the same time, and a failure ends the others.

    >>> async def double(number): return 2 * number
    >>> asyncio.run(of_each((1, 2), double))
    {1: 2, 2: 4}
    """
    async with asyncio.TaskGroup() as tasks:
        running = {key: tasks.create_task(work(key)) for key in keys}
    return {key: task.result() for key, task in running.items()}
