"""What came in from peers and could not be used: counted by cause, told once, never a fault of the host.

p2pd_control.py, p2pd.py, memory.py -> [Skipped] -> HostStatus.skipped -> status, metrics
"""

import logging
from collections import Counter
from enum import StrEnum

logger = logging.getLogger(__name__)


class Cause(StrEnum):
    """Why something was skipped. Values never come from the wire, so their number is bounded."""

    GOSSIP_AUTHOR = "gossip_author"
    """A message whose author is named as no libp2p host may be named."""
    GOSSIP_SIZE = "gossip_size"
    """A message over MAX_GOSSIP_BYTES; its author is told to whoever reads the topic."""
    PROVIDER_RECORD = "provider_record"
    CONNECTION = "connection"
    ADDRESSES = "addresses"
    STREAM = "stream"


def oversized_story(author: str, size_bytes: int) -> str:
    """What is told of a gossip message that is too long."""
    return f"{author} gossiped {size_bytes} bytes at once"


class Skipped:
    """Counters by cause. The first of each cause is worth a line of the log, a flood is not."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, cause: Cause, story: str) -> None:
        """Count one; `story` says what it was and may quote a peer."""
        self._counts[cause] += 1
        if self._counts[cause] == 1:
            logger.warning("skipped what a peer sent: %s; more of these (%s) are only counted", story, cause)

    def counts(self) -> dict[str, int]:
        """How many of each cause, of those that there were."""
        return dict(self._counts)
