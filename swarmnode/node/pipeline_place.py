"""A member's place under the plan of the moment: its layers in memory, with what has been learnt.

membership.py (Agreed) -> [StagePlace.take] -> PipelineMember.seat, DecodeNode
after every step -> [StagePlace.stepped] -> own state for others, a copy at a neighbour, checkpoints

Weights come from the model's folder; what was learnt comes from whoever holds the layers now, from the copy
at a neighbour of a member that is gone, or from this member's own checkpoints of an earlier run.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.errors import CheckpointError, NetworkError, PipelineError, StorageError
from swarmnode.pipeline.keeping.averaging import ReplicaExchange, Scope
from swarmnode.pipeline.keeping.checkpoints import StageCheckpoints
from swarmnode.pipeline.keeping.holdings import HeldState, Seats
from swarmnode.pipeline.keeping.states import StateService
from swarmnode.pipeline.plans.planning import Agreed
from swarmnode.pipeline.plans.recovery import neighbour_of
from swarmnode.pipeline.rollouts.decode import DecodeNode
from swarmnode.pipeline.rollouts.stage_cache import StageCaches
from swarmnode.pipeline.running.member import PipelineMember
from swarmnode.pipeline.running.seat import Seat
from swarmnode.pipeline.stages.loading import load_stage
from swarmnode.pipeline.stages.stage import Activations, StageWorker
from swarmnode.pipeline.stages.stage_model import StageModel, StagePart, StageSettings
from swarmnode.pipeline.stages.whole_model import WholeModel
from swarmnode.pipeline.wire.roster import Roster
from swarmnode.training.adam import adam

log = logging.getLogger(__name__)

SMALL_STATE_BYTES = 64 * 2**20
"""A state of this size is offered and copied after every step, a larger one (full training) every tenth."""
RARE_STEPS = 10

STATE_COPIES = 4
"""A state holds the weights and two moments of Adam; layers differ."""
STATE_SPARE_BYTES = 2**20

COPY_S = 60.0
"""For a neighbour to fetch a copy: the next step has another."""

WHOLE_TRIES = 6
WHOLE_PAUSE_S = 0.5
"""Members offer their states right after a step: those of the newest are waited for so often and long."""


@dataclass(frozen=True, slots=True)
class PlaceSettings:
    """How a stage is held here."""

    stage: StageSettings
    learning_rate: float
    max_tokens: int
    """Most of one micro-batch, pads included."""
    activations: Activations
    free_bytes: int
    """For stages: the next one is loaded beside the present one where both fit."""
    cache_bytes: int
    """Keys and values of generation."""
    checkpoint_every: int
    """Optimizer steps between checkpoints of the stage."""


@dataclass(frozen=True, slots=True)
class WholeState:
    """What all stages have learnt, by PEFT's names, on the CPU. Empty with full training."""

    iteration: int
    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


@dataclass(slots=True)
class _Held:
    """A stage in memory."""

    part: StagePart
    model: StageModel
    optimizer: torch.optim.Optimizer
    iteration: int | None = None
    """Optimizer steps inside; None: straight from the folder."""


class StagePlace:
    """Takes the seats that this member is given, one at a time."""

    def __init__(
        self,
        whole: WholeModel,
        settings: PlaceSettings,
        peer_id: str,
        *,
        member: PipelineMember,
        decode: DecodeNode,
        states: StateService,
        averager: ReplicaExchange,
        checkpoints: StageCheckpoints,
        living: Callable[[], Collection[str]],
    ) -> None:
        """`living`: members that answer, whether a plan has a place for them or not."""
        self._whole = whole
        self._settings = settings
        self._peer_id = peer_id
        self._member = member
        self._decode = decode
        self._states = states
        self._averager = averager
        self._checkpoints = checkpoints
        self._living = living
        self._held: _Held | None = None
        self._next: _Held | None = None
        self._worker: StageWorker | None = None
        self._held_bytes = 0
        self.agreed: Agreed | None = None
        """The plan that we have taken our place under."""
        self.seated = asyncio.Event()
        """Set while we have a stage under it."""
        self.plans = 0
        self._saved_iteration = 0

    @property
    def part(self) -> StagePart | None:
        """The layers that are held here; None: none."""
        return self._held.part if self._held is not None and self.seated.is_set() else None

    @property
    def model(self) -> StageModel | None:
        return self._held.model if self._held is not None else None

    @property
    def version(self) -> int:
        """Optimizer steps in the weights at hand; to be asked in the thread of the stage."""
        return self._worker.version if self._worker is not None else 0

    async def prepare(self, agreed: Agreed) -> None:
        """Load the layers of the next plan while training goes on under this one. Raises ModelError."""
        self._next = None
        part = _part_of(agreed, self._peer_id)
        if part is None or (self._held is not None and self._held.part == part):
            return
        planned = agreed.part_of(self._peer_id)
        needed = planned.held_bytes if planned is not None else 0
        if self._held is None or needed + self._held_bytes <= self._settings.free_bytes:
            self._next = await asyncio.to_thread(self._load, part)

    async def take(self, agreed: Agreed) -> None:
        """Take our place under a plan. Raises ModelError, CheckpointError."""
        self.seated.clear()
        self._averager.admit(agreed.peers, _scope_of(agreed, self._peer_id))
        self._states.admit(agreed.members, _seats_of(agreed), former=_former_seats(agreed))
        self.agreed = agreed
        self.plans += 1
        part, node = _part_of(agreed, self._peer_id), agreed.node_of(self._peer_id)
        if part is None or node is None:
            self._stand_by()
            log.info("no stage for us under plan %s: we stand by", agreed.digest[:8])
            return
        held = await self._holding(part)
        worker = StageWorker(
            held.model,
            slots=agreed.plan.instance.memory[node],
            max_tokens=self._settings.max_tokens,
            activations=self._settings.activations,
            iteration=agreed.iteration,
        )
        if held is self._held and self._worker is not None:
            # Another step may have been taken since the last one that was told; who has lost track may have
            # other weights than its replicas.
            held.iteration = None if self._member.lost_track else self._worker.version
        await self._bring_up_to_date(held, worker, agreed)
        self._states.settle()
        self._held, self._next, self._worker = held, None, worker
        planned = agreed.part_of(self._peer_id)
        self._held_bytes = planned.held_bytes if planned is not None else 0
        self._member.seat(
            Seat(agreed.plan, agreed.digest, agreed.peers, node, agreed.iteration), worker, held.optimizer
        )
        self._decode.hold(StageCaches(held.model, max_bytes=self._settings.cache_bytes))
        self._decode.adopt(Roster(agreed.digest, agreed.peers, node))
        self.seated.set()
        await self._publish(held, worker)
        log.info(
            "stage %d of %d (layers %d to %d) with %d others, iteration %d, plan %s: %.2f s planned",
            agreed.plan.instance.stage_of[node], len(agreed.plan.instance.stages), part.first_layer,
            part.end_layer - 1, len(agreed.peers) - 1, agreed.iteration, agreed.digest[:8],
            agreed.makespan_s,
        )  # fmt: skip

    def _stand_by(self) -> None:
        """Let go of what the former plan gave us."""
        self._member.unseat()
        self._decode.hold(None)
        self._held = self._next = self._worker = None
        self._held_bytes = 0

    async def stepped(self) -> str:
        """The pipeline has taken a step; the digest of the weights."""
        held, worker = self._held, self._worker
        if held is None or worker is None:
            return ""
        held.iteration, digest = await self._member.in_stage_thread(
            lambda: (worker.version, worker.state().digest)
        )
        return digest

    async def hand_on(self) -> None:
        """After a step: offer the new state, keep a copy elsewhere and, when due, on disk."""
        held, worker = self._held, self._worker
        if held is None or worker is None or held.iteration is None:
            return
        iteration = held.iteration
        due = iteration - self._saved_iteration >= self._settings.checkpoint_every
        small = sum(p.nbytes for p in held.model.trainable().values()) * 3 <= SMALL_STATE_BYTES
        if small or due or iteration % RARE_STEPS == 0:
            state = await self._publish(held, worker)
            await self._copy(state)
            if due:
                await self.save(state)

    async def save(self, state: HeldState) -> None:
        """Write what is held here to disk; a failure is told, and the pipeline goes on."""
        self._saved_iteration = state.holding.iteration
        try:
            await asyncio.to_thread(self._checkpoints.write, state)
        except StorageError as error:
            log.error("%s; the pipeline goes on", error)

    async def leave(self, *, hand_over: bool) -> None:
        """What was learnt goes to disk and, where others go on, to the neighbour: we may be stopped between a
        step and its copy."""
        if self._held is None or self._worker is None or self._held.iteration is None:
            return
        state = await self._publish(self._held, self._worker)
        if hand_over:
            await self._copy(state)
        await self.save(state)

    async def whole_state(self, iteration: int) -> WholeState:
        """The adapters of all stages, of this iteration if all members have told theirs, else of the newest
        that they have. Raises PipelineError."""
        if self._settings.stage.trainable == "full" or self.agreed is None:
            return WholeState(iteration, {}, {})
        everything = StagePart(0, self._whole.layers, has_ends=True)
        members = sorted(self.agreed.members)
        for attempt in reversed(range(WHOLE_TRIES)):
            try:
                found = await self._states.assemble(
                    members, everything, at_least=iteration if attempt else 1, at_most=iteration
                )
            except CheckpointError as error:
                if not attempt:
                    raise PipelineError(error.message, hint=error.hint) from error
                await asyncio.sleep(WHOLE_PAUSE_S)
            else:
                moments = {name: value for name, value in found.tensors.items() if "/" in name}
                adapter = {name: value for name, value in found.tensors.items() if "/" not in name}
                return WholeState(found.iteration, adapter, moments)
        raise AssertionError("the last attempt returns or raises")

    async def _holding(self, part: StagePart) -> _Held:
        for held in (self._held, self._next):
            if held is not None and held.part == part:
                return held
        # The former stage goes first: there may be no memory for both.
        self._held = self._next = self._worker = None
        self._decode.hold(None)
        return await asyncio.to_thread(self._load, part)

    def _load(self, part: StagePart) -> _Held:
        whole = self._whole
        model = load_stage(whole.folder, part, self._settings.stage, cut=whole.cut, weights=whole.weights)
        parameters = list(model.trainable().values())
        return _Held(part, model, adam(parameters, self._settings.learning_rate))

    async def _bring_up_to_date(self, held: _Held, worker: StageWorker, agreed: Agreed) -> None:
        """What the pipeline has learnt of these layers by `agreed.iteration`."""
        if held.iteration == agreed.iteration or not worker.model.trainable():
            held.iteration = agreed.iteration
            return
        full = self._settings.stage.trainable == "full"
        try:
            # A member that is left out of this plan may be the only one that has these layers.
            found = await self._states.assemble(
                sorted(agreed.members.union(self._living())),
                held.part,
                needs_ends=full and held.part.has_ends,
                at_least=1,
                at_most=agreed.iteration,
                most_bytes=self._most_bytes(held),
                wanted=worker.model.trainable(),
            )
        except CheckpointError as error:
            if agreed.iteration:
                log.error(
                    "what was learnt in layers %d to %d is lost, they go on from what is at hand: %s",
                    held.part.first_layer, held.part.end_layer - 1, error,
                )  # fmt: skip
            held.iteration = agreed.iteration
            return
        await self._member.in_stage_thread(lambda: worker.load_state(found.tensors, held.optimizer))
        held.iteration = agreed.iteration
        if found.iteration != agreed.iteration:
            log.warning(
                "the newest state of layers %d to %d is of iteration %d, the pipeline is at %d",
                held.part.first_layer, held.part.end_layer - 1, found.iteration, agreed.iteration,
            )  # fmt: skip

    def _most_bytes(self, held: _Held) -> int | None:
        """That the state of one stage may have, however the layers are divided. None: with full training the
        ends count, which not every stage has."""
        if self._settings.stage.trainable == "full":
            return None
        own = sum(p.nbytes for p in held.model.trainable().values())
        layers = max(held.part.end_layer - held.part.first_layer, 1)
        return STATE_COPIES * own * self._whole.layers // layers + STATE_SPARE_BYTES

    async def _publish(self, held: _Held, worker: StageWorker) -> HeldState:
        # Both in the thread of the stage: another step may follow at once.
        version, packed = await self._member.in_stage_thread(
            lambda: (worker.version, worker.state(held.optimizer))
        )
        state = HeldState.of(held.part, version, packed)
        if held.model.trainable():
            self._states.publish(state)
        return state

    async def _copy(self, state: HeldState) -> None:
        """At the neighbour that the plan gives us; one that does not keep it costs a line in the log."""
        agreed = self.agreed
        node = agreed.node_of(self._peer_id) if agreed is not None else None
        if agreed is None or node is None:
            return
        neighbour = neighbour_of(agreed.plan, node)
        if neighbour is None:
            return
        try:
            async with asyncio.timeout(COPY_S):
                await self._states.push_copy(agreed.peers[neighbour], state)
        except (NetworkError, TimeoutError) as error:
            log.debug("no copy of our stage at %s: %s", agreed.peers[neighbour], error)


def _scope_of(agreed: Agreed, peer_id: str) -> Scope | None:
    stage, part = agreed.stage_of(peer_id), agreed.part_of(peer_id)
    if stage is None or part is None:
        return None
    return Scope(agreed.digest, stage, frozenset(part.peers), agreed.iteration)


def _seats_of(agreed: Agreed) -> Seats:
    """Who holds which layers under a plan, and who keeps whose copy."""
    parts, plan = agreed.partition.stages, agreed.plan
    nodes = {peer: neighbour_of(plan, node) for node, peer in enumerate(agreed.peers)}
    return Seats(
        {peer: (part.first, part.end) for part in parts for peer in part.peers},
        {peer: agreed.peers[keeper] for peer, keeper in nodes.items() if keeper is not None},
    )


def _former_seats(agreed: Agreed) -> Seats | None:
    before = agreed.before
    if before is None:
        return None
    starts = (0, *before.ends)
    return Seats(
        {
            peer: (starts[stage], before.ends[stage])
            for peer, stage in before.stage_of.items()
            if 0 <= stage < len(before.ends)
        }
    )


def _part_of(agreed: Agreed, peer_id: str) -> StagePart | None:
    part, stage = agreed.part_of(peer_id), agreed.stage_of(peer_id)
    return None if part is None else StagePart(part.first, part.end, has_ends=stage == 0)
