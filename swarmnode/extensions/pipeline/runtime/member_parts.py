"""The parts that a pipeline member is made of, and what it does while it is a data node.

run_pipeline.py -> [PipelineParts] -> pipeline_node.py -> [DataRole] -> data_roles.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStageSettings
from swarmnode.extensions.pipeline.plans.member_costs import MemberCosts
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.streams import StreamHost
from swarmnode.node.showing.node_status import NodeStatus, Summary
from swarmnode.settings.config import Config


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


class DataRole(Protocol):
    """The work of a member of stage 0 while it holds the data."""

    summary: Summary | None
    """The summary of the node that did it, once it is over."""

    @property
    def status(self) -> NodeStatus | None:
        """The status of that node; None if there is none."""
        ...

    async def run(self) -> str:
        """Work until the end, and return its reason. Raises RoleChanged."""
        ...

    def stop(self) -> None:
        """End after the running iteration."""
        ...

    def replanned(self, agreed: AgreedPlan) -> None:
        """Go on under another plan."""
        ...
