"""The plan of an iteration, which all members agree on: the path of each micro-batch.

schedule -> [Plan] -> simulate, stages, Gantt chart
              |
         violations: what the plan breaks, in words

An agent is a micro-batch slot of a data node. It has one path, and starts a new micro-batch on it when the
last one is back, `waves` times per iteration. It holds one slot at every node of its path, from before its
forward pass there until after its backward pass. `violations` allows no node more agents than slots, so an
agent never waits for a slot, and no plan can deadlock. A free node takes the task that was ready first.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from swarmnode.extensions.pipeline.scheduling.instance import MAX_AGENTS, Instance, least_visits


@dataclass(frozen=True, slots=True)
class Plan:
    """The paths of one iteration.

    >>> link = ((0.0, 1.0), (1.0, 0.0))
    >>> small = Instance(("a", "b"), (1.0, 1.0), link, (1, 1), ((0,), (1,)), path_length=2, waves=1)
    >>> violations(Plan(small, paths=((0, 1),)))
    []
    """

    instance: Instance
    paths: tuple[tuple[int, ...], ...]
    """Nodes of each agent in order of visit, starting with the data node. The agents of a data node are
    released in this order, one forward time apart."""

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in one iteration."""
        return len(self.paths) * self.instance.waves

    def stages(self, agent: int) -> tuple[int, ...]:
        """The stages that the agent visits, in order of visit."""
        stage_of = self.instance.stage_of
        return tuple(stage_of[node] for node in self.paths[agent])


def violations(plan: Plan) -> list[str]:
    """Return descriptions of all rules that the plan breaks; empty if the plan may run."""
    return list(_form(plan)) or [*_path_rules(plan), *_slot_rules(plan), *_share_rules(plan)]


def encode_plan(plan: Plan) -> bytes:
    """Encode the plan as JSON, with its instance. Equal plans give equal bytes."""
    return msgspec.json.encode(plan, order="deterministic")


def digest(plan: Plan) -> str:
    """Return the SHA-256 of the plan in hex. Members compare it before they run a plan."""
    return hashlib.sha256(encode_plan(plan)).hexdigest()


def path_problem(instance: Instance, stages: tuple[int, ...]) -> str | None:
    """Return the rule that a path over these stages, in order of visit, breaks, or None."""
    if stages[:1] != (0,):
        return "does not start at stage 0"
    if len(stages) != instance.path_length:
        return f"visits {len(stages)} stages instead of {instance.path_length}"
    steps = [later - former for former, later in pairwise(stages)]
    if min(steps, default=1) < 1:
        return "visits a stage twice or out of order, or a node in no stage"
    step = max(steps, default=0)
    if step > instance.max_gap:
        return f"steps over {step} stages at once, more than {instance.max_gap}"
    return None


def _form(plan: Plan) -> Iterator[str]:
    """Yield violations of the form, which must be right before the other rules can be checked."""
    count = plan.instance.node_count
    if not 1 <= len(plan.paths) <= MAX_AGENTS:
        yield f"{len(plan.paths)} paths, there may be 1 to {MAX_AGENTS}"
    if not all(0 <= node < count for path in plan.paths for node in path):
        yield f"a path names a node outside 0..{count - 1}"


def _path_rules(plan: Plan) -> Iterator[str]:
    for agent in range(len(plan.paths)):
        problem = path_problem(plan.instance, plan.stages(agent))
        if problem is not None:
            yield f"the path of agent {agent} {problem}"


def _slot_rules(plan: Plan) -> Iterator[str]:
    held = Counter(node for path in plan.paths for node in path)
    for node in sorted(held):
        if held[node] > plan.instance.memory[node]:
            slots = plan.instance.memory[node]
            yield f"node {node} ({plan.instance.names[node]}) has {held[node]} agents and {slots} slots"


def _share_rules(plan: Plan) -> Iterator[str]:
    stage_of = plan.instance.stage_of
    visits = Counter(stage_of[node] for path in plan.paths for node in path)
    for stage, least in enumerate(least_visits(plan.instance, len(plan.paths))):
        if visits[stage] < least:
            yield f"stage {stage} has {visits[stage]} visits a wave, it needs {least}"
