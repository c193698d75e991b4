"""Weighs members' observations of each other for a plan, and finds members that the plan should leave out.

announcements, holders of stage 0 -> [corrected_costs] -> planning.py
                                  -> [useless_members] -> planning.py (spare)

Only a node that starts micro-batches sees what becomes of them, so only data nodes of the former plan are
witnesses. A single witness cannot do much: alone, it can make another member look at most LONE times slower
than it claims; together with others, the median counts. A member is left out only if at least two witnesses,
and more than half of all witnesses, found it broken. All of this is computed from signed announcements, so a
convener can add nothing to it.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low

import msgspec

from swarmnode.extensions.pipeline.plans.member_costs import (
    MAX_TOKEN_S,
    CostAnnouncement,
    MemberCosts,
    Observation,
    StageTiming,
)

CLAIM_WEIGHT = 4
"""Weight of a member's own claim, in observed micro-batches."""

LONE = 4.0
"""Largest slowdown that a single witness can attribute to a member."""

BROKEN = 10.0
"""Slowdown from which a member counts as not working."""

ENOUGH = 3
"""Micro-batches that a witness must have observed to find a member broken."""

MIN_WITNESSES = 2
"""Number of witnesses that must find a member broken before it is left out."""


def corrected_costs(
    announcements: Sequence[CostAnnouncement], stage_of: Mapping[str, int]
) -> tuple[MemberCosts, ...]:
    """Return the members' costs, corrected by the observations that count and sorted by peer id. Each member
    has one announcement.

    The correction is the median over the witnesses, with one vote each regardless of what they say. The
    claim keeps more weight while few micro-batches were observed. While liars are fewer than honest
    witnesses, no member can make another look slow or itself look fast. No member is treated as faster than
    it claims. `stage_of`: by peer id, under the former plan.
    """
    words = _words(announcements, stage_of)
    members = sorted((each.member for each in announcements), key=lambda member: member.peer_id)
    return tuple(_corrected(member, [*words[member.peer_id].values()]) for member in members)


def _corrected(member: MemberCosts, said: Sequence[Observation]) -> MemberCosts:
    """Return a claim blended with the observations of it, or the claim itself if there are none."""
    if not said:
        return member
    micro_batches = median_low([each.micro_batches for each in said])
    slowdown = median_low([each.slowdown for each in said])
    if len(said) < MIN_WITNESSES:
        slowdown = min(slowdown, LONE)
    trust = micro_batches / (micro_batches + CLAIM_WEIGHT)
    factor = 1.0 + (max(1.0, slowdown) - 1.0) * trust
    timings = tuple(
        StageTiming(t.layers, min(t.forward_s * factor, MAX_TOKEN_S), min(t.backward_s * factor, MAX_TOKEN_S))
        for t in member.timings
    )
    return msgspec.structs.replace(member, timings=timings)


def useless_members(announcements: Sequence[CostAnnouncement], stage_of: Mapping[str, int]) -> frozenset[str]:
    """Return the members that accept micro-batches but do no work, according to more than half of the other
    data nodes."""
    present = {each.member.peer_id for each in announcements}
    witnesses = _witnesses(stage_of) & present
    found: set[str] = set()
    for peer, said in _words(announcements, stage_of).items():
        against = sum(map(is_broken, said.values()))
        if against >= MIN_WITNESSES and 2 * against > len(witnesses - {peer}):
            found.add(peer)
    return frozenset(found)


def is_broken(said: Observation) -> bool:
    """Return True if this observation counts towards leaving a member out."""
    return said.slowdown >= BROKEN and said.micro_batches >= ENOUGH


def _witnesses(stage_of: Mapping[str, int]) -> frozenset[str]:
    return frozenset(peer for peer, stage in stage_of.items() if stage == 0)


def _words(
    announcements: Sequence[CostAnnouncement], stage_of: Mapping[str, int]
) -> Mapping[str, Mapping[str, Observation]]:
    """Return the observations of each announced member, by witness."""
    witnesses = _witnesses(stage_of)
    found = {each.member.peer_id: dict[str, Observation]() for each in announcements}
    for each in announcements:
        if each.member.peer_id in witnesses:
            for peer in found.keys() & each.observed.keys():
                found[peer][each.member.peer_id] = each.observed[peer]
    return found
