"""Turns measurements into the input of planning: an instance, and the costs of each member in each stage.

observations.py (corrected_costs), Partition -> [PlanningCosts] -> Instance, PlacementTable -> placement.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median_low

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.plans.member_costs import (
    MAX_LATENCY_S,
    MIN_BYTES_PER_S,
    LinkCosts,
    MemberCosts,
    backward_s,
    forward_s,
)
from swarmnode.extensions.pipeline.plans.partition import Partition, PlannedStage
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings
from swarmnode.extensions.pipeline.scheduling.first_paths import first_paths
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.placement import PlacementTable
from swarmnode.extensions.pipeline.scheduling.simulator import Simulator

SLOW_LINK = 2.0
"""Factor by which an unmeasured link is assumed to be worse than the worst measured one."""


@dataclass(frozen=True, slots=True)
class PlanningCosts:
    """Costs of members, links and the model, whichever member holds which stage."""

    costs: Mapping[str, MemberCosts]
    """Costs by peer id, sorted and corrected by the observations of others."""
    links: Mapping[tuple[str, str], LinkCosts]
    """Costs of links by (from, to) peer ids."""
    settings: PlanSettings

    def measured(self, parts: Partition) -> tuple[Instance, PlacementTable]:
        """Return the instance of this partition, and the costs of each member in every other stage.

        Nodes are the members in the partition, sorted by peer id; `costs` may contain others. Of the two
        measurements of a link, one from each end, the worse counts, so a member that lies can only make
        itself less useful. Raises ConfigError if no link was measured, or if a member cannot hold a
        micro-batch of its stage.
        """
        names = tuple(sorted(peer for part in parts.stages for peer in part.peers))
        members = [self.costs[name] for name in names]
        table = _placement_table(members, parts, self.settings)
        stages = tuple(tuple(sorted(map(names.index, part.peers))) for part in parts.stages)
        stage_of = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
        known = _both_ends(names, self.links)
        size_bytes, count = self.settings.token_bytes * self.settings.micro_batch_tokens, range(len(names))
        instance = Instance(
            names=names,
            forward_s=tuple(table.forward_s[node][stage_of[node]] for node in count),
            hop_s=tuple(
                tuple(0.0 if i == j else known[i, j].transfer_s(size_bytes) for j in count) for i in count
            ),
            memory=tuple(table.memory[node][stage_of[node]] for node in count),
            stages=stages,
            path_length=parts.path_length,
            waves=self.settings.waves,
            backward_factor=_backward_factor(members, parts),
            gap_s=0.0,
            first_gap_s=0.0,
        )
        return instance, table

    def price(self, parts: Partition) -> tuple[float, int]:
        """Return the simulated seconds of an iteration per micro-batch, on the first paths found, and the
        number of micro-batches in flight. Returns infinity and 0 if a stage is empty or has too few slots."""
        try:
            instance = self.measured(parts)[0]
            paths = first_paths(instance)
        except ConfigError:
            return inf, 0
        return Simulator(instance).run(paths).makespan_s / len(paths), len(paths)


def _placement_table(
    members: Sequence[MemberCosts], parts: Partition, settings: PlanSettings
) -> PlacementTable:
    """Return, as [node][stage], the seconds of a micro-batch and the number of micro-batches that fit beside
    the stage's weights."""
    tokens, most = settings.micro_batch_tokens, settings.slots
    seconds = [
        tuple(forward_s(member, part.end - part.first) * tokens for part in parts.stages)
        for member in members
    ]
    slots = [tuple(_slots(member, part, most) for part in parts.stages) for member in members]
    return PlacementTable(tuple(seconds), tuple(slots))


def _slots(member: MemberCosts, part: PlannedStage, most: int) -> int:
    """Return the number of micro-batches in flight that the member could hold as a replica of the stage, up
    to `most`, or 0 if it cannot be a replica."""
    left_bytes = member.free_bytes - part.held_bytes
    if left_bytes < 0 or (part.first == 0 and not member.holds_data):
        return 0
    # A member that claims more slots than the settings ask for could make planning slow.
    most = min(most, member.memory_slots)
    return min(most, left_bytes // part.slot_bytes) if part.slot_bytes else most


def _backward_factor(members: Sequence[MemberCosts], parts: Partition) -> float:
    """Return the median of the members' ratios of backward to forward: an instance has one ratio for all."""
    layers = parts.stages[-1].end - parts.stages[-1].first
    return median_low([backward_s(member, layers) / forward_s(member, layers) for member in members])


def _both_ends(
    names: Sequence[str], links: Mapping[tuple[str, str], LinkCosts]
) -> dict[tuple[int, int], LinkCosts]:
    """Return the costs of the link between each pair of nodes: the worse of its two measurements, or worse
    than the worst measured link if there is none."""
    measured = [cost for (one, other), cost in links.items() if one in names and other in names]
    if len(names) > 1 and not measured:
        raise ConfigError("no link between the members was measured", hint="wait for the first probes")
    worst = LinkCosts(
        min(MAX_LATENCY_S, SLOW_LINK * max((each.latency_s for each in measured), default=0.0)),
        max(MIN_BYTES_PER_S, min((each.bytes_per_s for each in measured), default=0.0) / SLOW_LINK),
    )
    found: dict[tuple[int, int], LinkCosts] = {}
    for i, one in enumerate(names):
        for j, other in enumerate(names):
            ends = [links[pair] for pair in ((one, other), (other, one)) if pair in links] or [worst]
            if i != j:
                found[i, j] = LinkCosts(
                    max(each.latency_s for each in ends), min(each.bytes_per_s for each in ends)
                )
    return found
