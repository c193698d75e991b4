"""Counters of input from peers that could not be used: logged once, and never a fault of the host.

control_client.py, p2pd_host.py, memory_network.py -> [SkipCounters] -> HostStatus.skipped -> status, metrics
"""

import logging
from collections import Counter
from enum import StrEnum

logger = logging.getLogger(__name__)


class SkipCause(StrEnum):
    """The reasons for skipping input. Values never come from the wire, so their number is bounded."""

    GOSSIP_AUTHOR = "gossip_author"
    """A message whose author has an id that no libp2p host may have."""
    GOSSIP_SIZE = "gossip_size"
    """A message over MAX_GOSSIP_BYTES; the topic's reader learns its author."""
    PROVIDER_RECORD = "provider_record"
    CONNECTION = "connection"
    ADDRESSES = "addresses"
    STREAM = "stream"


def oversized_story(author: str, size_bytes: int) -> str:
    """Returns the log text for a gossip message that is too long."""
    return f"{author} gossiped {size_bytes} bytes at once"


class SkipCounters:
    """Counters by cause. The first of each cause is logged; a flood is not."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, cause: SkipCause, story: str) -> None:
        """Counts one skipped input. `story` describes it and may quote a peer."""
        self._counts[cause] += 1
        if self._counts[cause] == 1:
            logger.warning("skipped data from a peer: %s; more of these (%s) are only counted", story, cause)

    def counts(self) -> dict[str, int]:
        """Returns the counts of the causes that occurred."""
        return dict(self._counts)
