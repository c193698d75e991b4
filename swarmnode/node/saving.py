"""The node's side of a checkpoint: taken between two rounds, written beside the next ones.

node.py -> [Saving] -> learner.save -> the disk, in its own time -> status board

A disk that is slow or full costs no round: what is on it is said when it is on it, what failed is said and
logged, and the node goes on.
"""

import asyncio
import logging
from concurrent.futures import Future

from swarmnode.errors import StorageError
from swarmnode.node.board import StatusBoard
from swarmnode.node.learner import Learner
from swarmnode.node.workers import Workers
from swarmnode.training.records import Counters

logger = logging.getLogger(__name__)


class Saving:
    """Takes snapshots and tells the board what becomes of them."""

    def __init__(self, learner: Learner, workers: Workers, board: StatusBoard) -> None:
        self._learner = learner
        self._workers = workers
        self._board = board
        self._tasks: asyncio.TaskGroup | None = None
        self.tried_round: int | None = None
        """The last round that a checkpoint was begun of, or that the run resumed from."""
        self.tried_evaluation: int | None = None
        """The round of the newest evaluation that is part of it."""
        self._outcome: asyncio.Task[None] | None = None
        """The task that writes the newest snapshot."""

    def report_in(self, tasks: asyncio.TaskGroup) -> None:
        """Lets tasks of this group wait for the disk; to be called first. An error but StorageError ends
        it."""
        self._tasks = tasks

    async def save(self, counters: Counters, exchange: bytes) -> None:
        """Take a snapshot and return; what becomes of it is told to the board."""
        assert self._tasks is not None, "nobody would hear of an error"
        self._board.enter("saving", f"checkpoint of round {counters.round}")
        self._tried(counters)
        written = await self._workers.learn(self._learner.save, counters, exchange)
        self._outcome = self._tasks.create_task(self._tell(counters.round, written))

    async def settled(self) -> None:
        """Wait until the newest snapshot is on disk, or is known not to be."""
        if self._outcome is not None and not self._outcome.done():
            self._board.enter("saving", f"round {self.tried_round} is on its way to the disk")
            await asyncio.wait([self._outcome])

    def resumed(self, counters: Counters) -> None:
        self._tried(counters)
        self._board.saved(counters.round)

    def _tried(self, counters: Counters) -> None:
        self.tried_round, self.tried_evaluation = counters.round, counters.evaluated_round

    async def _tell(self, round: int, written: Future[str]) -> None:
        """Ends as cancelled, saying nothing, when a newer snapshot took this one's place."""
        try:
            # A cancelled task must not cancel the writing.
            await asyncio.shield(asyncio.wrap_future(written))
        except StorageError as error:
            logger.error("%s; the node goes on", error)
            self._board.not_saved(error.message)
        else:
            self._board.saved(round)
