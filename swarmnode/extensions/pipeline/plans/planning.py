"""Computes one plan from inputs that all members share: the layers of each member, and the paths.

announcements, settings, FormerStages -> [compute_plan] -> AgreedPlan -> membership.py

Every member computes this for itself and the digests are compared, so nothing here may depend on the order of
announcements, on a clock or on chance without a seed: searches end after a number of steps. The first plan is
free to choose (partition.py, placement.py). Later ones leave every member where it is, as far as that goes:
whoever changes its stage has weights to load (refilling.py); made again for the same members, a plan moves
nobody. Only when those who are left cannot fill the former stages are the layers divided anew.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median_low

import msgspec

from swarmnode.errors import ConfigError, ModelError
from swarmnode.extensions.pipeline.plans.instance_from_costs import IterationSettings
from swarmnode.extensions.pipeline.plans.member_costs import (
    CostAnnouncement,
    MemberCosts,
    backward_s,
    corrected_costs,
    forward_s,
    member_resources,
)
from swarmnode.extensions.pipeline.plans.observations import counted_observations, useless_members
from swarmnode.extensions.pipeline.plans.partition import (
    ModelCosts,
    Partition,
    PipelineWorkload,
    PlannedStage,
    partition,
)
from swarmnode.extensions.pipeline.plans.refilling import PlanningCosts, refill_stages
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort, first_plan, search
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

MAX_SHOWN_CHARS = 64
"""Characters shown of one setting in `plan_terms`."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings that determine a plan, apart from the members. Equal on all members, or they would not
    agree."""

    model: ModelCosts
    micro_batch_tokens: int
    token_bytes: int
    """Bytes of one token between stages, after compression."""
    skip: float = 0.0
    """Share of stages that a micro-batch leaves out."""
    slots: int = 3
    """Micro-batches that a member must be able to hold between their forward and backward pass."""
    waves: int = 1
    """Micro-batches of an agent in one iteration."""
    stages: int | None = None
    """Number of stages; None: as many as move most micro-batches. With fewer members than this there are
    fewer stages."""
    overhead_s: float = 0.0
    """Seconds of a hop beside the link."""
    gap_s: float = 0.0
    """Seconds after each task for which a member is not available."""
    loss_factor: float = 0.25
    """Forward and backward of head and loss over the forward of stage 0's layers."""
    max_gap: int = 4
    """Largest step between consecutive visited stages."""
    seed: int = 0
    search_tasks: int = 200_000
    """Tasks that the search simulates, about a second of CPU. Equal on all members, so that they agree."""

    others: tuple[tuple[str, str], ...] = ()
    """Names and values of settings that no plan depends on but that must be equal on all members."""

    @property
    def layer_forward_s(self) -> float:
        """Seconds of one token through a layer of the reference device."""
        return sum(layer.forward_s for layer in self.model.layers) / len(self.model.layers)


def plan_terms(settings: PlanSettings, model_name: str) -> dict[str, str]:
    """Return the settings as short texts, for announcements: a member with different ones is told which."""
    every: dict[str, object] = msgspec.to_builtins(settings)
    del every["others"]
    shown = {name: str(value) for name, value in (*every.items(), *settings.others)}
    costs = msgspec.json.encode(settings.model, order="deterministic")
    shown |= {"model": model_name, "layer_costs": hashlib.sha256(costs).hexdigest()[:16]}
    return {name: text[:MAX_SHOWN_CHARS] for name, text in sorted(shown.items())}


@dataclass(frozen=True, slots=True)
class FormerStages:
    """The stages and their holders before a plan."""

    ends: tuple[int, ...]
    """First layer behind each stage."""
    stage_of: Mapping[str, int]
    """Stage of each peer id. Newcomers, and members that hold layers of another division, are absent."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The complete input of a plan. The order of announcements does not matter."""

    announcements: tuple[CostAnnouncement, ...]
    """Announcements of the members that shall take part, one each."""
    settings: PlanSettings
    former: FormerStages | None
    """None if no member holds anything worth keeping."""
    epoch: int
    """Number of this plan among those of its pipeline; part of its digest."""


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """A plan, and the assignment of each member in it."""

    epoch: int
    iteration: int
    """The first iteration that it is for. Chosen once all members are ready for it; not part of the
    digest."""
    partition: Partition
    """Stages by layers, with their replicas."""
    plan: Plan
    digest: str
    """Name of the plan in messages, from paths, layers and epoch: the same plan made again has another
    one."""
    makespan_s: float
    """Predicted seconds of one iteration."""
    before: FormerStages | None = None
    """The stages and their holders when it was made. Those members are believed about the state of a
    stage."""

    @property
    def peers(self) -> tuple[str, ...]:
        """The peer id of each node."""
        return self.plan.instance.names

    @property
    def spare(self) -> tuple[str, ...]:
        """Members that fit no stage, would slow it down, or do nothing; sorted."""
        return self.partition.spare

    @property
    def members(self) -> frozenset[str]:
        """All members that it was made with."""
        return frozenset((*self.peers, *self.spare))

    def node_of(self, peer_id: str) -> int | None:
        return self.peers.index(peer_id) if peer_id in self.peers else None

    def stage_of(self, peer_id: str) -> int | None:
        """Return the stage of a member; None for a spare member or a stranger."""
        return self.partition.stage_of.get(peer_id)

    def part_of(self, peer_id: str) -> PlannedStage | None:
        """Return the planned stage of a member, with its layers; None if it has none."""
        stage = self.stage_of(peer_id)
        return None if stage is None else self.partition.stages[stage]

    def place_of(self, peer_id: str) -> str:
        """Return the assignment of a member in words, for people."""
        stage, part = self.stage_of(peer_id), self.part_of(peer_id)
        if stage is None or part is None:
            return "no stage for us"
        stages, count = len(self.partition.stages), len(self.members)
        return f"stage {stage} of {stages}, layers {part.first} to {part.end - 1}, {count} members"

    @property
    def former(self) -> FormerStages:
        """The stages and their holders under this plan, which the next plan starts from."""
        return FormerStages(tuple(part.end for part in self.partition.stages), self.partition.stage_of)


def compute_plan(inputs: PlanInputs) -> AgreedPlan:
    """Return the plan of these inputs, equal on every machine.

    Raises ModelError if the members cannot hold the model, ConfigError if no link was measured or the
    settings make no sense.
    """
    held = inputs.former.stage_of if inputs.former is not None else {}
    costs = corrected_costs(counted_observations(inputs.announcements, held))
    if not costs:
        raise ConfigError("no member to plan with", hint="wait for announcements")
    useless = useless_members(inputs.announcements, held)
    useful = tuple(each for each in costs if each.peer_id not in useless)
    if useful and useless:
        # Unless the others cannot do without them: a stage that does nothing is left out of paths at least.
        with suppress(ModelError, ConfigError):
            return _planned(inputs, useful)
    return _planned(inputs, costs)


def _planned(inputs: PlanInputs, costs: Sequence[MemberCosts]) -> AgreedPlan:
    """Return the plan with these members. Others that are announced stay spare."""
    if len(costs) == 1:
        return _alone(inputs, costs[0])
    scene = _scene(inputs, costs)
    kept = _kept(inputs.former, scene, _stage_count(inputs.settings, len(costs)))
    if kept is None:
        return _divided(inputs, scene)
    return _agreed(inputs, kept, _scheduled(inputs.settings, scene.measured(kept)[0], None))


def must_load(agreed: AgreedPlan, former: FormerStages | None) -> tuple[str, ...]:
    """Return members that hold other layers under the plan than before, so that they have to load weights;
    sorted."""
    after = agreed.former
    before = _ranges(former)
    return tuple(sorted(peer for peer, part in _ranges(after).items() if before.get(peer) != part))


def _ranges(former: FormerStages | None) -> dict[str, tuple[int, int]]:
    if former is None:
        return {}
    starts = (0, *former.ends)
    return {peer: (starts[stage], former.ends[stage]) for peer, stage in former.stage_of.items()}


def _stage_count(settings: PlanSettings, members: int) -> int | None:
    """Return the number of stages asked for, or as many as there can be. None: whatever is best."""
    if settings.stages is None:
        return None
    return max(2, min(settings.stages, members, len(settings.model.layers)))


def _kept(former: FormerStages | None, scene: PlanningCosts, stages: int | None) -> Partition | None:
    """Return the former stages, filled. None if there were none or too few for this number of stages, or if
    one stays empty."""
    if former is None or len(former.ends) < 2 or stages not in (None, len(former.ends)):
        return None
    return refill_stages(scene, former.ends, former.stage_of)


def _divided(inputs: PlanInputs, scene: PlanningCosts) -> AgreedPlan:
    """Return a plan that is free to choose: layers by memory and speed, members by links, then paths."""
    settings = inputs.settings
    members = [
        member_resources(each, layer_forward_s=settings.layer_forward_s) for each in scene.costs.values()
    ]
    try:
        count = _stage_count(settings, len(members))
        parts = partition(settings.model, members, scene.work, stages=count)
    except ModelError:
        whole = [
            peer for peer, part in _ranges(inputs.former).items() if part == (0, len(settings.model.layers))
        ]
        if not set(whole) & set(scene.costs):
            raise
        # Whoever was left alone with the model goes on so: these newcomers are too small to share it.
        return _alone(inputs, scene.costs[min(set(whole) & set(scene.costs))])
    instance, holding = scene.measured(parts)
    found = search(instance, seed=settings.seed, effort=_effort(settings.search_tasks), holding=holding).plan
    stages = tuple(
        replace(part, peers=tuple(instance.names[node] for node in nodes))
        for part, nodes in zip(parts.stages, found.instance.stages, strict=True)
    )
    parts = replace(parts, stages=stages)
    # The next change of members goes by the rules of refilling: what it would move is moved at once.
    kept = refill_stages(scene, [part.end for part in stages], parts.stage_of)
    if kept is None or kept.stage_of == parts.stage_of:
        return _agreed(inputs, parts, _scheduled(settings, found.instance, found))
    return _agreed(inputs, kept, _scheduled(settings, scene.measured(kept)[0], None))


def _effort(tasks: int) -> PlacementEffort:
    return PlacementEffort(
        starts=4, moves=max(200, tasks // 100), judged=2, polish=tasks // 4, schedule=tasks // 4
    )


def _scheduled(settings: PlanSettings, instance: Instance, start: Plan | None) -> Plan:
    tasks = instance.waves * (2 * instance.path_length + 1)
    agents = sum(instance.memory[node] for node in instance.stages[0])
    budget = SearchBudget(steps=max(16, settings.search_tasks // (tasks * agents)))
    return schedule(instance, seed=settings.seed, budget=budget, start=start).plan


def _alone(inputs: PlanInputs, member: MemberCosts) -> AgreedPlan:
    """Return the plan of one member that holds every layer, until others come back. Raises ModelError if it
    cannot."""
    settings = inputs.settings
    costs = (*settings.model.layers, settings.model.ends)
    held = sum(cost.held_bytes for cost in costs)
    slot = sum(cost.activation_bytes for cost in costs) * settings.micro_batch_tokens
    missing = held + slot - member.free_bytes
    if missing > 0:
        raise ModelError(
            f"{member.peer_id} is the only member left and lacks {missing:,} bytes to hold the whole model",
            hint="wait for other members, add one, or lower the micro-batch "
            f"({settings.micro_batch_tokens} tokens)",
        )
    if not member.holds_data:
        raise ModelError(
            f"{member.peer_id} is the only member left and holds no data", hint="add one that does"
        )
    layers = len(settings.model.layers)
    part = PlannedStage(
        0, layers, held, slot, sum(layer.forward_s for layer in costs), peers=(member.peer_id,)
    )
    slots = min(
        member.memory_slots, settings.slots, (member.free_bytes - held) // slot if slot else settings.slots
    )
    instance = Instance(
        names=(member.peer_id,),
        forward_s=(forward_s(member, layers) * settings.micro_batch_tokens,),
        hop_s=((0.0,),),
        memory=(slots,),
        stages=((0,),),
        path_length=1,
        waves=settings.waves,
        backward_factor=backward_s(member, layers) / forward_s(member, layers),
        loss_factor=settings.loss_factor,
        gap_s=settings.gap_s,
        first_gap_s=settings.gap_s,
        max_gap=settings.max_gap,
    )
    return _agreed(inputs, Partition((part,), 1, ()), first_plan(instance))


def _scene(inputs: PlanInputs, costs: Sequence[MemberCosts]) -> PlanningCosts:
    settings = inputs.settings
    links = {
        (said.member.peer_id, other): link
        for said in inputs.announcements
        for other, link in said.links.items()
    }
    size_bytes = settings.token_bytes * settings.micro_batch_tokens
    hops = sorted(link.transfer_s(size_bytes) for link in links.values())
    work = PipelineWorkload(
        settings.skip,
        settings.micro_batch_tokens,
        settings.slots,
        hop_s=settings.overhead_s + (median_low(hops) if hops else 0.0),
    )
    iteration = IterationSettings(
        waves=settings.waves,
        token_bytes=settings.token_bytes,
        overhead_s=settings.overhead_s,
        gap_s=settings.gap_s,
        loss_factor=settings.loss_factor,
        max_gap=settings.max_gap,
    )
    by_peer = {each.peer_id: each for each in costs}
    return PlanningCosts(by_peer, links, settings.model, work, iteration)


def _agreed(inputs: PlanInputs, parts: Partition, plan: Plan) -> AgreedPlan:
    spare = {said.member.peer_id for said in inputs.announcements} - parts.stage_of.keys()
    parts = replace(parts, spare=tuple(sorted(spare)))
    layers = [part.end for part in parts.stages]
    named = msgspec.json.encode((inputs.epoch, layers, parts.spare, digest(plan)))
    return AgreedPlan(
        epoch=inputs.epoch,
        iteration=0,
        partition=parts,
        plan=plan,
        digest=hashlib.sha256(named).hexdigest(),
        makespan_s=simulate(plan).makespan_s,
        before=inputs.former,
    )
