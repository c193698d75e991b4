"""The parts of a pipeline member.

run_pipeline.py -> [PipelineParts] -> pipeline_node.py -> data_node.py
"""

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStageSettings
from swarmnode.extensions.pipeline.plans.member_costs import MemberCosts
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.streams import StreamHost
from swarmnode.settings.config import Config


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The parts of a member that has not joined the network yet."""

    config: Config
    key: NodeKey
    whole: WholeModel
    host: StreamHost
    discovery: Discovery
    plan: PlanSettings
    membership: MembershipSettings
    own_stage: OwnStageSettings
    member: MemberSettings
    costs: Callable[[], MemberCosts]
    """Returns our own costs, as we announce them."""
    checkpoints: StageCheckpoints
    earlier: tuple[HeldState, ...] = ()
    """States from checkpoints of an earlier run."""

    def rounds_are_done(self, iteration: int) -> bool:
        """Return True if this is at least the number of optimizer steps in the settings."""
        limit = self.config.node.rounds
        return limit is not None and iteration >= limit
