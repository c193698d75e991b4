"""A member's compute: one thread that runs tasks one at a time, in the order in which they become ready.

relay.py, iteration_driver.py -> [StageQueue.perform] -> StageWorker, in the worker thread -> their result

Only one thread may use a stage's worker, so everything that touches it runs here: tasks through `perform`,
and bookkeeping that takes microseconds through `call`, right after the running task.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from swarmnode.extensions.pipeline.scheduling.simulator import Kind

T = TypeVar("T")


class StageQueue:
    """One worker thread and the tasks that wait for it.

    async with StageQueue() as queue:
        hidden_BTD = await queue.perform("forward", agent, lambda: worker.forward(item))
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Seconds that tasks have run since the start."""
        self._turn = asyncio.Lock()
        """Held by the running task. Waiting tasks get it in the order in which they came."""
        self._closed = False

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closed = True
        # This waits for the running task, in a thread so that the event loop stays free for others.
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def perform(self, kind: Kind, agent: int, work: Callable[[], T]) -> T:
        """Run a task of the stage after the tasks before it. Returns its result or raises its exception. A
        task is not run if its caller was cancelled while it waited."""
        async with self._turn:
            return await self.compute(work)

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run bookkeeping in the worker thread, before any task that has not started yet. Returns its
        result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, *arguments)

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run bookkeeping as `call` does, without waiting for its result."""
        self._thread.submit(work, *arguments)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run a task whose turn has come in the worker thread. Returns its result or raises its exception."""
        if self._closed:
            raise asyncio.CancelledError
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            return await self.call(work)
        finally:
            self.busy_s += clock() - began_s
