"""The figures of an exchange, for the screen, the metrics and the log.

Ledger, Helping, buffer, pool -> [ExchangeStats] -> NodeStatus
"""

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ExchangeStats:
    """Figures of an exchange since it was made, and of what it holds now."""

    headers_seen: int
    """Gossip messages that reached us, whatever became of them."""
    headers_accepted: int
    headers_waiting: int
    headers_overflowed: int
    """Lost because we read too slowly."""
    fetched: int
    """Bodies received from peers."""
    accepted: int
    """Groups that passed every check here."""
    drawn: int
    """Groups handed to the trainer."""
    buffered: int
    dropped: Mapping[str, int]
    """Dropped messages, counted by reason (limits.py)."""
    accepted_by_peer: Mapping[str, int]
    banned_peers: tuple[str, ...]
    published: int
    """Own groups announced."""
    unpublished: Mapping[str, int]
    """Own groups not announced, by reason."""
    served: int
    """Bodies given to peers."""
    pulled: int
    """Bodies of others that we fetched because somebody asked us for them."""
    through_holders: int
    """Bodies received from a peer other than their author."""
    bytes_in: int
    """Headers and bodies received, as their authors sent them (without gossip's own overhead)."""
    bytes_out: int
    upload_bytes_per_s: float
    """Most that bodies may take of the upload, as it is set."""
    judgements_stuck: int
    help: HelpStats
