"""What members and links cost: measured, announced, checked, smoothed, corrected by what others see.

probes.py -> [MemberCosts, LinkCosts, CostAnnouncement] -> decoded, believed -> partition.py, measured.py

A claim is used for planning and for nothing else, and for no longer than it is fresh. A member that lies
about its speed is corrected by what the others see: each announces how much longer the member took than it
claimed, and all members take the median over the observers, so that they still plan from the same numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median, median_low
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.identity.keys import MAX_PEER_ID_CHARS
from swarmnode.pipeline.plans.partition import MAX_SPEED, MemberResources

MAX_ANNOUNCEMENT_BYTES = 64 * 1024
"""Claims of one member, links to MAX_LINKS others and its observations included."""
MAX_TIMINGS = 16
MAX_LAYERS = 512
MAX_LINKS = 512
"""The most links that a member announces: as many members as an instance may have."""
LEAST_TOKEN_S = 1e-12
"""No device computes faster, and what is divided by it stays a number."""
MAX_TOKEN_S = 100.0
"""A member that needs longer for one token of a few layers trains nothing."""
MAX_BYTES = 2**50
MAX_SLOTS = 1024
MAX_LATENCY_S = 60.0
MAX_BYTES_PER_S = 1e12
MIN_BYTES_PER_S = 1.0
MAX_SLOWDOWN = 1000.0
"""A member observed to be slower than this by its own claim is not slow but broken."""
MAX_AGE_S = 1800.0
"""Claims older than this are not planned with: home machines and home links change within the hour."""
MAX_CLOCK_SKEW_S = 120.0
"""The same as for rollouts (exchange/limits.py): home machines without NTP drift by about this much."""
RECENT = 5
"""Samples of which the median is taken: two outliers in five leave no trace."""
SMOOTHING = 0.3
"""Share of the new median in the smoothed value."""
CLAIM_WEIGHT = 4
"""The own claim counts like so many observed micro-batches."""

PeerId = Annotated[str, Meta(min_length=1, max_length=MAX_PEER_ID_CHARS)]
Seconds = Annotated[float, Meta(ge=LEAST_TOKEN_S, le=MAX_TOKEN_S)]


class StageTiming(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How fast a member computes so many layers at once."""

    layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    forward_s: Seconds
    """One token."""
    backward_s: Seconds


class MemberCosts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """What a member says of itself."""

    peer_id: PeerId
    free_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)]
    memory_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    """Micro-batches in flight that it is willing to hold, however much memory there is."""
    holds_data: bool
    timings: Annotated[tuple[StageTiming, ...], Meta(min_length=1, max_length=MAX_TIMINGS)]
    """Measured stages, sorted by rising number of layers."""
    measured_at_s: Annotated[float, Meta(ge=0, le=2**40)]
    """Seconds since the epoch, by its own clock."""


class LinkCosts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One direction of a link."""

    latency_s: Annotated[float, Meta(ge=0, le=MAX_LATENCY_S)]
    """One way, for a message without contents."""
    bytes_per_s: Annotated[float, Meta(ge=MIN_BYTES_PER_S, le=MAX_BYTES_PER_S)]

    def transfer_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


class Observation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How long a member really took, as another saw it."""

    slowdown: Annotated[float, Meta(ge=1 / MAX_SLOWDOWN, le=MAX_SLOWDOWN)]
    """Observed over claimed time."""
    micro_batches: Annotated[int, Meta(ge=1, le=2**31)]


class CostAnnouncement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that one member contributes to planning."""

    member: MemberCosts
    links: Annotated[dict[PeerId, LinkCosts], Meta(max_length=MAX_LINKS)]
    """Costs of the links from this member to others."""
    observed: Annotated[dict[PeerId, Observation], Meta(max_length=MAX_LINKS)]


_decoder = msgspec.msgpack.Decoder(CostAnnouncement)


def encode_announcement(announcement: CostAnnouncement) -> bytes:
    return msgspec.msgpack.encode(announcement, order="deterministic")


def decode_announcement(data: bytes, *, author: str, now_s: float) -> CostAnnouncement:
    """A foreign announcement, bounded and complete. Raises Rejected: too_large, malformed, not_own, stale."""
    if len(data) > MAX_ANNOUNCEMENT_BYTES:
        raise Rejected("too_large", f"{len(data)} bytes, at most {MAX_ANNOUNCEMENT_BYTES}")
    try:
        announcement = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("malformed", str(error)) from error
    check(announcement, author=author, now_s=now_s)
    return announcement


def check(announcement: CostAnnouncement, *, author: str, now_s: float) -> None:
    """What types cannot say; NaN and the infinities fall outside of any bound. Raises Rejected."""
    member = announcement.member
    if member.peer_id != author or author in announcement.links or author in announcement.observed:
        raise Rejected("not_own", "a member speaks for itself, and of others only")
    if any(later.layers <= former.layers for former, later in pairwise(member.timings)):
        raise Rejected("malformed", "timings are not by rising number of layers")
    if not is_fresh(member, now_s):
        raise Rejected("stale", f"measured {now_s - member.measured_at_s:.0f} s ago")


def is_fresh(member: MemberCosts, now_s: float) -> bool:
    """Whether claims may still be planned with."""
    return -MAX_CLOCK_SKEW_S <= now_s - member.measured_at_s <= MAX_AGE_S


@dataclass(frozen=True, slots=True)
class Smoothed:
    """A measured quantity: exponential mean of the medians of the last RECENT samples, the median at first.

    >>> level = None
    >>> for sample in (1.0, 1.0, 1.0, 50.0, 1.0):
    ...     level = smoothed(level, sample, at_s=0.0)
    >>> level.value
    1.0
    """

    recent: tuple[float, ...]
    value: float
    updated_at_s: float

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.updated_at_s <= MAX_AGE_S


def smoothed(before: Smoothed | None, sample: float, *, at_s: float) -> Smoothed:
    """The quantity after one more sample. What was last measured too long ago is forgotten.

    Raises ValueError for a sample that is negative or not finite.
    """
    if not (isfinite(sample) and sample >= 0):
        raise ValueError(f"{sample} was measured, that cannot be")
    if before is None or not before.is_fresh(at_s):
        return Smoothed((sample,), sample, at_s)
    recent = (*before.recent, sample)[-RECENT:]
    # Of two samples one may be the outlier: the lower is nearer to what the link or device can do.
    middle = median(recent) if len(recent) > 2 else min(recent)
    if len(recent) < RECENT:
        return Smoothed(recent, middle, at_s)
    return Smoothed(recent, before.value + SMOOTHING * (middle - before.value), at_s)


def believed(announcements: Iterable[CostAnnouncement]) -> tuple[MemberCosts, ...]:
    """The members' costs, corrected by what others observed, sorted by peer id.

    Median over the observers (one vote each, whatever it says), drawn towards the claim while few
    micro-batches were seen. With fewer liars than honest observers no member can make another look slow, or
    itself fast.
    """
    # Of two announcements of a member the newer counts; their bytes decide between equals.
    ordered = sorted(announcements, key=lambda each: (each.member.measured_at_s, encode_announcement(each)))
    by_peer = {each.member.peer_id: each for each in ordered}
    return tuple(_corrected(by_peer[peer].member, by_peer.values()) for peer in sorted(by_peer))


def observed(costs: MemberCosts, slowdowns: Sequence[float], micro_batches: int) -> MemberCosts:
    """A claim blended with what observers saw: `slowdowns`, observed over claimed time, one for each of them.

    `micro_batches` is how many the median observer saw. Without observers it is the claim.
    """
    if not slowdowns:
        return costs
    trust = micro_batches / (micro_batches + CLAIM_WEIGHT)
    factor = 1.0 + (median_low(slowdowns) - 1.0) * trust
    timings = tuple(
        StageTiming(t.layers, min(t.forward_s * factor, MAX_TOKEN_S), min(t.backward_s * factor, MAX_TOKEN_S))
        for t in costs.timings
    )
    return msgspec.structs.replace(costs, timings=timings)


def _corrected(member: MemberCosts, announcements: Iterable[CostAnnouncement]) -> MemberCosts:
    seen = [each.observed[member.peer_id] for each in announcements if member.peer_id in each.observed]
    batches = median_low([each.micro_batches for each in seen]) if seen else 0
    return observed(member, [each.slowdown for each in seen], batches)


def forward_s(member: MemberCosts, layers: int) -> float:
    """One token through so many layers: between two measured numbers linear, beyond them in proportion."""
    return _interpolated([(t.layers, t.forward_s) for t in member.timings], layers)


def backward_s(member: MemberCosts, layers: int) -> float:
    """The same for the backward pass."""
    return _interpolated([(t.layers, t.backward_s) for t in member.timings], layers)


def as_member(costs: MemberCosts, *, layer_forward_s: float) -> MemberResources:
    """What partition.py needs to know; `layer_forward_s`: one token, one layer, on the reference device.

    A claim beyond all bounds is cut to them: one member's words keep nobody from planning.
    """
    most = costs.timings[-1]
    speed = min(MAX_SPEED, layer_forward_s * most.layers / most.forward_s)
    return MemberResources(costs.peer_id, costs.free_bytes, speed, costs.holds_data)


def _interpolated(points: Sequence[tuple[int, float]], layers: int) -> float:
    first, last = points[0], points[-1]
    if layers <= first[0]:
        return first[1] * layers / first[0]
    for (fewer, low), (more, high) in pairwise(points):
        if layers <= more:
            # Summed, not subtracted: between very different times nothing rounds to zero.
            return (low * (more - layers) + high * (layers - fewer)) / (more - fewer)
    return last[1] * layers / last[0]
