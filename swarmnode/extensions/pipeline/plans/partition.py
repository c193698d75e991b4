"""Divides layers into stages: contiguous ranges that fit the members' memory, the slowest as fast as
possible.

member_costs.py (announcements), a model's layers -> [partition] -> placement.py (who holds what, by links)

Every member computes the partition for itself from the same announcements, so it must come out the same
everywhere: measured floats are rounded to a grid once, everything after that is integers, members are sorted
first and ties fall to the smaller peer id.

Stage 0 holds the embedding, the first layers, the final norm and the head, and is never skipped. The other
S - 1 stages share the L - 1 visits that a micro-batch pays beside it, so a stage's load is its time times the
share of micro-batches that come by: the sizing rule of SkipPipe (arXiv 2502.19913), n_0 (L - 1) = sum of n_s.

layer_cuts.py holds the search.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

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

PICO = 10**12
"""Grid of seconds: picoseconds are below the resolution of a clock and far above the last bits of a
double."""
MAX_SPEED = 1e6
"""Highest speed relative to the reference device; NaN and infinity are outside too."""
SKIP_TOLERANCE = 0.05
"""Tolerance of the skipped share within which a number of stages is preferred."""
MAX_LAYERS = 512
MAX_MEMBERS = 1024
"""Far above any swarm that shares one model. The two bounds limit the work that hostile announcements
cause."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer for the member that holds it."""

    held_bytes: int
    """Bytes of the weights and of training them: adapter, gradients, optimizer state."""
    forward_s: float
    """Seconds of one token on the reference device, whose speed is 1."""
    activation_bytes: int
    """Bytes of one token that are kept between forward and backward."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of a model's layers."""

    layers: tuple[LayerCost, ...]
    ends: LayerCost
    """Costs of embedding, final norm, head and loss together, which are always in stage 0."""


@dataclass(frozen=True, slots=True)
class MemberResources:
    """Resources that a member announced, corrected by observations of others (member_costs.py)."""

    peer_id: str
    free_bytes: int
    speed: float
    """Tokens per second, relative to the reference device."""
    holds_data: bool
    """True if it may be in stage 0: it feeds micro-batches and sees tokens and losses."""


@dataclass(frozen=True, slots=True)
class PipelineWorkload:
    """The workload of the pipeline, as far as partitioning depends on it."""

    skip: float
    """Share of stages that a micro-batch leaves out, 0 <= skip < 1."""
    micro_batch_tokens: int
    slots: int = 3
    """Micro-batches that a member must be able to hold between their forward and backward pass."""
    hop_s: float = 0.0
    """Typical time from one member to the next, for choosing the number of stages."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage: model.layers[first:end], with the ends in stage 0."""

    first: int
    end: int
    held_bytes: int
    slot_bytes: int
    """Activation bytes of one micro-batch in flight."""
    forward_s: float
    """Seconds of one token on the reference device."""
    peers: tuple[str, ...]
    """Peer ids of its replicas, sorted. A first answer by memory and speed; placement.py knows the links."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The layers and replicas of each stage, equal on every member."""

    stages: tuple[PlannedStage, ...]
    path_length: int
    """Stages that a micro-batch visits, stage 0 included."""
    spare: tuple[str, ...]
    """Members that fit no stage."""

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each peer id; the spare are absent."""
        return {peer: stage for stage, part in enumerate(self.stages) for peer in part.peers}


def path_length(stages: int, skip: float) -> int:
    """Return the number of stages that a micro-batch visits, at least two.

    >>> path_length(6, 0.33), path_length(8, 0.25), path_length(2, 0.5)
    (4, 6, 2)
    """
    return min(stages, max(2, round(stages * (1 - skip))))


def partition(
    model: ModelCosts,
    members: Iterable[MemberResources],
    work: PipelineWorkload,
    *,
    stages: int | None = None,
) -> Partition:
    """Return contiguous layer ranges and their replicas that minimise the time of the busiest stage.

    `stages` None: the number that moves most micro-batches, by Little's law over compute, hops and slots; of
    equals the smaller. The order of `members` does not matter. Raises ConfigError for numbers that make no
    sense and ModelError, with the missing bytes, if the members cannot hold the model.
    """
    peers = _on_grid(members)
    _check(model, peers, work)
    if stages is not None:
        most = min(len(model.layers), len(peers))
        if not 2 <= stages <= most:
            raise ConfigError(
                f"{stages} stages asked for, from 2 to {most} are possible",
                hint=f"there are {len(model.layers)} layers and {len(peers)} members",
            )
        cut = best_cut(_sums(model, work, stages), peers)
        if cut is None:
            raise _refusal(_sums(model, work, stages), peers, work)
        return _finish(model, peers, work, stages, cut)
    return _best_count(model, peers, work)


def _best_count(model: ModelCosts, peers: tuple[GridMember, ...], work: PipelineWorkload) -> Partition:
    """Return the best partition over all numbers of stages. Fewer stages mean fewer hops, more mean smaller
    pieces."""
    counts = range(2, min(len(model.layers), len(peers)) + 1)
    exact = [c for c in counts if abs(1 - path_length(c, work.skip) / c - work.skip) <= SKIP_TOLERANCE]
    speed = {peer.peer_id: peer.speed for peer in peers}
    for choice in (exact, [count for count in counts if count not in exact]):
        cuts = [(count, best_cut(_sums(model, work, count), peers)) for count in choice]
        found = [_finish(model, peers, work, count, cut) for count, cut in cuts if cut]
        if found:
            return min(found, key=lambda each: (_micro_batch_ps(each, work, speed), len(each.stages)))
    raise _refusal(_sums(model, work, counts[-1]), peers, work)


def _micro_batch_ps(answer: Partition, work: PipelineWorkload, speed: dict[str, int]) -> int:
    """Return the picoseconds between two micro-batches: of the busiest stage, or of a round trip over those
    in flight."""
    stage_count, length = len(answer.stages), answer.path_length
    times = [round(part.forward_s * PICO) * work.micro_batch_tokens * SPEED_GRID for part in answer.stages]
    speeds = [sum(speed[peer] for peer in part.peers) for part in answer.stages]
    alone = [
        time * len(part.peers) // total
        for time, part, total in zip(times, answer.stages, speeds, strict=True)
    ]
    trip = alone[0] + sum(alone[1:]) * (length - 1) // (stage_count - 1)
    trip += length * round(work.hop_s * PICO)
    in_flight = len(answer.stages[0].peers) * work.slots
    busiest = max(
        times[0] // speeds[0],
        *(
            time * (length - 1) // (total * (stage_count - 1))
            for time, total in zip(times[1:], speeds[1:], strict=True)
        ),
    )
    return max(busiest, trip // in_flight)


def _finish(
    model: ModelCosts, peers: tuple[GridMember, ...], work: PipelineWorkload, stages: int, cut: LayerDivision
) -> Partition:
    sums = _sums(model, work, stages)
    groups, spare = _place_the_rest(sums, cut, peers)
    bounds = zip((0, *cut.ends[:-1]), cut.ends, strict=True)
    parts = tuple(
        _part(model, work, first, end, tuple(sorted(peer.peer_id for peer in group)))
        for (first, end), group in zip(bounds, groups, strict=True)
    )
    return Partition(parts, sums.path_length, spare)


def _place_the_rest(
    sums: LayerSums, cut: LayerDivision, peers: tuple[GridMember, ...]
) -> tuple[list[list[GridMember]], tuple[str, ...]]:
    """Add members that the optimum did not need to the busiest stage that they can hold."""
    groups = [list(group) for group in cut.groups]
    starts = (0, *cut.ends[:-1])
    needs = [sums.first_bytes(cut.ends[0])]
    loads = [sums.first_load(cut.ends[0])]
    for first, end in zip(starts[1:], cut.ends[1:], strict=True):
        needs.append(sums.bytes_of(first, end))
        loads.append(sums.load_of(first, end))
    busy = {peer for group in groups for peer in group}
    spare: list[str] = []
    for peer in peers:
        if peer in busy:
            continue
        able = [
            stage
            for stage, need in enumerate(needs)
            if peer.free_bytes >= need and (stage > 0 or peer.holds_data)
        ]
        if not able:
            spare.append(peer.peer_id)
            continue
        speeds = [sum(other.speed for other in group) for group in groups]
        busiest = max(able, key=lambda stage: (loads[stage] * PICO // speeds[stage], -stage))
        groups[busiest].append(peer)
    return groups, tuple(sorted(spare))


def _refusal(sums: LayerSums, peers: tuple[GridMember, ...], work: PipelineWorkload) -> ModelError:
    """Return the error that says how many more free bytes every member would need."""
    low, high = 1, sums.ends_bytes + sums.held[-1] + sums.slot[-1]
    while low < high:
        middle = (low + high) // 2
        richer = tuple(replace(peer, free_bytes=peer.free_bytes + middle) for peer in peers)
        fits = any(feasible(sums, richer, end, memory_only_limit(sums)) for end in sums.beginnings)
        low, high = (low, middle) if fits else (middle + 1, high)
    free = sum(peer.free_bytes for peer in peers)
    return ModelError(
        f"{len(peers)} members with {free:,} bytes free cannot hold the model in {sums.stages} stages: "
        f"each would need {low:,} bytes more",
        hint=f"stage 0 needs at least {sums.first_bytes(1):,} bytes in one member that holds data; add "
        f"members, or lower the micro-batch ({work.micro_batch_tokens} tokens, {work.slots} in flight)",
    )


def _part(
    model: ModelCosts, work: PipelineWorkload, first: int, end: int, peers: tuple[str, ...]
) -> PlannedStage:
    costs = [*model.layers[first:end], *([model.ends] if first == 0 else [])]
    return PlannedStage(
        first=first,
        end=end,
        held_bytes=sum(cost.held_bytes for cost in costs),
        slot_bytes=sum(cost.activation_bytes for cost in costs) * work.micro_batch_tokens,
        forward_s=sum(_pico(cost.forward_s) for cost in costs) / PICO,
        peers=peers,
    )


def _sums(model: ModelCosts, work: PipelineWorkload, stages: int) -> LayerSums:
    tokens = work.micro_batch_tokens * work.slots
    return LayerSums(
        held=(0, *accumulate(layer.held_bytes for layer in model.layers)),
        slot=(0, *accumulate(layer.activation_bytes * tokens for layer in model.layers)),
        work=(0, *accumulate(_pico(layer.forward_s) for layer in model.layers)),
        ends_bytes=model.ends.held_bytes + model.ends.activation_bytes * tokens,
        ends_work=_pico(model.ends.forward_s),
        path_length=path_length(stages, work.skip),
        stages=stages,
        least=1,
        most=len(model.layers),
    )


def _pico(seconds: float) -> int:
    return round(seconds * PICO)


def _on_grid(members: Iterable[MemberResources]) -> tuple[GridMember, ...]:
    """Return the members rounded and sorted: most memory first, then by peer id. Raises ConfigError."""
    members = tuple(members)
    for m in members:
        if not 0 < m.speed <= MAX_SPEED or m.free_bytes < 0:
            raise ConfigError(f"{m.peer_id} cannot have speed {m.speed} and {m.free_bytes} bytes free")
    peers = [
        GridMember(m.peer_id, m.free_bytes, max(1, round(m.speed * SPEED_GRID)), m.holds_data)
        for m in members
    ]
    return tuple(sorted(peers, key=lambda peer: (-peer.free_bytes, peer.peer_id)))


def _check(model: ModelCosts, peers: tuple[GridMember, ...], work: PipelineWorkload) -> None:
    """Raises ConfigError for numbers that do not fit together, ModelError without a member that holds data.
    Single announcements were checked on arrival."""
    if not 0 <= work.skip < 1 or work.micro_batch_tokens < 1 or work.slots < 1 or work.hop_s < 0:
        raise ConfigError(
            f"a pipeline cannot work like this: {work}", hint="0 <= skip < 1, the others positive"
        )
    if not 2 <= len(model.layers) <= MAX_LAYERS or not 2 <= len(peers) <= MAX_MEMBERS:
        raise ConfigError(
            f"a pipeline of {len(model.layers)} layers and {len(peers)} members cannot be planned",
            hint=f"from 2 to {MAX_LAYERS} layers and from 2 to {MAX_MEMBERS} members are possible",
        )
    if len({peer.peer_id for peer in peers}) < len(peers):
        raise ConfigError("a member is listed twice", hint="keep its newest announcement only")
    for cost in (*model.layers, model.ends):
        if min(cost.held_bytes, cost.activation_bytes) < 0 or not 0 <= cost.forward_s < 1:
            raise ConfigError(f"a layer cannot cost this: {cost}")
    if not any(peer.holds_data for peer in peers):
        raise ModelError("no member holds data, so there is no stage 0", hint="let one with memory hold it")
