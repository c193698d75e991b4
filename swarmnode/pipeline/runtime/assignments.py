"""What a plan assigns to a member, in the words of those who hold its stage.

planning.py (Agreed) -> [assignments] -> assigned_stage.py -> averaging.py, states.py
"""

from swarmnode.pipeline.plans.planning import Agreed
from swarmnode.pipeline.plans.recovery import neighbour_of
from swarmnode.pipeline.replication.holdings import LayerAssignments
from swarmnode.pipeline.replication.replica_answers import Scope
from swarmnode.pipeline.stages.stage_model import StagePart


def part_of(agreed: Agreed, peer_id: str) -> StagePart | None:
    """The layers of a member; None: it has none."""
    part, stage = agreed.part_of(peer_id), agreed.stage_of(peer_id)
    return None if part is None else StagePart(part.first, part.end, has_ends=stage == 0)


def scope_of(agreed: Agreed, peer_id: str) -> Scope | None:
    """What the replicas of its stage may ask a member; None: it has no stage."""
    stage, part = agreed.stage_of(peer_id), agreed.part_of(peer_id)
    if stage is None or part is None:
        return None
    return Scope(agreed.digest, stage, frozenset(part.peers), agreed.iteration)


def holders_of(agreed: Agreed) -> LayerAssignments:
    """Who holds which layers under a plan, and who keeps whose copy."""
    parts, plan = agreed.partition.stages, agreed.plan
    nodes = {peer: neighbour_of(plan, node) for node, peer in enumerate(agreed.peers)}
    return LayerAssignments(
        {peer: (part.first, part.end) for part in parts for peer in part.peers},
        {peer: agreed.peers[keeper] for peer, keeper in nodes.items() if keeper is not None},
    )


def former_holders(agreed: Agreed) -> LayerAssignments | None:
    """Who held which layers before, as all members agree on it; None: nobody did."""
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


def keeper_of(agreed: Agreed, peer_id: str) -> str | None:
    """Who keeps a copy of what a member holds; None: nobody."""
    node = agreed.node_of(peer_id)
    keeper = neighbour_of(agreed.plan, node) if node is not None else None
    return agreed.peers[keeper] if keeper is not None else None
