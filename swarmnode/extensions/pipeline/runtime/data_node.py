"""A member of stage 0 while it holds the data: runs iterations for a caller in a thread or a task.

data_roles.py, PipelineLearner (its threads) -> [DataNode] -> membership_supervisor.py (which plan)
                                                           -> pipeline_member.py (iterations)

If an iteration cannot be run under one plan, it is tried again under the next: members come and go, and the
learner's work waits here meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmnode.errors import ModelError, PipelineError
from swarmnode.extensions.pipeline.execution.member_records import Feed, IterationReport
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStage
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.runtime.member_parts import PipelineParts
from swarmnode.extensions.pipeline.runtime.membership_supervisor import MembershipSupervisor
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.states.holdings import Assembled
from swarmnode.node.showing.board import Watcher
from swarmnode.node.showing.node_status import PipelineStatus
from swarmnode.training.records import TrainReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 8
"""Number of plans under which one iteration is tried."""


class RoleChanged(PipelineError):
    """This member no longer starts micro-batches: other members do under the new plan."""


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Paths and waves of one iteration, as agreed on by the members."""

    iteration: int
    paths: Mapping[int, StagePath]
    """The path of each agent that starts here."""
    waves: int
    """Micro-batches of each agent."""


class DataNode:
    """Everything that a data node works with. Runs iterations on the event loop on which it was created."""

    def __init__(
        self,
        parts: PipelineParts,
        supervisor: MembershipSupervisor,
        own_stage: OwnStage,
        watcher: Watcher,
        *,
        pipeline_status: Callable[[], PipelineStatus],
        trained: Callable[[TrainReport], None],
        after_step: Callable[[IterationReport], None],
    ) -> None:
        """`trained`: called with the report of each iteration that no NodeLoop shows. `after_step`: called
        with every report, on the event loop."""
        self.parts = parts
        self.own_stage = own_stage
        self.watcher = watcher
        self.pipeline_status = pipeline_status
        self.trained = trained
        self._supervisor = supervisor
        self._member = own_stage.member
        self._after_step = after_step
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()

    @property
    def peer_id(self) -> str:
        return self.parts.key.peer_id

    @property
    def done(self) -> bool:
        """True if all rounds that the settings ask for are done."""
        return self.parts.rounds_are_done(self.iteration)

    @property
    def iteration(self) -> int:
        """Optimizer steps taken, which is the policy version. Safe to read from any thread."""
        return self._member.iteration

    def lost(self, peer_id: str, why: str) -> None:
        """Report a member that does not answer to our current membership."""
        self._supervisor.membership.lost(peer_id, why)

    def stop(self) -> None:
        """Start no further iteration. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def train(self, feed: Callable[[IterationPlan], Feed]) -> IterationReport | None:
        """Call `drive` from a thread, and block until it returns."""
        return self.call(self.drive(feed))

    def whole_state(self) -> Assembled:
        """Return the adapters of all stages with their moments, of the newest step that all members still
        have. To be called from a thread. With full training there is no adapter: the weights are in the
        members' own checkpoints."""
        return self.call(self.own_stage.whole_state(self.iteration))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait for its result."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError as error:
            raise PipelineError("the pipeline is being left") from error

    async def drive(self, feed: Callable[[IterationPlan], Feed]) -> IterationReport | None:
        """Run one iteration to its end. Returns None if we were stopped before it began.

        `feed` is called with each plan under which the iteration is tried. Raises RoleChanged, PipelineError.
        """
        for _ in range(MAX_TRIES):
            try:
                agreed = await self._agreed()
                if agreed is None:
                    return None
                report = await self._member.train(
                    feed(iteration_plan_of(agreed, self.peer_id, self._member.iteration))
                )
            except RoleChanged:
                self._supervisor.membership.rests()
                raise
            except ModelError as error:
                logger.warning("retrying iteration %d: %s", self.iteration, error)
                self._supervisor.membership.rests()
                await asyncio.sleep(1.0)
                continue
            self._after_step(report)
            return report
        raise PipelineError(
            f"no iteration could be run under {MAX_TRIES} plans", hint="see the logs of the other members"
        )

    async def _agreed(self) -> AgreedPlan | None:
        """Return the plan for the next iteration once our stage is ready under it, or None if we are stopped
        first."""
        waiting = asyncio.ensure_future(self._agreed_and_ready())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() or self._stopping.is_set():
                return None
            return waiting.result()
        finally:
            waiting.cancel()
            stopping.cancel()
            # Neither task outlives this call: a cancelled one may still hold the membership for a moment.
            await asyncio.gather(waiting, stopping, return_exceptions=True)

    async def _agreed_and_ready(self) -> AgreedPlan:
        agreed = await self._supervisor.agreed(self.iteration)
        await self.own_stage.ready.wait()
        return agreed


def iteration_plan_of(agreed: AgreedPlan, peer_id: str, iteration: int) -> IterationPlan:
    """Return the plan of an iteration for this peer. Raises RoleChanged if no agent starts at it."""
    paths = own_paths(agreed, peer_id)
    if not paths:
        raise RoleChanged("under the new plan other members start the micro-batches")
    return IterationPlan(iteration, paths, agreed.plan.instance.waves)


def own_paths(agreed: AgreedPlan, peer_id: str) -> dict[int, StagePath]:
    """Return the path, as stages, of each agent that starts at this peer."""
    plan, own = agreed.plan, agreed.node_of(peer_id)
    return {agent: plan.stages(agent) for agent, path in enumerate(plan.paths) if path[0] == own}
