"""Packs a stage's state after each step, offers it to other members, and keeps the stage's replicas equal.

step_barrier.py (the step is taken) -> [Alignment] -> GradientExchange.compare -> replica_vote.py
                                      |
              the state is offered (own_stage.py: others may fetch it)

replica_vote.py contains the decision, and says what a liar could gain. This module carries it out: keep our
state, take over that of the replicas that are right, or go back to the state before the step. Tensors from
another replica must have the digest that was voted for.

A large state (full training) is packed with the optimizer's moments only every tenth step, and whenever
replicas differ; otherwise its digest covers the weights alone.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from swarmnode.errors import CheckpointError, NetworkError
from swarmnode.extensions.pipeline.execution.member_records import Reload
from swarmnode.extensions.pipeline.execution.stage_context import StageContext
from swarmnode.extensions.pipeline.replication.gradient_exchange import GradientExchange, StageIteration
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaVote, is_near
from swarmnode.extensions.pipeline.stages.packed_state import (
    MOMENTS,
    digest_of,
    matching_moments,
    matching_tensors,
    pack_state,
    unpack_state,
)
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.states.holdings import HeldState

logger = logging.getLogger(__name__)

SMALL_STATE_BYTES = 64 * 2**20
"""States up to this size are packed whole and copied after every step, larger ones (full training) rarely."""
RARE_STEPS = 10


def is_whole(model: StageModel, steps: int) -> bool:
    """Return True if the optimizer's moments are packed with the weights after this number of steps."""
    small = sum(p.nbytes for p in model.trainable().values()) * len(MOMENTS) <= SMALL_STATE_BYTES
    return small or steps % RARE_STEPS == 0


@dataclass(frozen=True, slots=True)
class IterationEnd:
    """The end of an iteration at this member, after its stage was compared with the stage's replicas."""

    undone: bool = False
    """True if the step does not count: all replicas went back to the state before it."""
    lost_track: bool = False
    """True if we did not hear of the end, or cannot fetch the right weights: this member needs a new
    assignment."""
    grad_norm: float | None = None
    """Norm of the gradient of the step. None if no step was taken, or if it was undone."""


class Alignment:
    """Keeps a stage equal among its replicas, step after step of one assignment."""

    def __init__(
        self,
        context: StageContext,
        gradient_exchange: GradientExchange,
        reload: Reload | None,
        *,
        start: HeldState | None,
        offer: Callable[[HeldState], object],
    ) -> None:
        """`start`: the state at the assignment's first iteration, or None if it may differ from the
        pipeline's. `offer`: called with states that include the optimizer's moments. A second state for the
        same number of steps replaces the first."""
        self._context = context
        self._gradient_exchange = gradient_exchange
        self._reload = reload
        self._before = start
        self._offer = offer

    async def align(self) -> IterationEnd:
        """Compare the weights after the iteration's step, and replace them with those of the majority if they
        differ."""
        context = self._context
        whole = is_whole(context.worker.model, context.iteration + 1)
        packed = await self._packed(whole=whole)
        if whole:
            self._offer(packed)
        vote = await self._compared(packed.holding.digest)
        if not vote.differs and vote.agrees:
            self._before = packed if whole else self._before
            return IterationEnd()
        full = packed if whole else await self._packed(whole=True)
        if not whole:
            # The other replicas need it to settle the vote.
            self._offer(full)
        if vote.agrees:
            self._before = full
            return IterationEnd()
        if vote.rivals:
            return await self._settle(vote, packed, full)
        tensors = await self._theirs(vote.ask, {vote.digest}, whole=whole)
        if tensors is None:
            return IterationEnd(lost_track=True)
        return await self._adopted(tensors)

    async def _settle(self, vote: ReplicaVote, packed: HeldState, full: HeldState) -> IterationEnd:
        """Resolve a vote without a majority. `packed`: the state that was compared. `full`: the same with
        Adam's moments."""
        context, before = self._context, self._before
        whole, names = packed is full, [", ".join(side.peers) for side in vote.rivals]
        assert before is not None, "who does not know where it stands has no rivals"
        # A replica that switches to our state meanwhile can give us the same tensors.
        found = [
            await self._unpacked(full)
            if side.digest == packed.holding.digest
            else await self._theirs(side.peers, {side.digest, packed.holding.digest}, whole=whole)
            for side in vote.rivals
        ]
        states = [tensors for tensors in found if tensors is not None]
        if len(states) == len(found):
            states.append(await self._unpacked(full))
            if await asyncio.to_thread(_all_near, states, await self._unpacked(before)):
                if vote.rivals[0].digest == packed.holding.digest:
                    self._before = full
                    return IterationEnd()
                logger.info("our weights equal those of %s except for rounding: taking theirs", names[0])
                return await self._adopted(states[0])
        if {side.before for side in vote.rivals} == {before.holding.digest}:
            logger.warning(
                "step %d is undone: the weights of %s differ, and it is unknown which are right. "
                "If this continues, leave one out (pipeline.members)",
                context.iteration + 1, " and ".join(names),
            )  # fmt: skip
            return replace(await self._adopted(await self._unpacked(before)), undone=True)
        logger.warning(
            "the weights of %s differ and did so before step %d: each keeps its own",
            " and ".join(names), context.iteration + 1,
        )  # fmt: skip
        self._before = full
        return IterationEnd()

    async def _theirs(
        self, peers: tuple[str, ...], digests: set[str], *, whole: bool
    ) -> dict[str, Tensor] | None:
        """Fetch the state of these replicas after the step. Returns None if none of them has one with any of
        these digests."""
        context = self._context
        if self._reload is None or not peers:
            return None
        try:
            async with asyncio.timeout(context.settings.close_timeout_s):
                tensors = await self._reload(peers, context.iteration + 1)
            return await asyncio.to_thread(_checked, tensors, context.worker.model, digests, whole=whole)
        except (NetworkError, CheckpointError, TimeoutError) as error:
            logger.warning("cannot get the weights of %s: %s", ", ".join(peers), error)
            return None

    async def _adopted(self, tensors: Mapping[str, Tensor]) -> IterationEnd:
        """Load this state, continue from it, and offer it to other members."""
        context = self._context
        await context.queue.call(context.worker.load_state, tensors, context.optimizer)
        self._before = await self._packed(whole=True)
        self._offer(self._before)
        return IterationEnd()

    async def _unpacked(self, state: HeldState) -> dict[str, Tensor]:
        return await asyncio.to_thread(unpack_state, state.data)

    async def _packed(self, *, whole: bool) -> HeldState:
        context = self._context
        return await context.queue.call(context.worker.state, context.optimizer if whole else None)

    async def _compared(self, digest: str) -> ReplicaVote:
        context, assignment = self._context, self._context.assignment
        try:
            async with asyncio.timeout(context.settings.close_timeout_s):
                return await self._gradient_exchange.compare(
                    digest,
                    StageIteration(assignment.digest, assignment.stage, context.iteration),
                    assignment.replicas,
                    before=self._before.holding.digest if self._before is not None else "",
                )
        except (NetworkError, TimeoutError) as error:
            logger.warning("the replicas' weights were not compared: %s", error)
            return ReplicaVote(agrees=True, digest=digest)


def _checked(
    tensors: Mapping[str, Tensor], model: StageModel, digests: set[str], *, whole: bool
) -> dict[str, Tensor]:
    """Return the tensors of this stage from a fetched state, checked to fit and to have one of these digests.
    Raises CheckpointError."""
    parameters = model.trainable()
    own = {name: t for name, t in tensors.items() if (name.partition("/")[2] or name) in parameters}
    compared = own if whole else {name: t for name, t in own.items() if name in parameters}
    if digest_of(pack_state(compared)) not in digests:
        raise CheckpointError("a replica gives other weights than it told of", hint="ask another one")
    matching_tensors(own, parameters)
    matching_moments(own, parameters)
    return own


def _all_near(states: Sequence[Mapping[str, Tensor]], before: Mapping[str, Tensor]) -> bool:
    """Return True if every state equals the first one except for rounding."""
    return all(is_near(states[0], other, before) for other in states[1:])
