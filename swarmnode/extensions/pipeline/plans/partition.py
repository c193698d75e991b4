"""Divides layers into stages: contiguous ranges that fit the members' memory, with the slowest stage as fast
as possible.

member_costs.py (announcements), a model's layers -> [partition] -> placement.py (who holds what, by links)

Every member computes the partition itself from the same announcements, and all must get the same result. So
measured floats are rounded to a grid once, and all later arithmetic is in integers; members are sorted first,
and ties go to the smaller peer id.

Stage 0 holds the embedding, the first layers, the final norm and the head, and is never skipped. The other
S - 1 stages share the L - 1 other visits of each micro-batch. So a stage's load is its time multiplied by the
share of micro-batches that visit it. This is the sizing rule of SkipPipe (arXiv 2502.19913),
n_0 (L - 1) = sum of n_s.

layer_cuts.py holds the search.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from swarmnode.errors import ConfigError, ModelError
from swarmnode.extensions.pipeline.plans.layer_cuts import (
    SPEED_GRID,
    GridMember,
    LayerDivision,
    LayerSums,
    best_cut,
    feasible,
    memory_only_limit,
)
from swarmnode.extensions.pipeline.plans.member_costs import MAX_LAYERS, MemberCosts
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings

PICO = 10**12
"""Grid of seconds: picoseconds are finer than any clock and far coarser than the last bits of a
double."""
MAX_SPEED = 1e6
"""Highest speed that counts, relative to the reference device."""
SKIP_TOLERANCE = 0.05
"""Numbers of stages whose skipped share is within this distance of the wanted one are preferred."""
MAX_MEMBERS = 1024
"""Far above any swarm that shares one model: limits the work that hostile announcements can cause, as
MAX_LAYERS does."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage: model.layers[first:end], plus the ends if it is stage 0."""

    first: int
    end: int
    held_bytes: int
    slot_bytes: int
    """Activation bytes of one micro-batch in flight."""
    peers: tuple[str, ...]
    """Peer ids of its replicas, sorted. Chosen by memory and speed only: placement.py considers the links."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The layers and replicas of each stage, the same on every member."""

    stages: tuple[PlannedStage, ...]
    path_length: int
    """Number of stages that a micro-batch visits, including stage 0."""

    @property
    def stage_of(self) -> dict[str, int]:
        """Stages by peer id. Members that are not needed or fit no stage are missing."""
        return {peer: stage for stage, part in enumerate(self.stages) for peer in part.peers}


def path_length(stages: int, skip: float) -> int:
    """Return the number of stages that a micro-batch visits, at least two.

    >>> path_length(6, 0.33), path_length(8, 0.25), path_length(2, 0.5)
    (4, 6, 2)
    """
    return min(stages, max(2, round(stages * (1 - skip))))


def partition(
    settings: PlanSettings,
    members: Iterable[MemberCosts],
    *,
    stages: int | None,
    price: Callable[[Partition], float] = lambda _: 0.0,
) -> Partition:
    """Return contiguous layer ranges and their replicas that minimise the time of the busiest stage.

    `stages` None: the number that skips the wanted share and has the lowest `price`, the smaller one among
    equals. The order of `members` does not matter. Raises ConfigError for impossible numbers of layers,
    members or stages, and ModelError, with the missing bytes, if the members cannot hold the model.
    """
    peers = _on_grid(settings, members)
    layers = settings.model.layers
    if not 2 <= layers <= MAX_LAYERS or not 2 <= len(peers) <= MAX_MEMBERS:
        raise ConfigError(
            f"a pipeline of {layers} layers and {len(peers)} members cannot be planned",
            hint=f"from 2 to {MAX_LAYERS} layers and from 2 to {MAX_MEMBERS} members are possible",
        )
    if not any(peer.holds_data for peer in peers):
        raise ModelError("no member holds data, so there is no stage 0", hint="let one with memory hold it")
    most = min(layers, len(peers))
    if stages is None:
        return _best_count(settings, peers, most, price)
    if not 2 <= stages <= most:
        raise ConfigError(
            f"{stages} stages asked for, from 2 to {most} are possible",
            hint=f"there are {layers} layers and {len(peers)} members",
        )
    cut = best_cut(_sums(settings, stages), peers)
    if cut is None:
        raise _refusal(_sums(settings, stages), peers, settings)
    return _as_partition(settings, cut)


def partition_of(settings: PlanSettings, ends: Sequence[int], groups: Sequence[Iterable[str]]) -> Partition:
    """Return the partition whose stages end before these layers, each held by one of these groups of
    peers."""
    bounds = zip((0, *ends[:-1]), ends, groups, strict=True)
    stages = tuple(_planned_stage(settings, first, end, group) for first, end, group in bounds)
    return Partition(stages, path_length(len(stages), settings.skip))


def _planned_stage(settings: PlanSettings, first: int, end: int, peers: Iterable[str]) -> PlannedStage:
    model = settings.model
    costs = [*[model.layer] * (end - first), *([model.ends] if first == 0 else [])]
    return PlannedStage(
        first=first,
        end=end,
        held_bytes=sum(cost.held_bytes for cost in costs),
        slot_bytes=sum(cost.activation_bytes for cost in costs) * settings.micro_batch_tokens,
        peers=tuple(sorted(peers)),
    )


def _best_count(
    settings: PlanSettings, peers: tuple[GridMember, ...], most: int, price: Callable[[Partition], float]
) -> Partition:
    """Return the best partition over all numbers of stages. Fewer stages mean fewer hops; more stages mean
    smaller pieces."""
    counts, skip = range(2, most + 1), settings.skip
    exact = [c for c in counts if abs(1 - path_length(c, skip) / c - skip) <= SKIP_TOLERANCE]
    for choice in (exact, [count for count in counts if count not in exact]):
        cuts = [best_cut(_sums(settings, count), peers) for count in choice]
        found = [_as_partition(settings, cut) for cut in cuts if cut]
        if found:
            return min(found, key=lambda each: (price(each), len(each.stages)))
    raise _refusal(_sums(settings, most), peers, settings)


def _as_partition(settings: PlanSettings, cut: LayerDivision) -> Partition:
    return partition_of(settings, cut.ends, [[peer.peer_id for peer in group] for group in cut.groups])


def _refusal(sums: LayerSums, peers: tuple[GridMember, ...], settings: PlanSettings) -> ModelError:
    """Return the error that says how many more free bytes each member would need."""

    def suffices(more: int) -> bool:
        richer = tuple(replace(peer, free_bytes=peer.free_bytes + more) for peer in peers)
        return any(feasible(sums, richer, end, memory_only_limit(sums)) for end in sums.beginnings)

    enough = sums.first_bytes(sums.layers)
    low = 1 + bisect_left(range(1, enough), True, key=suffices)
    free = sum(peer.free_bytes for peer in peers)
    return ModelError(
        f"{len(peers)} members with {free:,} bytes free cannot hold the model in {sums.stages} stages: "
        f"each would need {low:,} bytes more",
        hint=f"stage 0 needs at least {sums.first_bytes(1):,} bytes in one member that holds data; add "
        "members, or lower the micro-batch "
        f"({settings.micro_batch_tokens} tokens, {settings.slots} in flight)",
    )


def _sums(settings: PlanSettings, stages: int) -> LayerSums:
    model, tokens = settings.model, settings.micro_batch_tokens * settings.slots
    return LayerSums(
        layers=model.layers,
        layer_bytes=model.layer.held_bytes + model.layer.activation_bytes * tokens,
        layer_work=_pico(model.layer.forward_s),
        ends_bytes=model.ends.held_bytes + model.ends.activation_bytes * tokens,
        ends_work=_pico(model.ends.forward_s),
        path_length=path_length(stages, settings.skip),
        stages=stages,
        least=1,
        most=model.layers,
    )


def _pico(seconds: float) -> int:
    return round(seconds * PICO)


def _on_grid(settings: PlanSettings, members: Iterable[MemberCosts]) -> tuple[GridMember, ...]:
    """Return the members, rounded and sorted by memory (most first), then by peer id. Speeds beyond the bound
    are cut to it: one member's claim must not keep the others from planning."""
    peers: list[GridMember] = []
    for member in members:
        most = member.timings[-1]
        speed = min(MAX_SPEED, settings.model.layer.forward_s * most.layers / most.forward_s)
        grid = max(1, round(speed * SPEED_GRID))
        peers.append(GridMember(member.peer_id, member.free_bytes, grid, member.holds_data))
    return tuple(sorted(peers, key=lambda peer: (-peer.free_bytes, peer.peer_id)))
