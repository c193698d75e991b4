"""Computes a plan from inputs that all members share: the layers of each member, and the paths.

announcements, settings, FormerStages -> [compute_plan] -> AgreedPlan -> membership.py

Every member computes the plan itself, and the members compare digests. So nothing here may depend on the
order of announcements, on a clock or on unseeded randomness, and searches end after a number of steps. The
first plan is free to choose (partition.py, placement.py). Later plans leave every member in its stage if they
can, because a member that changes its stage has to load weights (refilling.py); a plan made again for the
same members moves no member. Only if the remaining members cannot fill the former stages are the layers
divided anew.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from swarmnode.errors import ConfigError, ModelError
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, MemberCosts
from swarmnode.extensions.pipeline.plans.observations import corrected_costs, useless_members
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
    """The stages and their holders before a plan is made."""

    ends: tuple[int, ...]
    """End of each stage: the layer after its last one."""
    stage_of: Mapping[str, int]
    """Stages by peer id. Newcomers and members that hold layers of another division are missing."""

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """By peer id, the first layer that it holds and the layer after its last one."""
        starts = (0, *self.ends)
        return {peer: (starts[stage], self.ends[stage]) for peer, stage in self.stage_of.items()}


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The complete input of a plan. The order of announcements does not matter."""

    announcements: tuple[CostAnnouncement, ...]
    """One announcement from each member that is to take part."""
    settings: PlanSettings
    former: FormerStages | None
    """None if no member holds anything worth keeping."""
    epoch: int
    """Number of this plan within its pipeline; part of the plan's digest."""


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """A plan, and the assignment of each member in it."""

    epoch: int
    iteration: int
    """The first iteration under this plan. Chosen once all members are ready for it; not part of the
    digest."""
    partition: Partition
    """Stages by layers, with their replicas."""
    spare: tuple[str, ...]
    """Sorted members that fit no stage, would slow the pipeline down, or do no work."""
    plan: Plan
    digest: str
    """Name of the plan in messages, computed from paths, layers and epoch. The same plan made again has
    another digest."""
    makespan_s: float
    """Predicted seconds of one iteration."""
    before: FormerStages | None = None
    """The stages and their holders when the plan was made. Those members are trusted about the state of a
    stage."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Peer ids by node number."""
        return self.plan.instance.names

    @property
    def members(self) -> frozenset[str]:
        """The members whose announcements the plan was made from."""
        return frozenset((*self.peers, *self.spare))

    def node_of(self, peer_id: str) -> int | None:
        return self.peers.index(peer_id) if peer_id in self.peers else None

    def stage_of(self, peer_id: str) -> int | None:
        """Return the stage of a member, or None for a spare member or a stranger."""
        return self.partition.stage_of.get(peer_id)

    def planned_stage_of(self, peer_id: str) -> PlannedStage | None:
        """Return the planned stage of a member, with its layers, or None if it has none."""
        stage = self.stage_of(peer_id)
        return None if stage is None else self.partition.stages[stage]

    def why_spare(self, member: MemberCosts) -> str:
        """Return the reason why this member has no stage, as text."""
        stages = self.partition.stages[0 if member.holds_data else 1 :]
        least = min((part.held_bytes + part.slot_bytes for part in stages), default=0)
        if member.free_bytes < least:
            needed, given = size_text(least), size_text(member.free_bytes)
            return f"the smallest stage takes {needed}, and we give {given}: raise --max-memory"
        return "the others are as fast without us"

    @property
    def as_former(self) -> FormerStages:
        """The stages and their holders under this plan, as input for the next plan."""
        return FormerStages(tuple(part.end for part in self.partition.stages), self.partition.stage_of)


def compute_plan(inputs: PlanInputs) -> AgreedPlan:
    """Return the plan for these inputs, which is the same on every machine.

    Raises ModelError if the members cannot hold the model, and ConfigError if no link was measured or the
    settings contradict each other.
    """
    held = inputs.former.stage_of if inputs.former is not None else {}
    costs = corrected_costs(inputs.announcements, held)
    if not costs:
        raise ConfigError("no member to plan with", hint="wait for announcements")
    useless = useless_members(inputs.announcements, held)
    useful = tuple(each for each in costs if each.peer_id not in useless)
    if useful and useless:
        # Leave them out unless the others cannot do without them. In that case, paths can skip their stage.
        with suppress(ModelError, ConfigError):
            return _planned(inputs, useful)
    return _planned(inputs, costs)


def _planned(inputs: PlanInputs, costs: Sequence[MemberCosts]) -> AgreedPlan:
    """Return the plan with these members. Other announced members stay spare."""
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
    """Return the sorted members that hold other layers under the plan than before, and so have to load
    weights."""
    before = former.ranges if former is not None else {}
    return tuple(sorted(peer for peer, part in agreed.as_former.ranges.items() if before.get(peer) != part))


def _stage_count(settings: PlanSettings, members: int) -> int | None:
    """Return the number of stages in the settings, capped at what is possible. None: any number."""
    if settings.stages is None:
        return None
    return max(2, min(settings.stages, members, settings.model.layers))


def _divided(inputs: PlanInputs, scene: PlanningCosts, count: int | None) -> AgreedPlan:
    """Return a plan without former stages: layers by memory and speed, members by links, then the paths."""
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
        # A member that was left alone with the model stays alone: these newcomers are too small to share it.
        return _alone(inputs, scene.costs[min(whole)])
    # Use the fewest members that are equally fast, and place the others where they help.
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
    # The next change of members follows the rules of refilling. Make the moves that it would make now.
    kept = refill_stages(scene, [part.end for part in stages], parts.stage_of)
    if kept is None or kept.stage_of == parts.stage_of:
        return _agreed(inputs, parts, _scheduled(settings, found.instance, found))
    return _agreed(inputs, kept, _scheduled(settings, scene.measured(kept)[0], None))


def _steps(settings: PlanSettings, instance: Instance) -> int:
    """Return the number of changes that the search tries: fewer for large pipelines, which are slow to
    simulate."""
    tasks = instance.waves * (2 * instance.path_length + 1)
    agents = sum(instance.memory[node] for node in instance.stages[0])
    return max(16, settings.search_tasks // (tasks * agents))


def _scheduled(settings: PlanSettings, instance: Instance, start: Plan | None) -> Plan:
    budget = SearchBudget(steps=_steps(settings, instance))
    return schedule(instance, seed=0, budget=budget, start=start).plan


def _alone(inputs: PlanInputs, member: MemberCosts) -> AgreedPlan:
    """Return the plan of one member that holds every layer until others come back. Raises ModelError if it
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
