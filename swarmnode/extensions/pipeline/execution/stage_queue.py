"""A member's compute: one thread that takes ready tasks one after the other, in the order of the plan.

relay.py, iteration_driver.py -> [StageQueue.perform] -> StageWorker, in the worker thread -> their result
                             |
          nothing ready: IdleWork, until the plan expects a task

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
from threading import Event
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from swarmnode.extensions.pipeline.scheduling.plan import Plan, Policy
from swarmnode.extensions.pipeline.scheduling.simulator import Kind, Timeline

T = TypeVar("T")

LEAST_GAP_S = 0.01
"""Shortest wait that is offered to idle work: for less, beginning and ending it would take as long."""

LOOK_AGAIN_S = 0.05
"""Time after which idle work that had nothing to do is asked again."""

UNKNOWN_GAP_S = 1.0
"""Length of the gap offered to idle work when the plan expects no more tasks. The next iteration interrupts
it."""


class IdleWork(Protocol):
    """Work of a member's own that it does while its stage waits (idle_rollouts.py)."""

    def run(self, until_s: float, wanted: Callable[[], bool]) -> None:
        """Work until `until_s` by time.monotonic, in the worker thread; return once `wanted()` is True."""
        ...


def task_sort_key(policy: Policy, kind: Kind, rank: int, number: int) -> tuple[int, int]:
    """Return the sort key of a ready task; the smallest goes first. `number`: its place in the order of
    becoming ready."""
    if policy == "backward_first":
        return int(kind == "forward"), number
    return (rank if policy == "ranked" else 0), number


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """The order in which a node takes its tasks, and the times at which the plan expects them."""

    policy: Policy = "fifo"
    ranks: tuple[int, ...] = ()
    """The rank of each agent; the lower goes first."""
    starts_s: tuple[float, ...] = ()
    """Starts of the node's tasks in seconds from the start of an iteration, sorted."""

    @classmethod
    def of(cls, plan: Plan, node: int, timeline: Timeline, *, scale: float = 1.0) -> "TaskOrder":
        """Return the order of a node's tasks. `timeline`: of the plan (simulate). `scale`: real seconds for a
        second of the plan."""
        starts = [task.start_s * scale for task in timeline.tasks if task.node == node]
        return cls(plan.policy(node), plan.ranks, tuple(sorted(starts)))

    def rank(self, agent: int) -> int:
        return self.ranks[agent] if agent < len(self.ranks) else 0

    def next_s(self, elapsed_s: float) -> float | None:
        """Return the start of the next expected task in seconds from the start of the iteration, or None."""
        return next((start_s for start_s in self.starts_s if start_s > elapsed_s), None)


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
    idle_s: float = 0.0
    """Time of idle work."""
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

    def __init__(self, *, compute: MachinePace | None = None, idle: IdleWork | None = None) -> None:
        self.times = WorkTimes()
        self._compute = compute
        self._idle = idle
        self._order = TaskOrder()
        self._ready: list[_Ready] = []
        self._numbers = count()
        self._changed = asyncio.Event()
        self._wanted = Event()
        self._began_s: float | None = None

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._running = self._group.create_task(self._run())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._wanted.set()
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
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Restart the plan's clock with the next task."""
        self._began_s = None

    async def perform(self, kind: Kind, agent: int, work: Callable[[], T], *, begins: bool = False) -> T:
        """Run a task of the stage when it is its turn. Returns its result or raises its exception.

        `begins`: it is the first task of a micro-batch. A task whose caller was cancelled is not run.
        """
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._ready.append(_Ready(kind, agent, next(self._numbers), begins, work, result))
        self._wanted.set()
        self._changed.set()
        return await result

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run bookkeeping in the worker thread, before any task that is not running yet. Returns its
        result."""
        self._wanted.set()
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
        self._wanted.set()
        self._thread.submit(work, *arguments)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            task = self._next()
            if task is not None:
                await self._perform(task)
            elif self._idle is None:
                await self._changed.wait()
            else:
                await self._be_idle(self._idle)

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
        if self._began_s is None:
            self._began_s = began_s - next(iter(self._order.starts_s), 0.0)
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

    async def _be_idle(self, idle: IdleWork) -> None:
        """Run idle work until the plan expects a task or one arrives."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        gap_s = UNKNOWN_GAP_S
        if self._began_s is not None:
            expected_s = self._order.next_s(now_s - self._began_s)
            gap_s = UNKNOWN_GAP_S if expected_s is None else self._began_s + expected_s - now_s
        self._wanted.clear()
        if gap_s >= LEAST_GAP_S:
            running = loop.run_in_executor(
                self._thread, idle.run, time.monotonic() + gap_s, self._wanted.is_set
            )
            await asyncio.wait({running})
            running.result()
            self.times.idle_s += loop.time() - now_s
        if not self._wanted.is_set():
            # It had no more to do, or the plan expects a task now.
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
