"""Fills existing stages with members: members that stay, members that fill a gap, and newcomers.

planning.py: former stages, costs of those who are left -> [refill_stages] -> Partition -> schedule.py

A stage without members gets a newcomer, or else a member of the stage that loses least by it. Every other
newcomer joins the stage where it saves the most time, according to the simulator on the first paths found.
Stage 0 counts for more than its time: each data node starts as many micro-batches as it has slots, so with
fewer data nodes a step is taken on fewer tokens. If stage 0 lacks data nodes, replicas of other stages move
there. No other member moves, because a change of stage means loading weights. Nothing here depends on time or
on the order of announcements.
"""

from collections.abc import Mapping, Sequence
from math import inf

from swarmnode.extensions.pipeline.plans.member_costs import forward_s
from swarmnode.extensions.pipeline.plans.partition import Partition, partition_of
from swarmnode.extensions.pipeline.plans.planning_costs import PlanningCosts

HARM = 1.1
"""Factor of slowdown from which a newcomer stays spare: in any stage it would slow down every micro-batch
by that much."""

LACK = 0.5
"""Weight of a missing data node, as a share of a micro-batch's time. If one of two is missing, a step has
half the tokens; to get the rest back, a micro-batch may take half as long again."""

Groups = list[list[str]]
"""Peer ids of each stage's replicas."""


def refill_stages(scene: PlanningCosts, ends: Sequence[int], stage_of: Mapping[str, int]) -> Partition | None:
    """Return the former stages with every member in its former place, gaps filled and newcomers placed.

    Returns None if the last stage does not end where the model does, or if these members cannot fill the
    stages.
    """
    if not ends or ends[-1] != scene.settings.model.layers or len(scene.costs) < len(ends):
        return None
    map_ = _Map(scene, ends)
    newcomers = [peer for peer in scene.costs if not map_.stays(peer, stage_of.get(peer))]
    gaps = [stage for stage, group in enumerate(map_.groups) if not group]
    # Fill the stage that the fewest members can hold first (it needs data or much memory).
    for stage in sorted(gaps, key=lambda stage: (map_.count_able(stage), stage)):
        if not map_.fill(stage, newcomers):
            return None
    for peer in newcomers:
        map_.join(peer)
    map_.mend()
    found = partition_of(scene.settings, ends, map_.groups)
    return found if scene.price(found)[0] < inf else None


class _Map:
    """The stages while they are being filled."""

    def __init__(self, scene: PlanningCosts, ends: Sequence[int]) -> None:
        self._scene = scene
        self._ends = tuple(ends)
        self.groups: Groups = [[] for _ in ends]
        self.parts = partition_of(scene.settings, ends, self.groups)

    def stays(self, peer: str, stage: int | None) -> bool:
        """Keep a member in its former stage. Returns False if it had none or can no longer hold it."""
        if stage is None or not self._can(peer, stage):
            return False
        self.groups[stage].append(peer)
        return True

    def fill(self, gap: int, newcomers: list[str]) -> bool:
        """Give an empty stage a member, preferably a newcomer, which is then removed from the list. Returns
        False if no member can hold the stage."""
        able = [peer for peer in newcomers if self._can(peer, gap)]
        if not able:
            able = [peer for group in self.groups if len(group) > 1 for peer in group if self._can(peer, gap)]
        if not able:
            return False
        found = [self._moved(peer, gap) for peer in able]
        _, chosen = min(zip(self._prices(found), able, strict=True))
        self.groups = self._moved(chosen, gap)
        if chosen in newcomers:
            newcomers.remove(chosen)
        return True

    def join(self, peer: str) -> None:
        """Add a newcomer to the stage where it saves the most time, unless it does harm everywhere."""
        able = [stage for stage in range(len(self.groups)) if self._can(peer, stage)]
        if not able:
            return
        without, *prices = self._prices([self.groups, *(self._moved(peer, stage) for stage in able)])
        price, stage = min(zip(prices, able, strict=True))
        if price[0] <= HARM * without[0]:
            self.groups = self._moved(peer, stage)

    def mend(self) -> None:
        """Move replicas to stage 0 while it lacks data nodes and the move is worth the time it costs."""
        while self._lacks_data(self.groups):
            in_time = self._price(self.groups)[1]
            able = [
                peer
                for group in self.groups[1:]
                if len(group) > len(self.groups[0])
                for peer in group
                if self._can(peer, 0) and self._price(self._moved(peer, 0))[1] > in_time
            ]
            if not able:
                return
            present, *prices = self._prices([self.groups, *(self._moved(peer, 0) for peer in able)])
            price, chosen = min(zip(prices, able, strict=True))
            if price[0] >= present[0]:
                return
            self.groups = self._moved(chosen, 0)

    def count_able(self, stage: int) -> int:
        """Return the number of members that could hold this stage."""
        return sum(self._can(peer, stage) for peer in self._scene.costs)

    def _prices(self, choices: Sequence[Groups]) -> list[tuple[float, float]]:
        """Return two prices of each map: the simulated seconds, weighted by the tokens of a step, and the
        load of the busiest stage, which decides between maps with gaps."""
        found = [self._price(groups) for groups in choices]
        most = max(started for _, started in found)
        prices: list[tuple[float, float]] = []
        for groups, (share_s, started) in zip(choices, found, strict=True):
            weight = 1 + LACK if started < most and self._lacks_data(groups) else 1.0
            load = max(self._load(stage, group) for stage, group in enumerate(groups))
            prices.append((weight * share_s, load))
        return prices

    def _price(self, groups: Groups) -> tuple[float, int]:
        return self._scene.price(partition_of(self._scene.settings, self._ends, groups))

    def _lacks_data(self, groups: Groups) -> bool:
        """Return True if stage 0 has fewer data nodes than the other stages have replicas on average."""
        return len(groups[0]) * (len(groups) - 1) < sum(map(len, groups[1:]))

    def _load(self, stage: int, group: Sequence[str]) -> float:
        part = self.parts.stages[stage]
        speed = sum(1 / forward_s(self._scene.costs[peer], part.end - part.first) for peer in group)
        visits = 1.0 if stage == 0 else (self.parts.path_length - 1) / (len(self._ends) - 1)
        return visits / speed if speed else 0.0

    def _moved(self, peer: str, stage: int) -> Groups:
        groups = [[other for other in group if other != peer] for group in self.groups]
        groups[stage].append(peer)
        return groups

    def _can(self, peer: str, stage: int) -> bool:
        """Return True if a member has the memory for a stage and one micro-batch and, for stage 0, holds
        data."""
        member, part = self._scene.costs[peer], self.parts.stages[stage]
        fits = member.free_bytes >= part.held_bytes + part.slot_bytes
        return fits and (stage > 0 or member.holds_data)
