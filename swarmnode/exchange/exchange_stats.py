"""The figures of an exchange, for the screen, the metrics and the log.

Ledger (ExchangeCounts), Helping, buffer, pool -> [ExchangeStats] -> NodeStatus
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec


class HelpStats(msgspec.Struct, frozen=True):
    """Requests for help (helping.py) and their outcomes, since the start."""

    asked: int = 0
    """Requests for help that we sent: no answer of ours was right."""
    heard: int = 0
    """Requests of others that we heard."""
    answered: int = 0
    """Own groups that were announced again because another node had asked."""
    tried: int = 0
    """Examples that others could not answer and that we took on."""
    dropped: int = 0
    """Requests of others that were dropped: too many, too old, or not of our swarm or tasks."""


class PeerFigures(msgspec.Struct, frozen=True):
    """A peer as the exchange knows it."""

    peer: str
    """Its peer id."""
    accepted: int
    """Groups from it that passed all checks."""
    dropped: int
    """Things from it that were not used through its own fault, since the start."""
    score: float
    """100 for a peer without offences; below 20 it is not listened to."""
    banned: bool
    trust: str
    """The peer's trust: proven, slow or newcomer."""
    refused: Mapping[str, int] = {}
    """Number of things from it that were not used, or counted against it, by drop_reasons.Reason, since the
    start."""
    paused_s: float = 0.0
    """Seconds until it is fetched from again, after its last fetch gave nothing. 0: it is not paused."""


class ReceiptStats(msgspec.Struct, frozen=True):
    """Receipts from others to us (receipts.py): their statements, which nobody can prove."""

    groups: int = 0
    """Times that a group of ours was learnt from, according to receipts; each node counts each group once."""
    answers: int = 0
    """Answers in these groups that others learnt from."""
    nodes: int = 0
    """Nodes that said so."""
    nodes_lately: int = 0
    """Nodes among them that said so in the last seven days."""
    sent: int = 0
    """Receipts that we sent, since the start."""
    dropped: int = 0
    """Receipts of others that were dropped, since the start: too many, too old, or not believable."""


class NodesOf(msgspec.Struct, frozen=True):
    """Nodes that have something in common."""

    name: str
    """The task or the version, in their own words."""
    nodes: int


class HealthStats(msgspec.Struct, frozen=True):
    """The swarm as this node hears it (swarm_health.py), without itself: names, and their statements."""

    nodes: int = 0
    """Nodes heard in the last quarter of an hour."""
    known: int = 0
    """Nodes among them from which a group passed all checks."""
    reached: int = 0
    """Nodes among them that we are connected to."""
    out_of_reach: int = 0
    """Nodes among them that we dialled in vain: their groups come through others."""
    reachable_share: float | None = None
    """Connected nodes as a share of those connected or dialled. None: there were none."""
    headers_per_s: float | None = None
    """Announcements a second, of any task, over the last minute."""
    different_tasks: int = 0
    """Number of tasks that they announce groups of."""
    different_versions: int = 0
    """Number of versions of swarmnode, as stated by nodes that sent receipts."""
    tasks: tuple[NodesOf, ...] = ()
    """Up to 16 of these tasks, those of most nodes first."""
    versions: tuple[NodesOf, ...] = ()
    """Up to 16 of these versions."""


@dataclass(kw_only=True)
class ExchangeCounts:
    """Counters of an exchange since it was made."""

    headers_seen: int = 0
    """Gossip messages that reached us, used or not."""
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

    def counts(self) -> dict[str, Any]:
        """Returns a copy of the counters by name."""
        counts = {one.name: getattr(self, one.name) for one in fields(ExchangeCounts)}
        return counts | {"dropped": self.dropped.copy(), "unpublished": self.unpublished.copy()}


@dataclass(kw_only=True)
class ExchangeStats(ExchangeCounts):
    """Figures of an exchange since it was made, and of its present contents."""

    headers_waiting: int
    fetching: int
    """Groups that are being fetched or judged."""
    buffered: int
    banned_peers: tuple[str, ...]
    peers: tuple[PeerFigures, ...]
    """The peers that we know most about."""
    pulled: int
    """Bodies of others that we fetched because peers asked us for them."""
    upload_bytes_per_s: float
    """Configured limit of the upload that bodies may take."""
    help: HelpStats
    receipts: ReceiptStats
    health: HealthStats
