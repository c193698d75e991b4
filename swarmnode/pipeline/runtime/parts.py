"""What a member of a pipeline is made of, and what it does where it holds the data.

run.py -> [PipelineParts] -> node.py -> [DataRole] -> data_roles.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarmnode.config import Config
from swarmnode.identity.keys import NodeKey
from swarmnode.network.discovery import Discovery
from swarmnode.network.streams import StreamHost
from swarmnode.node.status import NodeStatus
from swarmnode.node.summary import Summary
from swarmnode.pipeline.joining.known_members import MembershipSettings
from swarmnode.pipeline.keeping.checkpoints import StageCheckpoints
from swarmnode.pipeline.keeping.holdings import HeldState
from swarmnode.pipeline.plans.costs import MemberCosts
from swarmnode.pipeline.plans.planning import Agreed, PlanSettings
from swarmnode.pipeline.running.assignment import MemberSettings
from swarmnode.pipeline.runtime.assigned_stage import AssignedStageSettings
from swarmnode.pipeline.runtime.idle_rollouts import IdleSharing
from swarmnode.pipeline.stages.whole_model import WholeModel


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


class DataRole(Protocol):
    """What a member of stage 0 does: drive iterations until it is done (data_roles.py)."""

    async def run(self) -> str:
        """Until the rounds are done or we are stopped; why it ended. Raises RoleChanged."""
        ...

    def stop(self) -> None:
        """Come to an end after the iteration in hand."""
        ...

    def replanned(self, agreed: Agreed) -> None:
        """There is another plan, under which we are seated."""
        ...

    @property
    def status(self) -> NodeStatus | None:
        """Where there is more to tell than of the stage."""
        ...

    @property
    def summary(self) -> Summary | None:
        """What it came to, where there is more to say than that of a stage."""
        ...
