"""Work beside a node's event loop: computing in threads, restarted services, checkpoints.

node.py (asyncio) -> [Workers] -> learner.py
                  -> [supervise] -> discovery and other services that must never take the node along
                  -> [Saving] -> learner.save -> snapshot -> [CheckpointWriter] -> CheckpointStore.write
                        |
                        +-> status board: what is on the disk, what failed

One thread learns, evaluates and takes snapshots; another generates, at times beside it. A service that raises
is logged with its traceback: one of the places where a broad except may stand (AGENTS.md, 2).

A snapshot is taken between two rounds, and a thread of its own writes it during the next ones, in order. A
slow or full disk costs no round: the board shows a checkpoint once it is written, a failure is shown and
logged, and the node goes on. Memory is bounded: besides the snapshot that is being written, at most one
waits. A newer one replaces it, since it contains everything that the older one does; the newest is never
given up. This happens only if the disk takes longer for a checkpoint than training takes for the rounds
between two.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Generic, TypeVar, TypeVarTuple

from swarmnode.errors import StorageError
from swarmnode.node.learner import Learner
from swarmnode.node.showing.board import StatusBoard
from swarmnode.training.records import Counters

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

Content = TypeVar("Content")


class Workers:
    """Two threads with a queue each. They start with their first work and end with `close`.

    Work runs in the context of its caller: log lines say which policy they are about.
    """

    def __init__(self) -> None:
        self._learner = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._generator = ThreadPoolExecutor(1, thread_name_prefix="generator")

    async def learn(self, work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run `work` in the thread that owns the policy."""
        return await self._run(self._learner, work, *arguments)

    async def generate(self, work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run `work` in the thread that owns the engine during a round."""
        return await self._run(self._generator, work, *arguments)

    async def _run(
        self, thread: ThreadPoolExecutor, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        def run() -> Result:
            try:
                return work(*arguments)
            except StopIteration as error:  # No asyncio.Future can hold one: the caller would wait for ever.
                raise RuntimeError("a StopIteration escaped from a generator") from error

        return await asyncio.wrap_future(thread.submit(copy_context().run, run))

    async def close(self) -> None:
        """Wait for the current work without blocking the event loop."""
        loop = asyncio.get_running_loop()
        for thread in (self._generator, self._learner):
            await loop.run_in_executor(None, thread.shutdown)


async def supervise(
    name: str,
    service: Callable[[], Awaitable[None]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run `service` until it returns. After an error, restart it after a pause that doubles each time."""
    pause_s = FIRST_BACKOFF_S
    while True:
        try:
            await service()
            return
        except Exception:
            logger.exception("%s failed; restarting it in %.1f s, training continues", name, pause_s)
        await sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)


class Saving:
    """Takes snapshots and reports their outcome to the board."""

    def __init__(self, learner: Learner, workers: Workers, board: StatusBoard) -> None:
        self._learner = learner
        self._workers = workers
        self._board = board
        self._tasks: asyncio.TaskGroup | None = None
        self.tried_round: int | None = None
        """The round of the last checkpoint that was begun, or that the run resumed from."""
        self.tried_evaluation: int | None = None
        """The round of the newest evaluation in that checkpoint."""
        self._outcome: asyncio.Task[None] | None = None
        """The task that writes the newest snapshot."""

    def report_in(self, tasks: asyncio.TaskGroup) -> None:
        """Sets the group whose tasks wait for the disk; call it first. Other errors than StorageError end
        the group."""
        self._tasks = tasks

    async def save(self, counters: Counters) -> None:
        """Take a snapshot and return; its outcome is reported to the board."""
        assert self._tasks is not None, "nobody would hear of an error"
        self._board.enter("saving", f"checkpoint of round {counters.round}")
        written = await self._workers.learn(self._learner.save, counters)
        self._note_tried(counters)
        self._outcome = self._tasks.create_task(self._report(counters.round, written))

    async def wait(self) -> None:
        """Wait until the newest snapshot is on disk or has failed."""
        if self._outcome is not None and not self._outcome.done():
            self._board.enter("saving", f"writing round {self.tried_round} to disk")
            await asyncio.wait([self._outcome])

    def note_resumed(self, counters: Counters) -> None:
        self._note_tried(counters)
        self._board.show_checkpoint(counters.round)

    def _note_tried(self, counters: Counters) -> None:
        self.tried_round, self.tried_evaluation = counters.round, counters.evaluated_round

    async def _report(self, round: int, written: Future[str]) -> None:
        """Reports the outcome. Ends as cancelled, without a report, if a newer snapshot replaced this one."""
        try:
            # A cancelled task must not cancel the writing.
            await asyncio.shield(asyncio.wrap_future(written))
        except StorageError as error:
            logger.error("%s; the node continues", error)
            self._board.show_failed_checkpoint(error.message)
        else:
            self._board.show_checkpoint(round)


class CheckpointWriter(Generic[Content]):
    """Hands snapshots to `write`, which blocks and returns the checkpoint's name.

    >>> writer = CheckpointWriter[str](lambda snapshot: f"round-{snapshot}")
    >>> writer.submit("7").result()
    'round-7'
    >>> writer.close()
    """

    def __init__(self, write: Callable[[Content], str]) -> None:
        self._write = write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._newest: tuple[Future[str], list[Content]] | None = None

    def submit(self, snapshot: Content) -> Future[str]:
        """Write this snapshot once the previous one is done. Only one thread at a time may call this.

        The result is the name of the checkpoint once it is on disk, or the error of `write`. Cancelled: a
        newer snapshot replaced this one before its turn.
        """
        if self._newest is not None:
            future, held = self._newest
            if future.cancel():
                # The executor keeps its arguments until it reaches them: release the tensors now.
                held.clear()
        held = [snapshot]
        # In the context of the caller: log lines say which policy they are about.
        future = self._thread.submit(copy_context().run, self._write_held, held)
        self._newest = future, held
        return future

    def close(self) -> None:
        """Wait until everything is written. Submit nothing afterwards."""
        self._thread.shutdown()

    def _write_held(self, held: list[Content]) -> str:
        return self._write(held.pop())
