"""The parts that a pipeline member is made of, and those that it works with while it is a data node.

run_pipeline.py -> [PipelineParts] -> pipeline_node.py -> [DataNode] -> data_roles.py
"""

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.execution.pipeline_member import PipelineMember
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStage, OwnStageSettings
from swarmnode.extensions.pipeline.plans.member_costs import MemberCosts
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings
from swarmnode.extensions.pipeline.rollouts.decode_node import DecodeNode
from swarmnode.extensions.pipeline.runtime.pipeline_link import PipelineLink
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.streams import StreamHost
from swarmnode.node.showing.board import Watcher
from swarmnode.node.showing.node_status import PipelineStatus
from swarmnode.settings.config import Config
from swarmnode.training.records import TrainReport


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The parts of a member that is not in the network yet."""

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
    """Returns our own costs, as they are announced."""
    checkpoints: StageCheckpoints
    earlier: tuple[HeldState, ...] = ()
    """States from checkpoints of an earlier run."""


@dataclass(frozen=True, slots=True)
class DataNode:
    """The parts that a member of stage 0 works with while it holds the data: all that its role needs."""

    parts: PipelineParts
    link: PipelineLink
    """The link of this role, which ends with it."""
    member: PipelineMember
    own_stage: OwnStage
    decode: DecodeNode
    watcher: Watcher
    lost: Callable[[str, str], None]
    """Called with the peer id of a member that does not answer, and the reason."""
    pipeline_status: Callable[[], PipelineStatus]
    trained: Callable[[TrainReport], None]
    """Called with the report of each iteration that no NodeLoop shows."""

    @property
    def peer_id(self) -> str:
        return self.parts.key.peer_id

    @property
    def done(self) -> bool:
        """True if all rounds that the settings ask for are done."""
        return rounds_are_done(self.parts.config, self.member)


def rounds_are_done(config: Config, member: PipelineMember) -> bool:
    """Return True if a member has taken as many optimizer steps as the settings ask for."""
    limit = config.node.rounds
    return limit is not None and member.iteration >= limit
