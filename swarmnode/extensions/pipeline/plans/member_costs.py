"""Costs of members and links: measured, announced and checked.

link_probes.py -> [MemberCosts, LinkCosts, CostAnnouncement] -> observations.py -> partition.py,
    planning_costs.py

A claim is used only for planning, and only while it is fresh. If a member lies about its speed, the other
members' observations correct it: each announces how much longer the member took than it claimed.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS

MAX_TIMINGS = 16
MAX_LAYERS = 512
MAX_LINKS = 512
"""Limit on the links that a member announces: the largest number of members in an instance."""
LEAST_TOKEN_S = 1e-12
"""Lower bound of an announced time. No device is faster, and division by it stays finite."""
MAX_TOKEN_S = 100.0
"""Upper bound of an announced time. A member that needs longer per token for a few layers is no use."""
MAX_BYTES = 2**50
MAX_SLOTS = 1024
MAX_LATENCY_S = 60.0
MAX_BYTES_PER_S = 1e12
MIN_BYTES_PER_S = 1.0
MAX_SLOWDOWN = 1000.0
"""Bound of an observed slowdown. A member more than this much slower than it claims is broken, not slow."""
MAX_AGE_S = 1800.0
"""Older claims are not used for planning: home machines and home links change within the hour."""
MAX_CLOCK_SKEW_S = 120.0
"""Tolerated clock difference, as for rollouts (exchange/limits.py): home machines without NTP drift by about
this much."""

PeerId = Annotated[str, Meta(min_length=1, max_length=MAX_PEER_ID_CHARS)]
Seconds = Annotated[float, Meta(ge=LEAST_TOKEN_S, le=MAX_TOKEN_S)]


class StageTiming(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Speed of a member that holds this number of layers."""

    layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    forward_s: Seconds
    """Seconds of one token."""
    backward_s: Seconds


class MemberCosts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The costs that a member claims for itself."""

    peer_id: PeerId
    free_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)]
    memory_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    """Micro-batches in flight that the member is willing to hold, if it has the memory."""
    holds_data: bool
    timings: Annotated[tuple[StageTiming, ...], Meta(min_length=1, max_length=MAX_TIMINGS)]
    """Timings by number of layers, in rising order."""
    measured_at_s: Annotated[float, Meta(ge=0, le=2**40)]
    """Seconds since the epoch, by the member's own clock."""


class LinkCosts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Costs of one direction of a link."""

    latency_s: Annotated[float, Meta(ge=0, le=MAX_LATENCY_S)]
    """Seconds one way, for an empty message."""
    bytes_per_s: Annotated[float, Meta(ge=MIN_BYTES_PER_S, le=MAX_BYTES_PER_S)]

    def transfer_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


class Observation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The speed of a member as observed by another member."""

    slowdown: Annotated[float, Meta(ge=1 / MAX_SLOWDOWN, le=MAX_SLOWDOWN)]
    """Observed time divided by claimed time."""
    micro_batches: Annotated[int, Meta(ge=1, le=2**31)]


class CostAnnouncement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One member's contribution to planning: claims, links and observations."""

    member: MemberCosts
    links: Annotated[dict[PeerId, LinkCosts], Meta(max_length=MAX_LINKS)]
    """Costs of the links from this member to others."""
    observed: Annotated[dict[PeerId, Observation], Meta(max_length=MAX_LINKS)]


def check(announcement: CostAnnouncement, *, author: str, now_s: float) -> None:
    """Raises Rejected for contradictions that the types allow: not_own, malformed, stale. NaN and infinity
    fail every bound already."""
    member = announcement.member
    if member.peer_id != author or author in announcement.links or author in announcement.observed:
        raise Rejected("not_own", "a member speaks for itself, and of others only")
    if any(later.layers <= former.layers for former, later in pairwise(member.timings)):
        raise Rejected("malformed", "timings are not by rising number of layers")
    if not is_fresh(member, now_s):
        raise Rejected("stale", f"measured {now_s - member.measured_at_s:.0f} s ago")


def is_fresh(member: MemberCosts, now_s: float) -> bool:
    """Return True if the member's claims are recent enough for planning."""
    return -MAX_CLOCK_SKEW_S <= now_s - member.measured_at_s <= MAX_AGE_S


def forward_s(member: MemberCosts, layers: int) -> float:
    """Return the seconds of one token's forward pass through this number of layers: interpolated linearly
    between measured numbers, and in proportion beyond them."""
    return _interpolated([(t.layers, t.forward_s) for t in member.timings], layers)


def backward_s(member: MemberCosts, layers: int) -> float:
    """Return the seconds of one token's backward pass through this number of layers, interpolated like
    `forward_s`."""
    return _interpolated([(t.layers, t.backward_s) for t in member.timings], layers)


def _interpolated(points: Sequence[tuple[int, float]], layers: int) -> float:
    first, last = points[0], points[-1]
    if layers <= first[0]:
        return first[1] * layers / first[0]
    for (fewer, low), (more, high) in pairwise(points):
        if layers <= more:
            # A sum instead of a difference: nothing rounds to zero if the times are very different.
            return (low * (more - layers) + high * (layers - fewer)) / (more - fewer)
    return last[1] * layers / last[0]
