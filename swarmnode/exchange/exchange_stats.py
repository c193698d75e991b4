"""The figures of an exchange, for the screen, the metrics and the log.

Ledger (ExchangeCounts), Helping, buffer, pool -> [ExchangeStats] -> NodeStatus
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec


class HelpStats(msgspec.Struct, frozen=True):
    """Requests for help (helping.py) and what followed from them, since the start."""

    asked: int = 0
    """Requests for help that we sent: no answer of ours was right."""
    heard: int = 0
    """Requests of others that were heard."""
    answered: int = 0
    """Own groups that were announced again because somebody had asked."""
    tried: int = 0
    """Examples that others could not answer and that we took on."""
    dropped: int = 0
    """Requests of others that were not heard: too many, too old, or not of our swarm or tasks."""


class PeerFigures(msgspec.Struct, frozen=True):
    """A peer as the exchange knows it."""

    peer: str
    """Its peer id."""
    accepted: int
    """Groups of it that passed all checks."""
    dropped: int
    """Things of it that were not used by its fault, since the start."""
    score: float
    """100 for who never did wrong; below 20 it is not listened to."""
    banned: bool
    trust: str
    """proven, slow or newcomer."""
    refused: Mapping[str, int] = {}
    """How many things of it were not used, or counted against it, by drop_reasons.Reason, since the start."""
    paused_s: float = 0.0
    """Seconds until it is fetched from again, since the last fetch gave nothing. 0: it is not paused."""


class ReceiptStats(msgspec.Struct, frozen=True):
    """Thanks of others to us (receipts.py): what they say, which nobody can prove."""

    groups: int = 0
    """Times that a group of ours was learnt from, by receipts; each node counts each group once."""
    answers: int = 0
    """Answers in these groups that were learnt from."""
    nodes: int = 0
    """Nodes that said so."""
    nodes_lately: int = 0
    """Nodes among them that said so in the last seven days."""
    sent: int = 0
    """Receipts that we sent, since the start."""
    dropped: int = 0
    """Receipts of others that were not taken, since the start: too many, too old, or not to be believed."""


class NodesOf(msgspec.Struct, frozen=True):
    """Nodes that have something in common."""

    name: str
    """The task or the version, in words of theirs."""
    nodes: int


class HealthStats(msgspec.Struct, frozen=True):
    """The swarm as this node hears it (swarm_health.py), itself left out: names, and what they say."""

    nodes: int = 0
    """Nodes that were heard in the last quarter of an hour."""
    known: int = 0
    """Nodes among them of whom a group passed all checks."""
    reached: int = 0
    """Nodes among them that we are connected to."""
    out_of_reach: int = 0
    """Nodes among them that we dialled in vain: what they have comes through others."""
    reachable_share: float | None = None
    """Share of those connected in those connected or dialled. None: nobody was."""
    headers_per_s: float | None = None
    """Announcements a second, over the last minute, of whatever task."""
    different_tasks: int = 0
    """Tasks that they announce groups of."""
    different_versions: int = 0
    """Versions of swarmnode, by the word of those who sent receipts."""
    tasks: tuple[NodesOf, ...] = ()
    """Up to 16 of these tasks, those of most nodes first."""
    versions: tuple[NodesOf, ...] = ()
    """Up to 16 of these versions."""


@dataclass(kw_only=True)
class ExchangeCounts:
    """Counters of an exchange since it was made."""

    headers_seen: int = 0
    """Gossip messages that reached us, whatever became of them."""
    headers_accepted: int = 0
    fetched: int = 0
    """Bodies received from peers."""
    accepted: int = 0
    """Groups that passed every check here."""
    drawn: int = 0
    """Groups handed to the trainer."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Dropped messages, counted by reason (drop_reasons.py)."""
    published: int = 0
    """Own groups announced."""
    unpublished: Counter[str] = field(default_factory=Counter[str])
    """Own groups not announced, by reason."""
    served: int = 0
    """Bodies given to peers."""
    through_holders: int = 0
    """Bodies received from a peer other than their author."""
    bytes_in: int = 0
    """Headers and bodies received, as their authors sent them (without gossip's own overhead)."""
    bytes_out: int = 0

    def counted(self) -> dict[str, Any]:
        """Returns a copy of the counters by name."""
        counts = {one.name: getattr(self, one.name) for one in fields(ExchangeCounts)}
        return counts | {"dropped": self.dropped.copy(), "unpublished": self.unpublished.copy()}


@dataclass(kw_only=True)
class ExchangeStats(ExchangeCounts):
    """Figures of an exchange since it was made, and of what it holds now."""

    headers_waiting: int
    buffered: int
    banned_peers: tuple[str, ...]
    peers: tuple[PeerFigures, ...]
    """Peers that there is most to say of."""
    pulled: int
    """Bodies of others that we fetched because somebody asked us for them."""
    upload_bytes_per_s: float
    """Most that bodies may take of the upload, as it is set."""
    help: HelpStats
    receipts: ReceiptStats
    health: HealthStats
