"""Short measurements between members.

incoming_streams.py, member_streams.py <- [LinkProber] -> LinkCosts (member_costs.py)

A probe is random bytes; the answer is their hash, so nobody can answer before all of them have arrived.
Latency is half the median round trip of tiny probes. Bandwidth comes from one bulk transfer, which grows
until it takes long enough to tell the line from its latency. What we answer is bounded by size and rate.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high, median_low
from typing import Annotated

from msgspec import Meta

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import NetworkError, PeerUnreachable, Rejected
from swarmnode.extensions.pipeline.plans.member_costs import (
    MAX_AGE_S,
    MAX_BYTES_PER_S,
    MAX_LATENCY_S,
    MIN_BYTES_PER_S,
    LinkCosts,
)
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MemberMessage, MemberService
from swarmnode.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
MAX_PROBE_BYTES = 4 * 1024 * 1024
"""0.2 s of a line of 170 Mbit/s: faster lines are not what a plan has to be careful about."""
FIRST_BULK_BYTES = 64 * 1024
BULK_GROWTH = 4
ECHO_BYTES = 16
LEAST_TRANSFER_S = 1e-4
"""Time below which a transfer cannot be told from the noise of the clock."""
BYTES_PER_S = 512 * 1024.0
BURST_BYTES = 8.0 * 1024 * 1024
"""Bytes that one peer may send at once: two full probes, and one more every eight seconds."""
LEAST_PRICE_BYTES = 128 * 1024
"""Bytes that a probe counts as at least: 64 echoes at once, and four more a second."""
MAX_TRACKED_PEERS = 1024
"""Bound of the tracked peers: as many as could be members. The one that was not heard of for longest is
forgotten."""
TICK_S = 1.0
ECHOES = 7
"""Round trips of which the median is taken."""
LONG_ENOUGH_S = 0.2
"""Time beyond the round trip from which a bulk transfer tells the bandwidth."""
TIMEOUT_S = 10.0
"""Limit of each request."""
REFRESH_S = 300.0
"""Time after which a link is measured again, also when it failed."""

RECENT = 5
"""Measurements of a link of which the median counts: two outliers in five leave no trace."""


class Probe(MemberMessage, frozen=True, tag="probe"):
    """Asks for the hash of the random bytes behind it."""

    size_bytes: Annotated[int, Meta(ge=1, le=MAX_PROBE_BYTES)]

    @property
    def payload_bytes(self) -> int:
        return self.size_bytes


@dataclass(slots=True)
class _Link:
    """Our measurements of the link to one peer."""

    recent: deque[tuple[float, LinkCosts]] = field(
        default_factory=lambda: deque[tuple[float, LinkCosts]](maxlen=RECENT)
    )
    """Latest measurements, each with its time."""
    due_at_s: float = 0.0


class LinkProber:
    """Measures our links to other members, one at a time, so that probes do not slow each other down, and
    answers their probes.

    prober = LinkProber(streams)
    prober.begin()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(prober.run(lambda: members))
    """

    def __init__(self, streams: MemberStreams, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams = streams
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self._allowances = BoundedDict[str, TokenBucket](MAX_TRACKED_PEERS)

    def begin(self) -> None:
        """Answer the probes of others from now on."""
        self._streams.incoming.begin(MemberService.PROBES, ServiceHandler(Probe, self.answer, knows=None))

    def allows(self, peer_id: str, size_bytes: int) -> bool:
        """Count a probe of this many bytes. Returns False if the peer is beyond its allowance."""
        allowance = self._allowances.get(peer_id) or TokenBucket(BYTES_PER_S, BURST_BYTES)
        self._allowances[peer_id] = allowance
        return allowance.take(max(size_bytes, LEAST_PRICE_BYTES), now=self._clock())

    async def answer(self, incoming: Incoming[Probe]) -> Reply:
        """Return the hash of a probe. Raises Rejected: too_often, before its bytes are read."""
        if not self.allows(incoming.peer_id, incoming.message.size_bytes):
            raise Rejected(Refusal.TOO_OFTEN)
        async with incoming.payload() as probe:
            return Reply(_digest(probe))

    async def run(self, members: Callable[[], Sequence[str]]) -> None:
        """Keep the links to `members` measured, until cancelled."""
        while True:
            await self.refresh(members())
            await asyncio.sleep(TICK_S)

    async def refresh(self, members: Sequence[str]) -> None:
        """Measure the links that are due, and forget those to strangers. A peer that does not answer keeps
        its last figures."""
        others = [peer_id for peer_id in members if peer_id != self._streams.peer_id]
        self._links = {peer_id: self._links.get(peer_id) or _Link() for peer_id in others}
        for peer_id in others:
            link = self._links[peer_id]
            if self._clock() < link.due_at_s:
                continue
            try:
                costs = await self.measure(peer_id)
                link.recent.append((self._clock(), costs))
            except NetworkError as error:
                logger.debug("no probe to %s got through: %s", peer_id, error)
            link.due_at_s = self._clock() + REFRESH_S

    def links(self) -> dict[str, LinkCosts]:
        """Return the link to each peer that was measured lately: the medians of the latest measurements."""
        oldest_s = self._clock() - MAX_AGE_S
        fresh = {
            peer_id: [costs for at_s, costs in link.recent if at_s >= oldest_s]
            for peer_id, link in self._links.items()
        }
        return {
            peer_id: LinkCosts(
                median_low([each.latency_s for each in found]),
                median_high([each.bytes_per_s for each in found]),
            )
            for peer_id, found in fresh.items()
            if found
        }

    async def measure(self, peer_id: str) -> LinkCosts:
        """Return one measurement. Raises NetworkError: no answer, a wrong one, or a refusal."""
        trips = [await self._timed(peer_id, ECHO_BYTES) for _ in range(ECHOES)]
        trip_s = median(trips)
        size_bytes = FIRST_BULK_BYTES
        while True:
            beyond_s = await self._timed(peer_id, size_bytes) - trip_s
            if beyond_s >= LONG_ENOUGH_S or size_bytes >= MAX_PROBE_BYTES:
                return _link_costs(trip_s / 2, size_bytes / max(beyond_s, LEAST_TRANSFER_S))
            size_bytes = min(size_bytes * BULK_GROWTH, MAX_PROBE_BYTES)

    async def _timed(self, peer_id: str, size_bytes: int) -> float:
        """Return the seconds until this many bytes have arrived and the answer is back."""
        probe = secrets.token_bytes(size_bytes)
        start = self._clock()
        try:
            answer = await self._streams.ask(
                peer_id, MemberService.PROBES, Probe(size_bytes), bytes,
                timeout_s=TIMEOUT_S, payload=probe,
            )  # fmt: skip
        except Rejected as error:
            raise PeerUnreachable(f"{peer_id} refused a probe: {error}") from error
        elapsed_s = self._clock() - start
        if answer != _digest(probe):
            raise PeerUnreachable(f"{peer_id} answered wrongly to a probe")
        return elapsed_s


def _digest(probe: bytes | bytearray) -> bytes:
    return hashlib.blake2b(probe, digest_size=DIGEST_BYTES).digest()


def _link_costs(latency_s: float, bytes_per_s: float) -> LinkCosts:
    """Return the costs of a link, clamped to the bounds of an announcement."""
    return LinkCosts(
        min(max(latency_s, 0.0), MAX_LATENCY_S), min(max(bytes_per_s, MIN_BYTES_PER_S), MAX_BYTES_PER_S)
    )
