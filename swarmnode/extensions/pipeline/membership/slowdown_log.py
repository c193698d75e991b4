"""A data node's observations of the other members at work: who is slower than it claims, or does nothing.

IterationReport, who did not answer -> [SlowdownLog] -> Observation -> announcements -> plans/observations.py

Micro-batches that take longer than planned make the members on their path look slow; those that pass others
by then show who it was, as of every member the better quarter counts. Who does not answer although it lives
counts as FAULT times slower, once in a while. What is too old is forgotten, and so is all of a member that
died or was restarted.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from swarmnode.extensions.pipeline.execution.member_records import IterationReport, RoundTrip
from swarmnode.extensions.pipeline.membership.membership_messages import Presence
from swarmnode.extensions.pipeline.plans.member_costs import MAX_SLOWDOWN, Observation, forward_s
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan

RECENT = 5
"""Iterations of which the median is taken: a bad one or two leave no trace."""

MEMORY_S = 900.0
"""Age from which an observation is ignored, so that a member that was left out for it is tried again."""

FAULT = 20.0
"""Slowdown that a member which did not answer counts with."""

FAULT_EVERY_S = 20.0
"""Time within which several faults of one member count once. It is longer than a member may be silent before
it is lost, so one that slept and woke up is not taken for broken."""

NOTED = 1.5
"""Slowdown below which a member counts as fast as it claims: links and other work of a machine vary by as
much."""


@dataclass(frozen=True, slots=True)
class SlowdownSample:
    """One observation of one member in one iteration."""

    at_s: float
    slowdown: float
    micro_batches: int
    is_fault: bool


class SlowdownLog:
    """One data node's observations of the members on its paths. Clocks are given; the tables hold members of
    the pipeline only."""

    def __init__(self, micro_batch_tokens: int) -> None:
        self._tokens = micro_batch_tokens
        self._seen: dict[tuple[str, int], tuple[SlowdownSample, ...]] = {}
        """By peer and session, the observations of it, oldest first."""

    def add(
        self,
        agreed: AgreedPlan,
        report: IterationReport,
        silent: Collection[str],
        claims: Mapping[str, Presence],
        now_s: float,
    ) -> None:
        """Add the observations of one iteration under this plan.

        `silent`: peers that did not answer us in it, or did not before and have sent nothing since. `claims`:
        those of living members; others are not judged.
        """
        self.keep(claims)
        for peer, slowdowns in self._slowdowns(agreed, report.round_trips, claims).items():
            if peer not in silent:
                better = sorted(slowdowns)[len(slowdowns) // 4]
                self._note(peer, claims[peer], SlowdownSample(now_s, better, len(slowdowns), False))
        for peer in claims.keys() & silent:
            before = self._seen.get((peer, claims[peer].session), ())
            if all(now_s - each.at_s >= FAULT_EVERY_S for each in before if each.is_fault):
                self._note(peer, claims[peer], SlowdownSample(now_s, FAULT, 1, True))

    def keep(self, claims: Mapping[str, Presence]) -> None:
        """Forget members that are gone or were restarted."""
        known = {(peer, presence.session) for peer, presence in claims.items()}
        self._seen = {which: seen for which, seen in self._seen.items() if which in known}

    def observed(self, now_s: float) -> dict[str, Observation]:
        """Return our observations of other members for CostAnnouncement.observed."""
        found: dict[str, Observation] = {}
        for (peer, _), seen in self._seen.items():
            fresh = [each for each in seen if now_s - each.at_s <= MEMORY_S]
            if fresh:
                slowdown = median_low([each.slowdown for each in fresh])
                found[peer] = Observation(
                    min(slowdown, MAX_SLOWDOWN) if slowdown >= NOTED else 1.0,
                    sum(each.micro_batches for each in fresh),
                )
        return found

    def _slowdowns(
        self, agreed: AgreedPlan, round_trips: Iterable[RoundTrip], claims: Mapping[str, Presence]
    ) -> dict[str, list[float]]:
        """Return by peer, for each micro-batch that passed it, the longest time it can have taken over the
        claimed time."""
        round_trips = [each for each in round_trips if each.planned_s > 0]
        instance, found = agreed.plan.instance, dict[str, list[float]]()
        # What slows all of them down, as work of our own does, is nobody's fault.
        usual = median_low([each.took_s / each.planned_s for each in round_trips]) if round_trips else 1.0
        for each in round_trips:
            excess_s = each.took_s - usual * each.planned_s
            for node in each.path[1:]:
                peer = agreed.peers[node]
                part = agreed.planned_stage_of(peer)
                if peer not in claims or part is None:
                    continue
                both_ways = 1 + instance.backward_factor
                costs = claims[peer].costs.member
                claimed_s = forward_s(costs, part.end - part.first) * self._tokens * both_ways
                believed_s = instance.forward_s[node] * both_ways
                found.setdefault(peer, []).append(max(1.0, (believed_s + excess_s) / claimed_s))
        return found

    def _note(self, peer: str, claim: Presence, what: SlowdownSample) -> None:
        which = peer, claim.session
        self._seen[which] = (*self._seen.get(which, ()), what)[-RECENT:]
