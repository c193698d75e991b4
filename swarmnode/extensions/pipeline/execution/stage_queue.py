"""A member's compute: one thread that takes ready tasks one after the other, in the order in which they come.

relay.py, iteration_driver.py -> [StageQueue.perform] -> StageWorker, in the worker thread -> their result

The worker of a stage is for one thread, so everything that touches it runs here: tasks by `perform`;
bookkeeping of microseconds by `call`, behind the task that runs.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from swarmnode.extensions.pipeline.scheduling.simulator import Kind

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ReadyTask:
    """A task of the stage that waits for its turn."""

    kind: Kind
    agent: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class StageQueue:
    """One thread and the tasks that wait for it.

    async with StageQueue() as queue:
        hidden_BTD = await queue.perform("forward", agent, lambda: worker.forward(item))
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Seconds that tasks have taken since the start."""
        self._ready: list[ReadyTask] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._running = self._group.create_task(self._run())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._running.cancel()
        try:
            await self._group.__aexit__(exc_type, exc, tb)
        finally:
            for task in self._ready:
                task.result.cancel()
            # Waits for the task that runs; not on the event loop, which others need meanwhile.
            await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def perform(self, kind: Kind, agent: int, work: Callable[[], T]) -> T:
        """Run a task of the stage behind those before it. Returns its result or raises its exception. A task
        whose caller was cancelled is not run."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._ready.append(ReadyTask(kind, agent, work, result))
        self._changed.set()
        return await result

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run bookkeeping in the worker thread, before any task that is not running yet. Returns its
        result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, *arguments)

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run bookkeeping as `call` does, without waiting for its result."""
        self._thread.submit(work, *arguments)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            task = self._next()
            if task is not None:
                await self.take(task)
            else:
                await self._changed.wait()

    def _next(self) -> ReadyTask | None:
        self._ready = [task for task in self._ready if not task.result.done()]
        if not self._ready:
            return None
        return self._ready.pop(0)

    async def take(self, task: ReadyTask) -> None:
        """Run a task, and hand its outcome to whoever waits for it."""
        settle(task, await self.compute(task))

    async def compute(self, task: ReadyTask) -> asyncio.Future[Any]:
        """Run a task in the worker thread. Returns its outcome, which is there."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        outcome = loop.run_in_executor(self._thread, task.work)
        await asyncio.wait({outcome})
        self.busy_s += loop.time() - began_s
        return outcome


def settle(task: ReadyTask, outcome: asyncio.Future[Any]) -> None:
    """Hand the outcome of a task to whoever waits for it, unless it has given up meanwhile."""
    error = outcome.exception()
    if task.result.done():
        return
    if error is not None:
        task.result.set_exception(error)
    else:
        task.result.set_result(outcome.result())
