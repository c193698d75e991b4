"""Weighs members' observations of each other for a plan, and finds members that the plan should leave out.

announcements, holders of stage 0 -> [counted_observations] -> member_costs.corrected_costs
                                  -> [useless_members] -> planning.py (spare)

Only a node that starts micro-batches sees what becomes of them, so only data nodes of the former plan are
witnesses. A single witness cannot do much: alone, it can make another member look at most LONE times slower
than it claims; together with others, the median counts. A member is left out only if at least two witnesses,
and more than half of all witnesses, found it broken. All of this is computed from signed announcements, so a
convener can add nothing to it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, Observation

LONE = 4.0
"""Largest slowdown that a single witness can attribute to a member."""

BROKEN = 10.0
"""Slowdown from which a member counts as not working."""

ENOUGH = 3
"""Micro-batches that a witness must have observed to find a member broken."""

MIN_WITNESSES = 2
"""Number of witnesses that must find a member broken before it is left out."""


def counted_observations(
    announcements: Sequence[CostAnnouncement], stage_of: Mapping[str, int]
) -> tuple[CostAnnouncement, ...]:
    """Return the announcements with only the observations that count. No member is treated as faster than it
    claims.

    `stage_of`: by peer id, under the former plan.
    """
    words = _words(announcements, stage_of)
    counts = {peer: len(said) for peer, said in words.items()}
    witnesses = _witnesses(stage_of)

    def bounded(peer: str, said: Observation) -> Observation:
        most = LONE if counts[peer] < MIN_WITNESSES else said.slowdown
        return Observation(max(1.0, min(said.slowdown, most)), said.micro_batches)

    return tuple(
        msgspec.structs.replace(
            each,
            observed={
                peer: bounded(peer, said)
                for peer, said in each.observed.items()
                if each.member.peer_id in witnesses and peer in words
            },
        )
        for each in announcements
    )


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
