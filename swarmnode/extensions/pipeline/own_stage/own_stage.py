"""The stage that the plan assigns to this member: its layers in memory, with what they have learned.

membership.py (AgreedPlan) -> [OwnStage.take] -> PipelineMember.assign, DecodeNode
every step -> [OwnStage] -> own state for others, a copy at a neighbour, checkpoints

Weights come from the model's folder. Learned state comes from the members that hold the layers now, from the
copy that a neighbour keeps of a lost member's state, or from this member's own checkpoints of an earlier run.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from swarmnode.errors import CheckpointError, PipelineError, StorageError
from swarmnode.extensions.pipeline.execution.alignment import RARE_STEPS, SMALL_STATE_BYTES
from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.execution.pipeline_member import PipelineMember
from swarmnode.extensions.pipeline.own_stage.collected_state import majority_state, stage_state, whole_state
from swarmnode.extensions.pipeline.own_stage.plan_views import holders_of, part_of
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.replication.replica_exchange import ReplicaExchange
from swarmnode.extensions.pipeline.rollouts.decode_node import DecodeNode
from swarmnode.extensions.pipeline.rollouts.stage_caches import StageCaches
from swarmnode.extensions.pipeline.stages.stage_model import StageModel, StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.stage_worker import Activations, StageWorker
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.extensions.pipeline.states.holdings import Assembled, HeldState, LayerHolders
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints
from swarmnode.extensions.pipeline.states.state_service import StateService
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.identity.node_key import NodeKey
from swarmnode.training.adam import adam

logger = logging.getLogger(__name__)

COPY_TRIES = 4
COPY_PAUSE_S = 0.5
"""Pause between tries: a neighbour may adopt a new plan slightly later than we do, and keeps no copy of ours
before that."""


@dataclass(frozen=True, slots=True)
class OwnStageSettings:
    """Settings of this member's stage."""

    stage: StageSettings
    learning_rate: float
    max_tokens: int
    """Most tokens in one micro-batch, including padding."""
    activations: Activations
    free_bytes: int
    """Bytes for stages. The next stage is loaded beside the current one if both fit."""
    cache_bytes: int
    """Bytes for keys and values during generation."""
    checkpoint_every: int
    """Optimizer steps between checkpoints of the stage."""


@dataclass(slots=True)
class _Held:
    """A stage in memory."""

    model: StageModel
    optimizer: torch.optim.Optimizer
    iteration: int | None = None
    """Optimizer steps in the weights, or None if they come straight from the model's folder."""
    is_known: bool = True
    """True if the weights are what the pipeline had learned by then. If False, the pipeline may have learned
    more."""
    newest: HeldState | None = None
    """The state that was offered to other members last."""
    size_bytes: int = 0
    """Memory that the stage takes, according to the plan under which it was assigned."""


class OwnStage:
    """Takes this member's assignments, one at a time, and holds the assigned stage.

    async with OwnStage(streams, key, whole, settings, checkpoints, living=membership.members) as own_stage:
        await own_stage.take(agreed)
    """

    def __init__(
        self,
        streams: MemberStreams,
        key: NodeKey,
        whole: WholeModel,
        settings: OwnStageSettings,
        checkpoints: StageCheckpoints,
        *,
        living: Callable[[], Collection[str]],
        execution: MemberSettings,
        earlier: Sequence[HeldState] = (),
    ) -> None:
        """`living`: returns the members that answer, with or without a stage. `earlier`: states from
        checkpoints of an earlier run."""
        self._peer_id = key.peer_id
        self._whole = whole
        self._settings = settings
        self._checkpoints = checkpoints
        self._living = living
        self._stack = AsyncExitStack()
        self._gradient_exchange = ReplicaExchange(streams)
        self.states = StateService(streams, earlier=earlier)
        self.member = PipelineMember(
            streams,
            key=key,
            gradient_exchange=self._gradient_exchange,
            settings=execution,
            reload=self._majority_state,
        )
        self.decode = DecodeNode(
            streams,
            run_in_stage_thread=self.member.in_stage_thread,
            version=lambda: self.version,
            codec=execution.codec,
        )
        self._held: _Held | None = None
        self._next: _Held | None = None
        self._worker: StageWorker | None = None
        self.agreed: AgreedPlan | None = None
        """The plan whose assignment we have taken."""
        self.ready = asyncio.Event()
        """Set while we have a stage under that plan."""
        self.plans = 0
        self._is_news = asyncio.Event()
        """Set after a step, or when another neighbour is to keep our copy and has none yet."""
        self._saved_iteration = 0
        self._copied: tuple[int, HeldState | None] = (0, None)
        """The number of our plan and the state, when the last copy was made."""

    async def __aenter__(self) -> Self:
        """Start the services, each before those that need it. Raises HostDown."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._gradient_exchange)
            await stack.enter_async_context(self.states)
            await stack.enter_async_context(self.member)
            await stack.enter_async_context(self.decode)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(exc_type, exc, tb)

    @property
    def part(self) -> StagePart | None:
        """The layers that we hold, or None."""
        return self._held.model.part if self._held is not None and self.ready.is_set() else None

    @property
    def model(self) -> StageModel | None:
        return self._held.model if self._held is not None else None

    @property
    def version(self) -> int:
        """Optimizer steps in the current weights. To be read in the stage's thread."""
        return self._worker.version if self._worker is not None else 0

    async def prepare(self, agreed: AgreedPlan) -> None:
        """Load the layers of the next plan while training continues under the current one. Raises
        ModelError."""
        self._next = None
        part = part_of(agreed, self._peer_id)
        if part is None or (self._held is not None and self._held.model.part == part):
            return
        free_bytes = self._settings.free_bytes
        if self._held is None or self._held.size_bytes + self._bytes_under(agreed) <= free_bytes:
            self._next = await asyncio.to_thread(self._load, part)

    def _bytes_under(self, agreed: AgreedPlan) -> int:
        stage = agreed.planned_stage_of(self._peer_id)
        return 0 if stage is None else stage.held_bytes

    async def take(self, agreed: AgreedPlan) -> None:
        """Take our assignment in a plan. Raises ModelError, CheckpointError."""
        if self.member.lost_track and self._held is not None:
            # The stage's weights may differ from its replicas', even if this attempt fails.
            self._held.iteration, self._held.is_known = None, False
        # A step that is still closing would change the weights that we read, and keep its stage in memory.
        self.member.unassign()
        self.ready.clear()
        # Rollouts under way do not wait for steps of the former plan.
        self.decode.hold(None)
        # Another step may have been taken since the last one that was reported.
        version = await self.member.in_stage_thread(lambda: self.version)
        part, node = part_of(agreed, self._peer_id), agreed.node_of(self._peer_id)
        assignment = None
        if node is not None:
            assignment = Assignment(agreed.plan, agreed.digest, agreed.peers, node, agreed.iteration)
        self._gradient_exchange.admit(agreed.peers, assignment)
        former = LayerHolders(agreed.before.ranges if agreed.before is not None else {})
        self.states.admit(agreed.members, holders_of(agreed), former=former)
        self.agreed = agreed
        self.plans += 1
        if part is None or assignment is None:
            self.decode.adopt(None)
            self._held = self._next = self._worker = None
            logger.info(
                "epoch %d: no stage for us under plan %s, standing by", agreed.epoch, agreed.digest[:8]
            )
            return
        held = await self._holding(part)
        worker = StageWorker(
            held.model,
            slots=agreed.plan.instance.memory[assignment.own],
            max_tokens=self._settings.max_tokens,
            activations=self._settings.activations,
            iteration=agreed.iteration,
        )
        if held is self._held and self._worker is not None and held.is_known:
            held.iteration = version
        await self._bring_up_to_date(held, worker, agreed)
        self.states.settle()
        held.size_bytes = self._bytes_under(agreed)
        self._held, self._next, self._worker = held, None, worker
        state = await self._publish(held, worker)
        self.member.assign(
            assignment,
            worker,
            held.optimizer,
            start=state if held.is_known else None,
            offer=partial(self._offer, held),
        )
        data_nodes = agreed.partition.stages[0].peers
        # No path of another data node includes ours.
        owners = (self._peer_id,) if self._peer_id in data_nodes else data_nodes
        caches = StageCaches(held.model, max_bytes=self._settings.cache_bytes, owners=owners)
        self.decode.hold(caches)
        stage_of = agreed.plan.instance.stage_of
        self.decode.adopt(PlanMembers(agreed.digest, agreed.peers, assignment.own, stage_of))
        self.ready.set()
        self._is_news.set()
        logger.info(
            "epoch %d: stage %d of %d (layers %d to %d) with %d others, iteration %d, plan %s: "
            "%.2f s planned",
            agreed.epoch, assignment.stage, len(agreed.plan.instance.stages),
            part.first_layer, part.end_layer - 1, len(agreed.peers) - 1, agreed.iteration,
            agreed.digest[:8], agreed.makespan_s,
        )  # fmt: skip

    async def stepped(self) -> None:
        """Record that the pipeline has taken a step."""
        held, worker = self._held, self._worker
        if held is not None and worker is not None:
            held.iteration = await self.member.in_stage_thread(lambda: worker.version)
            held.is_known = True
        self._is_news.set()

    async def hand_on_forever(self) -> None:
        """Pass on the state after each step until cancelled. A slow neighbour delays nothing else."""
        while True:
            await self._is_news.wait()
            self._is_news.clear()
            await self.hand_on()

    async def hand_on(self) -> None:
        """Have a neighbour copy the state after a step and, when due, write it to disk."""
        held, worker = self._held, self._worker
        if held is None or worker is None or held.iteration is None:
            return
        due = held.iteration - self._saved_iteration >= self._settings.checkpoint_every
        state = await self._newest(held, worker) if due else held.newest
        if state is not None and due:
            await self.save(state)
        # A newer state was offered in the middle of a step, on which the replicas have yet to agree.
        if state is not None and state.holding.iteration <= held.iteration and self._is_to_be_copied(state):
            self._copied = self.plans, state
            await self._copy_soon(held, state)

    def _is_to_be_copied(self, state: HeldState) -> bool:
        """Return True for every small state; for large ones, for the first state under a plan and then for
        one in RARE_STEPS."""
        plan, copied = self._copied
        is_small = state.holding.size_bytes <= SMALL_STATE_BYTES
        is_rare = state.holding.iteration % RARE_STEPS == 0
        return plan != self.plans or (state is not copied and (is_small or is_rare))

    async def save(self, state: HeldState) -> None:
        """Write the state to disk. A failure is logged, and the pipeline continues."""
        self._saved_iteration = state.holding.iteration
        try:
            await asyncio.to_thread(self._checkpoints.write, state)
        except StorageError as error:
            logger.error("%s; the pipeline continues", error)

    async def leave(self, *, hand_over: bool) -> None:
        """Write the state to disk. With `hand_over`, have the neighbour copy it first, since we may be
        stopped between a step and its copy."""
        if self._held is None or self._worker is None or self._held.iteration is None:
            return
        state = await self._newest(self._held, self._worker)
        if hand_over:
            await self._copy(state)
        await self.save(state)

    async def whole_state(self, iteration: int) -> Assembled:
        """Return the adapters of all stages: of this iteration if all members have offered it, or else of the
        newest one that they all have. Raises PipelineError."""
        held, agreed = self._held, self.agreed
        if self._settings.stage.trainable == "full" or agreed is None:
            return Assembled({}, iteration)
        if held is None:
            raise PipelineError("our own stage is being changed", hint="the next checkpoint has it")
        return await whole_state(
            self.states,
            agreed.members,
            held.model.part,
            layers=self._whole.layers,
            iteration=iteration,
            wanted=held.model.trainable(),
        )

    async def _holding(self, part: StagePart) -> _Held:
        for held in (self._held, self._next):
            if held is not None and held.model.part == part:
                return held
        # Release the former stage first: there may not be enough memory for both.
        self._held = self._next = self._worker = None
        return await asyncio.to_thread(self._load, part)

    def _load(self, part: StagePart) -> _Held:
        model = self._whole.stage(part, self._settings.stage)
        parameters = list(model.trainable().values())
        return _Held(model, adam(parameters, self._settings.learning_rate))

    async def _bring_up_to_date(self, held: _Held, worker: StageWorker, agreed: AgreedPlan) -> None:
        """Load what the pipeline has learned in these layers by `agreed.iteration`."""
        if held.iteration == agreed.iteration or not worker.model.trainable():
            held.iteration = agreed.iteration
            return
        part = held.model.part
        try:
            # A member that this plan leaves out may be the only one with these layers.
            found = await stage_state(
                self.states,
                agreed.members.union(self._living()),
                part,
                iteration=agreed.iteration,
                layers=self._whole.layers,
                wanted=worker.model.trainable(),
                with_ends=self._settings.stage.trainable == "full",
            )
        except CheckpointError as error:
            if agreed.iteration:
                logger.error(
                    "what was learnt in layers %d to %d is lost, they continue from what is available: %s",
                    part.first_layer, part.end_layer - 1, error,
                )  # fmt: skip
            held.iteration, held.is_known = agreed.iteration, not agreed.iteration
            return
        await self.member.in_stage_thread(lambda: worker.load_state(found.tensors, held.optimizer))
        is_newest = found.iteration == agreed.iteration
        held.iteration, held.is_known = agreed.iteration, is_newest and not found.is_disputed
        if not is_newest:
            logger.warning(
                "the newest state of layers %d to %d is of iteration %d, the pipeline is at %d",
                part.first_layer, part.end_layer - 1, found.iteration, agreed.iteration,
            )  # fmt: skip

    async def _majority_state(self, peers: tuple[str, ...], steps: int) -> Mapping[str, Tensor]:
        """Return the state of our stage after this number of steps, from replicas whose weights are the
        majority's. They offer it right after the step. Raises CheckpointError."""
        if self.part is None:
            raise CheckpointError("no stage is held here")
        with_ends = self._settings.stage.trainable == "full"
        return await majority_state(self.states, peers, self.part, iteration=steps, with_ends=with_ends)

    async def _newest(self, held: _Held, worker: StageWorker) -> HeldState:
        """Return our current state. It is packed only if the last step has not already packed it."""
        version = await self.member.in_stage_thread(lambda: worker.version)
        newest = held.newest
        if newest is not None and newest.holding.iteration == version:
            return newest
        return await self._publish(held, worker)

    async def _publish(self, held: _Held, worker: StageWorker) -> HeldState:
        return self._offer(held, await self.member.in_stage_thread(lambda: worker.state(held.optimizer)))

    def _offer(self, held: _Held, state: HeldState) -> HeldState:
        """Offer a state, so that other members can fetch it."""
        held.newest = state
        if held.model.trainable():
            self.states.publish(state)
        return state

    async def _copy_soon(self, held: _Held, state: HeldState) -> None:
        """Ask the neighbour to keep a copy, until it does or there is a newer state."""
        for _ in range(COPY_TRIES):
            if await self._copy(state) or held.newest is not state:
                return
            await asyncio.sleep(COPY_PAUSE_S)

    async def _copy(self, state: HeldState) -> bool:
        """Ask the neighbour that the plan assigns to us to keep a copy. Returns False if it does not."""
        keeper = holders_of(self.agreed).keepers.get(self._peer_id) if self.agreed is not None else None
        return keeper is None or await self.states.push_copy(keeper, state)
