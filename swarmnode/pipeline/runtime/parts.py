"""What a member of a pipeline is made of, and what it does where it holds the data.

run.py -> [PipelineParts] -> node.py -> [DataNode] -> [DataRole] (data_roles.py)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarmnode.config import Config
from swarmnode.identity.keys import NodeKey
from swarmnode.network.discovery import Discovery
from swarmnode.network.streams import StreamHost
from swarmnode.node.board import Watcher
from swarmnode.node.status import NodeStatus, PipelineStatus, Summary
from swarmnode.pipeline.execution.assignment import MemberSettings
from swarmnode.pipeline.execution.member import PipelineMember
from swarmnode.pipeline.membership.known_members import MembershipSettings
from swarmnode.pipeline.plans.costs import MemberCosts
from swarmnode.pipeline.plans.planning import Agreed, PlanSettings
from swarmnode.pipeline.replication.checkpoints import StageCheckpoints
from swarmnode.pipeline.replication.holdings import HeldState
from swarmnode.pipeline.rollouts.decode import DecodeNode
from swarmnode.pipeline.runtime.assigned_stage import AssignedStage, AssignedStageSettings
from swarmnode.pipeline.runtime.idle_rollouts import IdleSharing
from swarmnode.pipeline.runtime.link import PipelineLink
from swarmnode.pipeline.stages.whole_model import WholeModel
from swarmnode.training.records import TrainReport


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """What a member brings along, before it is in the network."""

    config: Config
    key: NodeKey
    whole: WholeModel
    host: StreamHost
    discovery: Discovery
    plan: PlanSettings
    membership: MembershipSettings
    assigned_stage: AssignedStageSettings
    member: MemberSettings
    costs: Callable[[], MemberCosts]
    """What we say of ourselves, measured anew or not."""
    checkpoints: StageCheckpoints
    earlier: tuple[HeldState, ...] = ()
    """What checkpoints of an earlier run have of the model."""
    idle: IdleSharing | None = None
    """What is generated while the stage waits."""


@dataclass(frozen=True, slots=True)
class DataNode:
    """What a member of stage 0 works with while it holds the data: all that a `DataRole` needs."""

    parts: PipelineParts
    link: PipelineLink
    """This role's own, which ends with it."""
    member: PipelineMember
    assigned_stage: AssignedStage
    decode: DecodeNode
    watcher: Watcher
    lost: Callable[[str, str], None]
    """Told the peer id of a member that does not answer, and why we think so."""
    pipeline_status: Callable[[], PipelineStatus]
    trained: Callable[[TrainReport], None]
    """Told of each iteration that has no node of its own to show it."""

    @property
    def peer_id(self) -> str:
        return self.parts.key.peer_id

    @property
    def done(self) -> bool:
        """Whether all rounds are done that the settings ask for."""
        return rounds_are_done(self.parts.config, self.member)


def rounds_are_done(config: Config, member: PipelineMember) -> bool:
    """Whether a member has taken as many optimizer steps as the settings ask for."""
    limit = config.node.rounds
    return limit is not None and member.iteration >= limit


class DataRole(Protocol):
    """What a member of stage 0 does: drive iterations until it is done (data_roles.py)."""

    async def run(self) -> str:
        """Drive until the rounds are done or we are stopped; why it ended. Raises RoleChanged."""
        ...

    def stop(self) -> None:
        """Come to an end after the iteration in hand."""
        ...

    def replanned(self, agreed: Agreed) -> None:
        """There is another plan, which has a stage for us."""
        ...

    @property
    def status(self) -> NodeStatus | None:
        """Where there is more to tell than of the stage."""
        ...

    @property
    def summary(self) -> Summary | None:
        """What it came to, where there is more to say than that of a stage."""
        ...
