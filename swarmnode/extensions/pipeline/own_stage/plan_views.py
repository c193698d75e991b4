"""Translates a plan into the records that the holder of a stage works with.

planning.py (AgreedPlan) -> [plan_views] -> own_stage.py -> replica_exchange.py, state_service.py
"""

from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.plans.recovery import neighbour_of
from swarmnode.extensions.pipeline.replication.replica_answers import AnswerScope
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.states.holdings import LayerAssignments


def part_of(agreed: AgreedPlan, peer_id: str) -> StagePart | None:
    """Return the layers of a member; None if it has none."""
    part, stage = agreed.part_of(peer_id), agreed.stage_of(peer_id)
    return None if part is None else StagePart(part.first, part.end, has_ends=stage == 0)


def scope_of(agreed: AgreedPlan, peer_id: str) -> AnswerScope | None:
    """Return the bounds of questions that the replicas of a member's stage may ask it; None if it has no
    stage."""
    stage, part = agreed.stage_of(peer_id), agreed.part_of(peer_id)
    if stage is None or part is None:
        return None
    return AnswerScope(agreed.digest, stage, frozenset(part.peers), agreed.iteration)


def holders_of(agreed: AgreedPlan) -> LayerAssignments:
    """Return the layers of each member under a plan, and the keepers of their copies."""
    parts, plan = agreed.partition.stages, agreed.plan
    nodes = {peer: neighbour_of(plan, node) for node, peer in enumerate(agreed.peers)}
    return LayerAssignments(
        {peer: (part.first, part.end) for part in parts for peer in part.peers},
        {peer: agreed.peers[keeper] for peer, keeper in nodes.items() if keeper is not None},
    )


def former_holders(agreed: AgreedPlan) -> LayerAssignments | None:
    """Return the layers of each member under the former plan, as all members agree on it; None if there was
    none."""
    before = agreed.before
    if before is None:
        return None
    starts = (0, *before.ends)
    return LayerAssignments(
        {
            peer: (starts[stage], before.ends[stage])
            for peer, stage in before.stage_of.items()
            if 0 <= stage < len(before.ends)
        }
    )


def keeper_of(agreed: AgreedPlan, peer_id: str) -> str | None:
    """Return the peer id of the member that keeps a copy of this member's state; None if there is none."""
    node = agreed.node_of(peer_id)
    keeper = neighbour_of(agreed.plan, node) if node is not None else None
    return agreed.peers[keeper] if keeper is not None else None
