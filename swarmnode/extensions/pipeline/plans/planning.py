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

import msgspec

from swarmnode.errors import ConfigError, ModelError
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, MemberCosts, corrected_costs
from swarmnode.extensions.pipeline.plans.observations import counted_observations, useless_members
from swarmnode.extensions.pipeline.plans.partition import Partition, PlannedStage, partition, partition_of
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings
from swarmnode.extensions.pipeline.plans.planning_costs import PlanningCosts
from swarmnode.extensions.pipeline.plans.refilling import refill_stages
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort, first_plan, search
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import simulate
from swarmnode.machine.memory_plan import size_text


@dataclass(frozen=True, slots=True)
class FormerStages:
    """The stages and their holders before a plan."""

    ends: tuple[int, ...]
    """First layer behind each stage."""
    stage_of: Mapping[str, int]
    """Stage of each peer id. Newcomers, and members that hold layers of another division, are absent."""

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The first layer of each peer id, and the one behind its last."""
        starts = (0, *self.ends)
        return {peer: (starts[stage], self.ends[stage]) for peer, stage in self.stage_of.items()}


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
    spare: tuple[str, ...]
    """Members that fit no stage, would slow it down, or do nothing; sorted."""
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
    def members(self) -> frozenset[str]:
        """All members that it was made with."""
        return frozenset((*self.peers, *self.spare))

    def node_of(self, peer_id: str) -> int | None:
        return self.peers.index(peer_id) if peer_id in self.peers else None

    def stage_of(self, peer_id: str) -> int | None:
        """Return the stage of a member; None for a spare member or a stranger."""
        return self.partition.stage_of.get(peer_id)

    def planned_stage_of(self, peer_id: str) -> PlannedStage | None:
        """Return the planned stage of a member, with its layers; None if it has none."""
        stage = self.stage_of(peer_id)
        return None if stage is None else self.partition.stages[stage]

    def why_spare(self, member: MemberCosts) -> str:
        """Return the reason why this member has no stage, in words."""
        stages = self.partition.stages[0 if member.holds_data else 1 :]
        least = min((part.held_bytes + part.slot_bytes for part in stages), default=0)
        if member.free_bytes < least:
            needed, given = size_text(least), size_text(member.free_bytes)
            return f"the smallest stage takes {needed}, and we give {given}: raise --max-memory"
        return "the others are as fast without us"

    @property
    def as_former(self) -> FormerStages:
        """The stages and their holders under this plan, as the next plan starts from them."""
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
    links = {
        (said.member.peer_id, other): link
        for said in inputs.announcements
        for other, link in said.links.items()
    }
    scene = PlanningCosts({each.peer_id: each for each in costs}, links, inputs.settings)
    former, stages = inputs.former, _stage_count(inputs.settings, len(costs))
    kept = None
    if former is not None and len(former.ends) > 1 and stages in (None, len(former.ends)):
        kept = refill_stages(scene, former.ends, former.stage_of)
    if kept is None:
        return _divided(inputs, scene, stages)
    return _agreed(inputs, kept, _scheduled(inputs.settings, scene.measured(kept)[0], None))


def must_load(agreed: AgreedPlan, former: FormerStages | None) -> tuple[str, ...]:
    """Return members that hold other layers under the plan than before, so that they have to load weights;
    sorted."""
    before = former.ranges if former is not None else {}
    return tuple(sorted(peer for peer, part in agreed.as_former.ranges.items() if before.get(peer) != part))


def _stage_count(settings: PlanSettings, members: int) -> int | None:
    """Return the number of stages asked for, or as many as there can be. None: whatever is best."""
    if settings.stages is None:
        return None
    return max(2, min(settings.stages, members, settings.model.layers))


def _divided(inputs: PlanInputs, scene: PlanningCosts, count: int | None) -> AgreedPlan:
    """Return a plan that is free to choose: layers by memory and speed, members by links, then paths."""
    settings = inputs.settings
    try:
        parts = partition(
            settings, scene.costs.values(), stages=count, price=lambda each: scene.price(each)[0]
        )
    except ModelError:
        before = inputs.former.ranges if inputs.former is not None else {}
        whole = [peer for peer in scene.costs if before.get(peer) == (0, settings.model.layers)]
        if not whole:
            raise
        # Whoever was left alone with the model goes on so: these newcomers are too small to share it.
        return _alone(inputs, scene.costs[min(whole)])
    # The fewest members that are as fast: the others take the stages where they help.
    parts = refill_stages(scene, [part.end for part in parts.stages], parts.stage_of) or parts
    instance, table = scene.measured(parts)
    steps = _steps(settings, instance)
    effort = PlacementEffort(swaps=steps // 20, steps=steps // 4)
    found = search(instance, seed=0, effort=effort, table=table).plan
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


def _steps(settings: PlanSettings, instance: Instance) -> int:
    """Return the changes that the search tries: fewer for larger pipelines, whose simulation takes longer."""
    tasks = instance.waves * (2 * instance.path_length + 1)
    agents = sum(instance.memory[node] for node in instance.stages[0])
    return max(16, settings.search_tasks // (tasks * agents))


def _scheduled(settings: PlanSettings, instance: Instance, start: Plan | None) -> Plan:
    budget = SearchBudget(steps=_steps(settings, instance))
    return schedule(instance, seed=0, budget=budget, start=start).plan


def _alone(inputs: PlanInputs, member: MemberCosts) -> AgreedPlan:
    """Return the plan of one member that holds every layer, until others come back. Raises ModelError if it
    cannot."""
    settings = inputs.settings
    parts = partition_of(settings, [settings.model.layers], [[member.peer_id]])
    part = parts.stages[0]
    missing = part.held_bytes + part.slot_bytes - member.free_bytes
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
    instance, _ = PlanningCosts({member.peer_id: member}, {}, settings).measured(parts)
    return _agreed(inputs, parts, first_plan(instance))


def _agreed(inputs: PlanInputs, parts: Partition, plan: Plan) -> AgreedPlan:
    spare = tuple(sorted({said.member.peer_id for said in inputs.announcements} - parts.stage_of.keys()))
    layers = [part.end for part in parts.stages]
    named = msgspec.json.encode((inputs.epoch, layers, spare, digest(plan)))
    return AgreedPlan(
        epoch=inputs.epoch,
        iteration=0,
        partition=parts,
        spare=spare,
        plan=plan,
        digest=hashlib.sha256(named).hexdigest(),
        makespan_s=simulate(plan).makespan_s,
        before=inputs.former,
    )
