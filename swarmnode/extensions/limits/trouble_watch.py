"""Notices that a node does nothing any more, or cannot save what it learnt, and says so once.

NodeStatus -> at_work.py -> [trouble_of] -> [TroubleWatch] -> the log, notices.py
"""

import logging
import time
from collections.abc import Callable

from swarmnode.errors import plain_error
from swarmnode.node.showing.at_work import at_work
from swarmnode.node.showing.node_status import NodeStatus

logger = logging.getLogger(__name__)

BETWEEN_S = 600.0
"""The least time between two notices of a node that runs: trouble that comes and goes is told of once."""


def trouble_of(status: NodeStatus, now_s: float) -> str:
    """Returns what is wrong with a node that runs, the stage that is stuck and since when; empty: nothing."""
    well, words = at_work(status, now_s)
    if not well:
        since = time.strftime("%H:%M", time.localtime(status.phase.since))
        return f"stuck: {words}, since {since}"
    return "its last checkpoint could not be written" if status.checkpoint.error else ""


def ended_by(error: Exception, status: NodeStatus) -> str:
    """Returns the end of a node in words: the kind of its error, not its text, which may name files."""
    kind, number = type(plain_error(error)).__name__, status.progress.round + 1
    return f"{status.name} ended by {kind} in round {number}, {status.phase.name}: see its log"


class TroubleWatch:
    """Tells of each trouble of a node when it begins."""

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status, self._tell, self._clock = status, tell, clock
        self._is_told = False
        self._told_s = float("-inf")

    def look(self) -> None:
        """Looks for trouble, and tells of what is new."""
        now_s, status = self._clock(), self._status()
        trouble = trouble_of(status, now_s)
        if trouble and not self._is_told:
            logger.warning("%s", trouble)
            if now_s - self._told_s >= BETWEEN_S:
                self._told_s = now_s
                self._tell(f"{status.name}: {trouble}")
        self._is_told = bool(trouble)
