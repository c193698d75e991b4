"""Translates a plan into the records that the holder of a stage needs.

planning.py (AgreedPlan) -> [plan_views] -> own_stage.py -> stage_model.py, state_service.py
"""

from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.plans.recovery import neighbours
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.states.holdings import LayerHolders


def part_of(agreed: AgreedPlan, peer_id: str) -> StagePart | None:
    """Return the layers of a member, or None if it has none."""
    part, stage = agreed.planned_stage_of(peer_id), agreed.stage_of(peer_id)
    return None if part is None else StagePart(part.first, part.end, has_ends=stage == 0)


def holders_of(agreed: AgreedPlan) -> LayerHolders:
    """Return the layers of each member under a plan, and the keepers of their copies."""
    keepers = zip(agreed.peers, neighbours(agreed.plan.instance), strict=True)
    return LayerHolders(
        agreed.as_former.ranges,
        {peer: agreed.peers[keeper] for peer, keeper in keepers if keeper is not None},
    )
