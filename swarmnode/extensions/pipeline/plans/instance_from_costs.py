"""Turns measurements into the input of planning: an instance, and the costs of every member in every stage.

member_costs.py (corrected_costs), Partition -> [instance_from] -> Instance, PlacementTable -> placement.py
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from swarmnode.extensions.pipeline.plans.partition import Partition, PipelineWorkload, PlannedStage
from swarmnode.extensions.pipeline.scheduling.instance import Instance, Matrix
from swarmnode.extensions.pipeline.scheduling.placement_moves import PlacementTable

SLOW_LINK = 2.0
"""Factor by which a link that was not measured is taken to be worse than the worst measured one."""


@dataclass(frozen=True, slots=True)
class IterationSettings:
    """Settings of an iteration, apart from the members."""

    waves: int
    token_bytes: int
    """Bytes of one token between stages, after compression."""
    overhead_s: float = 0.0
    """Seconds of a hop beside the link: serialisation, copies."""
    gap_s: float = 0.0
    """Seconds after each task for which a member is not available."""
    loss_factor: float = 0.25
    """Forward and backward of head and loss, over the forward of stage 0's layers."""
    max_gap: int = 4
    """Largest step between consecutive visited stages."""


def instance_from(
    costs: Iterable[MemberCosts],
    links: Mapping[tuple[str, str], LinkCosts],
    parts: Partition,
    work: PipelineWorkload,
    settings: IterationSettings,
) -> tuple[Instance, PlacementTable]:
    """Return the instance that members plan with, and the costs of each member in every other stage.

    Nodes are the members in the partition, sorted by peer id; `costs` may hold more. Of the two measurements
    of a link, one from each end, the worse counts: a member that lies can only make itself less wanted.
    Raises ConfigError if costs of a member are missing, or if it cannot hold a micro-batch of its stage.
    """
    by_peer = {each.peer_id: each for each in costs}
    names = tuple(sorted(peer for part in parts.stages for peer in part.peers))
    missing = [name for name in names if name not in by_peer]
    if missing:
        raise ConfigError(
            f"no costs of {missing[0]} and {len(missing) - 1} others", hint="wait for announcements"
        )
    holding = _holding([by_peer[name] for name in names], parts, work)
    stages = tuple(tuple(sorted(map(names.index, part.peers))) for part in parts.stages)
    stage_of = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
    known = _both_ends(names, links)
    size_bytes = settings.token_bytes * work.micro_batch_tokens
    hops = _matrix(names, lambda i, j: settings.overhead_s + known[i, j].transfer_s(size_bytes))
    instance = Instance(
        names=names,
        forward_s=tuple(holding.forward_s[node][stage_of[node]] for node in range(len(names))),
        hop_s=hops,
        memory=tuple(holding.memory[node][stage_of[node]] for node in range(len(names))),
        stages=stages,
        path_length=parts.path_length,
        waves=settings.waves,
        backward_factor=_backward_factor([by_peer[name] for name in names], parts),
        loss_factor=settings.loss_factor,
        gap_s=settings.gap_s,
        first_gap_s=settings.gap_s,
        max_gap=settings.max_gap,
    )
    return instance, holding


def _holding(members: Sequence[MemberCosts], parts: Partition, work: PipelineWorkload) -> PlacementTable:
    """Return, as [node][stage], the seconds of a micro-batch and the micro-batches that fit beside the
    stage's weights."""
    tokens = work.micro_batch_tokens
    seconds = [
        tuple(forward_s(member, part.end - part.first) * tokens for part in parts.stages)
        for member in members
    ]
    slots = [tuple(_slots(member, part) for part in parts.stages) for member in members]
    return PlacementTable(tuple(seconds), tuple(slots))


def _slots(member: MemberCosts, part: PlannedStage) -> int:
    """Return the micro-batches in flight that the member could hold as a replica of the stage; 0 if it cannot
    be one."""
    left_bytes = member.free_bytes - part.held_bytes
    if left_bytes < 0 or (part.first == 0 and not member.holds_data):
        return 0
    return min(member.memory_slots, left_bytes // part.slot_bytes) if part.slot_bytes else member.memory_slots


def _backward_factor(members: Sequence[MemberCosts], parts: Partition) -> float:
    """Return the median member's ratio of backward to forward: an instance has one for all."""
    layers = parts.stages[-1].end - parts.stages[-1].first
    return median_low([backward_s(member, layers) / forward_s(member, layers) for member in members])


def _both_ends(
    names: Sequence[str], links: Mapping[tuple[str, str], LinkCosts]
) -> dict[tuple[int, int], LinkCosts]:
    """Return the costs of the link between each pair of nodes: the worse of both measurements, or worse than
    the worst of all if there is none."""
    measured = [cost for (one, other), cost in links.items() if one in names and other in names]
    if not measured:
        raise ConfigError("no link between the members was measured", hint="wait for the first probes")
    worst = LinkCosts(
        min(MAX_LATENCY_S, SLOW_LINK * max(each.latency_s for each in measured)),
        max(MIN_BYTES_PER_S, min(each.bytes_per_s for each in measured) / SLOW_LINK),
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


def _matrix(names: Sequence[str], cost: Callable[[int, int], float]) -> Matrix:
    count = range(len(names))
    return tuple(tuple(0.0 if i == j else cost(i, j) for j in count) for i in count)
