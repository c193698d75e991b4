"""A data node's observations of the other members at work: who takes micro-batches and does nothing.

who did not answer -> [FaultLog] -> Observation -> announcements -> plans/observations.py

Who does not answer although it lives counts as FAULT times slower than it claims, once in a while; who did
its part in more of the latest iterations counts as fast as it claims. What is too old is forgotten, and so is
all of a member that died or was restarted.
"""

from collections.abc import Collection, Mapping
from statistics import median_low

from swarmnode.extensions.pipeline.membership.membership_messages import Presence
from swarmnode.extensions.pipeline.plans.member_costs import Observation
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


class FaultLog:
    """One data node's observations of the members on its paths. Clocks are given; the tables hold members of
    the pipeline only."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: dict[str, tuple[int, tuple[tuple[float, bool], ...]]] = {}
        """By peer, its session and the observations of it, oldest first: time, and True for a fault."""

    def add(
        self, agreed: AgreedPlan, silent: Collection[str], presences: Mapping[str, Presence], now_s: float
    ) -> None:
        """Add the observations of one iteration under this plan.

        `silent`: peers that did not answer us in it, or did not before and have sent nothing since.
        `presences`: those of living members; others are not judged.
        """
        own = agreed.node_of(self._own)
        passed = {agreed.peers[node] for path in agreed.plan.paths if path[0] == own for node in path[1:]}
        for peer in passed.union(silent) & presences.keys():
            self._note(peer, presences[peer].session, peer in silent, now_s)

    def keep(self, presences: Mapping[str, Presence]) -> None:
        """Forget members that are gone or were restarted."""
        self._seen = {
            peer: (session, seen)
            for peer, (session, seen) in self._seen.items()
            if peer in presences and presences[peer].session == session
        }

    def observed(self, now_s: float) -> dict[str, Observation]:
        """Return our observations of other members for CostAnnouncement.observed."""
        found: dict[str, Observation] = {}
        for peer, (_, seen) in self._seen.items():
            fresh = [is_fault for at_s, is_fault in seen if now_s - at_s <= MEMORY_S]
            if fresh:
                found[peer] = Observation(FAULT if median_low(fresh) else 1.0, len(fresh))
        return found

    def _note(self, peer: str, session: int, is_fault: bool, now_s: float) -> None:
        known, seen = self._seen.get(peer, (session, ()))
        before = seen if known == session else ()
        latest_s = max((at_s for at_s, was_fault in before if was_fault), default=float("-inf"))
        if not is_fault or now_s - latest_s >= FAULT_EVERY_S:
            self._seen[peer] = session, (*before, (now_s, is_fault))[-RECENT:]
