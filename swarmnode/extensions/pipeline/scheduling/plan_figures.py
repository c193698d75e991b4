"""Figures of a plan for operators: how long it takes, and how busy and full each stage and node is.

Plan, simulate -> [figures_of] -> extensions/pipeline/pipeline_commands.py: tables, JSON
"""

from collections import Counter
from dataclasses import dataclass

from swarmnode.extensions.pipeline.scheduling.instance import least_visits
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest, violations
from swarmnode.extensions.pipeline.scheduling.simulator import simulate


@dataclass(frozen=True, slots=True)
class NodeUse:
    node: int
    name: str
    stage: int
    """-1 for a node in no stage."""
    utilisation: float
    """Share of the iteration during which the node computes."""
    slots_used: int
    """Micro-batches that have reserved one of its `slots`."""
    slots: int


@dataclass(frozen=True, slots=True)
class StageUse:
    stage: int
    nodes: tuple[int, ...]
    utilisation: float
    """Mean utilisation of its nodes."""
    visits: int
    """Number of micro-batches per wave that visit the stage. Each holds one of the `slots`."""
    least_visits: int
    """Number of visits that the stage needs to learn as fast as the others."""
    slots: int


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """The figures that the command prints. Its JSON object has the keys in this order."""

    makespan_s: float
    micro_batches: int
    in_flight: int
    waves: int
    skip_ratio: float
    """Mean share of stages that a micro-batch does not visit, over the planned paths."""
    slots_used: int
    slots: int
    violations: tuple[str, ...]
    """Rules that the plan breaks; must be empty."""
    stages: tuple[StageUse, ...]
    nodes: tuple[NodeUse, ...]
    """Nodes sorted by stage. Nodes in no stage come last."""
    paths: tuple[tuple[int, ...], ...]
    digest: str
    """SHA-256 of the plan. Members compare it before they run a plan."""


def figures_of(plan: Plan) -> PlanFigures:
    """Returns the figures of a plan, computed by the exact simulator."""
    instance, timeline = plan.instance, simulate(plan)
    held = Counter(node for path in plan.paths for node in path)
    nodes = tuple(
        NodeUse(
            node,
            instance.names[node],
            instance.stage_of[node],
            timeline.utilisation[node],
            held[node],
            instance.memory[node],
        )
        for node in instance.by_stage()
    )
    least = least_visits(instance, len(plan.paths))
    stages = tuple(
        StageUse(
            stage,
            of_stage,
            sum(timeline.utilisation[node] for node in of_stage) / len(of_stage),
            sum(held[node] for node in of_stage),
            least[stage],
            instance.slots(stage),
        )
        for stage, of_stage in enumerate(instance.stages)
    )
    return PlanFigures(
        makespan_s=timeline.makespan_s,
        micro_batches=plan.micro_batches,
        in_flight=len(plan.paths),
        waves=instance.waves,
        skip_ratio=1 - sum(map(len, plan.paths)) / len(plan.paths) / len(instance.stages),
        slots_used=held.total(),
        slots=sum(instance.memory),
        violations=tuple(violations(plan)),
        stages=stages,
        nodes=nodes,
        paths=plan.paths,
        digest=digest(plan),
    )
