"""A member's compute: one thread that takes ready tasks one after the other, in the order of the plan.

relay.py, iteration_driver.py -> [StageQueue.perform] -> StageWorker, in the worker thread -> their result

The worker of a stage is for one thread, so everything that touches it runs here: tasks by `perform`, in the
order of the node's policy; bookkeeping of microseconds by `call`, behind the task that runs. On an emulated
machine a task lasts as long as it would there, and the node is not available for a gap afterwards, as in the
simulator.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from swarmnode.extensions.pipeline.scheduling.plan import Plan, Policy
from swarmnode.extensions.pipeline.scheduling.simulator import Kind

T = TypeVar("T")


def task_sort_key(policy: Policy, kind: Kind, rank: int, number: int) -> tuple[int, int]:
    """Return the sort key of a ready task; the smallest goes first. `number`: its place in the order of
    becoming ready."""
    if policy == "backward_first":
        return int(kind == "forward"), number
    return (rank if policy == "ranked" else 0), number


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """The order in which a node takes its tasks."""

    policy: Policy = "fifo"
    ranks: tuple[int, ...] = ()
    """The rank of each agent; the lower goes first."""

    @classmethod
    def of(cls, plan: Plan, node: int) -> "TaskOrder":
        """Return the order of a node's tasks under a plan."""
        return cls(plan.policy(node), plan.ranks)

    def rank(self, agent: int) -> int:
        return self.ranks[agent] if agent < len(self.ranks) else 0


class MachinePace(Protocol):
    """Durations that make this machine stand for another one (extensions/pipeline/testing/emulated.py)."""

    scale: float
    """Real seconds for one second of the emulated machine."""
    gap_s: float
    """Real seconds for which the emulated machine is not available after a task."""
    first_gap_s: float
    """Real seconds for which it is not available after the first forward of a micro-batch."""

    def forward(self) -> AbstractAsyncContextManager[None]: ...

    def loss(self) -> AbstractAsyncContextManager[None]: ...

    def backward(self) -> AbstractAsyncContextManager[None]: ...


@dataclass(slots=True)
class WorkTimes:
    """Time that the worker thread has spent since the start, in real seconds."""

    busy_s: float = 0.0
    """Time of the stage's tasks; on an emulated machine, their emulated durations."""
    called_s: float = 0.0
    """Time of functions run by `call`: generation through the stages, and bookkeeping."""
    tasks: int = 0


@dataclass(slots=True, eq=False)
class _Ready:
    kind: Kind
    agent: int
    number: int
    begins: bool
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class StageQueue:
    """One thread and the tasks that wait for it.

    async with StageQueue() as queue:
        hidden_BTD = await queue.perform("forward", agent, lambda: worker.forward(item))
    """

    def __init__(self, *, compute: MachinePace | None = None) -> None:
        self.times = WorkTimes()
        self._compute = compute
        self._order = TaskOrder()
        self._ready: list[_Ready] = []
        self._numbers = count()
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

    def adopt(self, order: TaskOrder) -> None:
        """Take tasks in this order from now on."""
        self._order = order

    async def perform(self, kind: Kind, agent: int, work: Callable[[], T], *, begins: bool = False) -> T:
        """Run a task of the stage when it is its turn. Returns its result or raises its exception.

        `begins`: it is the first task of a micro-batch. A task whose caller was cancelled is not run.
        """
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._ready.append(_Ready(kind, agent, next(self._numbers), begins, work, result))
        self._changed.set()
        return await result

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run bookkeeping in the worker thread, before any task that is not running yet. Returns its
        result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._timed, work, *arguments)

    def _timed(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call the function and count its time. To be called in the worker thread."""
        began_s = time.monotonic()
        try:
            return work(*arguments)
        finally:
            self.times.called_s += time.monotonic() - began_s

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run bookkeeping as `call` does, without waiting for its result."""
        self._thread.submit(work, *arguments)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            task = self._next()
            if task is not None:
                await self._perform(task)
            else:
                await self._changed.wait()

    def _next(self) -> _Ready | None:
        self._ready = [task for task in self._ready if not task.result.done()]
        if not self._ready:
            return None
        order = self._order
        task = min(
            self._ready, key=lambda t: task_sort_key(order.policy, t.kind, order.rank(t.agent), t.number)
        )
        self._ready.remove(task)
        return task

    async def _perform(self, task: _Ready) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with self._lasting(task.kind):
            running = loop.run_in_executor(self._thread, task.work)
            await asyncio.wait({running})
        self.times.busy_s += loop.time() - began_s
        self.times.tasks += 1
        error = running.exception()
        if task.result.done():
            return  # Whoever waited has given up meanwhile.
        if error is not None:
            task.result.set_exception(error)
        else:
            task.result.set_result(running.result())
        if self._compute is not None:
            await asyncio.sleep(self._compute.first_gap_s if task.begins else self._compute.gap_s)

    def _lasting(self, kind: Kind) -> AbstractAsyncContextManager[None]:
        compute = self._compute
        if compute is None:
            return nullcontext()
        durations = {"forward": compute.forward, "loss": compute.loss, "backward": compute.backward}
        return durations[kind]()
