r"""Members of a pipeline keep copies of each other's stage states, and give them to members that need them.

StageWorker.state (at an iteration's boundary) -> [StateService.publish] -> asked for by members
                                              \-> [push_copy] -> a neighbour keeps it, for when we are gone
newcomer, replica that differs <- [assemble, fetch] <- members' own states and copies

A state is identified by its digest, so it does not matter which holder sends it: another holder can finish a
transfer, and bytes with another digest are rejected. Which digest to believe depends on the members that
should hold such a state under the plans that were run (holdings.py). Only members are answered. Within
limits, we keep copies for the members that the plan assigns to us. Pushing a copy only offers it; we fetch it
ourselves.

Before a state counts, we check that it is what its holder reported: all its layers are present and fit.
`StageWorker.load_state` checks again, before it changes a tensor.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from swarmnode.errors import CheckpointError, NetworkError, Rejected
from swarmnode.extensions.pipeline.stages.packed_state import (
    digest_of,
    matching_moments,
    matching_tensors,
    unpack_state,
)
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.states.holdings import (
    Assembled,
    HeldState,
    Holding,
    LayerHolders,
    Offer,
    covering,
    layer_of,
    of_part,
    offers,
)
from swarmnode.extensions.pipeline.states.state_copies import StateCopies
from swarmnode.extensions.pipeline.states.state_questions import (
    MAX_HOLDINGS,
    AskHoldings,
    AskState,
    Holdings,
    OfferCopy,
    StateQuestion,
)
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import AnswerBody, MemberStreams
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService

logger = logging.getLogger(__name__)

KEPT_OWN = 2
"""Number of own states kept. A member that is still fetching the last one after a boundary can finish, and a
copy that is one step old can still be combined with other layers of the same iteration."""

JUDGING_PLANS = 3
"""Number of plans by which a holder's credibility is judged: a copy may belong to a member that left a few
plans ago."""

NOBODY = LayerHolders()

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
"""Types of tensors that a state may contain: weights and Adam's moments."""


@dataclass(frozen=True, slots=True)
class StateLimits:
    max_state_bytes: int = 4 * 2**30
    """Limit on one stage's state, including the optimizer's moments."""
    max_copies: int = 4
    max_copy_bytes: int = 4 * 2**30
    """Limit on all copies together."""
    copy_timeout_s: float = 60.0
    """Time limit for a neighbour to fetch a copy, whatever its size: the next step makes another copy."""
    answer_timeout_s: float = 10.0
    """Time limit of an answer without a state."""
    least_bytes_per_s: float = 250_000.0
    """Rate (2 Mbit/s) below which a member that sends a state counts as dead."""


class StateService:
    """Keeps states for the members of a pipeline, and fetches theirs.

    async with StateService(streams) as states:
        states.admit(assignment.peers, LayerHolders({peer: (0, 8), ...}, {peer: keeper, ...}))
        states.settle()
        states.publish(worker.state(optimizer))
    """

    def __init__(
        self,
        streams: MemberStreams,
        limits: StateLimits | None = None,
        *,
        earlier: Sequence[HeldState] = (),
    ) -> None:
        """`earlier`: states that an earlier run left on this disk, offered until the first step is taken from
        them. Other members may still need them after we have taken our assignment."""
        self._streams = streams
        self._peer_id = streams.peer_id
        self._limits = limits or StateLimits()
        self._members: frozenset[str] = frozenset()
        self._own: list[HeldState] = []
        self._left: HeldState | None = None
        self._earlier = tuple(earlier)
        self._copies = StateCopies(
            self._peer_id, most=self._limits.max_copies, most_bytes=self._limits.max_copy_bytes
        )
        self._former = LayerHolders()
        self._settled: list[LayerHolders] = []

    async def __aenter__(self) -> Self:
        handler = ServiceHandler(StateQuestion, self._answer, lambda peer_id: peer_id in self._members)
        self._streams.incoming.begin(MemberService.STATES, handler)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._streams.incoming.end(MemberService.STATES)

    def admit(
        self,
        peers: Collection[str],
        layer_holders: LayerHolders = NOBODY,
        *,
        former: LayerHolders = NOBODY,
    ) -> None:
        """Answer these members from now on. Copies of members that have left stay: they are kept for that
        case.

        `layer_holders`: of the plan being adopted; determines whose copies we keep. `former`: of the plan
        before, as agreed on by the members. Its members, and those of plans that we settled under, are
        believed first. While neither is known (all start from disk), all members count equally.
        """
        self._members = frozenset(peers)
        self._copies.layer_holders, self._former = layer_holders, former

    def settle(self) -> None:
        """Record that we, and presumably the others, hold the stages of the current plan. From now on its
        members are believed about them."""
        self._settled = [*self._settled[1 - JUDGING_PLANS :], self._copies.layer_holders]

    def publish(self, held: HeldState) -> None:
        """Publish this stage's state at an iteration boundary. The one before it can still be fetched.

        A second state of the same layers and boundary replaces the first. The first is no longer reported,
        but is still given to a member that asks for its digest.
        """
        if any(held.holding.iteration > one.holding.iteration for one in self._earlier):
            self._earlier = ()
        same = [one for one in self._own if _place(one.holding) == _place(held.holding)]
        self._left = same[0] if same and same[0].holding != held.holding else None
        others = [one for one in self._own if _place(one.holding) != _place(held.holding)]
        self._own = [*others[1 - KEPT_OWN :], held]

    def holdings(self) -> tuple[Holding, ...]:
        return tuple(held.holding for held in (*self._own, *self._earlier, *self._copies.kept.values()))

    async def push_copy(self, peer_id: str, held: HeldState) -> bool:
        """Ask a neighbour to keep a copy of a published state. Returns False if it does not."""
        timeout_s = min(self._seconds(held.holding.size_bytes), self._limits.copy_timeout_s)
        offer = OfferCopy(held.holding)
        try:
            return await self._streams.ask(peer_id, MemberService.STATES, offer, bool, timeout_s=timeout_s)
        except (NetworkError, Rejected) as error:
            logger.debug("%s did not keep our state: %s", peer_id, error)
            return False

    async def fetch(self, offer: Offer) -> HeldState:
        """Return an offered state from the first holder that delivers it. Raises CheckpointError
        if none does."""
        holding = offer.holding
        if holding.size_bytes > self._limits.max_state_bytes:
            bound = self._limits.max_state_bytes
            raise CheckpointError(f"a stage's state has {holding.size_bytes} bytes, the bound is {bound}")
        # First let holders continue each other's transfers, then try each alone: one bad piece spoils all.
        for alone in (False, True):
            data = bytearray()
            for peer_id in offer.holders:
                if alone:
                    data = bytearray()
                await self._continue(peer_id, holding, data)
                if len(data) == holding.size_bytes:
                    if await asyncio.to_thread(digest_of, data) == holding.digest:
                        return HeldState(holding, bytes(data))
                    data = bytearray()
        raise CheckpointError(
            f"nobody of {len(offer.holders)} gave the state of layers "
            f"{holding.first_layer} to {holding.end_layer - 1}",
            hint="its holders have left; the next iteration's is there soon",
        )

    async def assemble(
        self,
        peers: Collection[str],
        part: StagePart,
        *,
        needs_ends: bool = False,
        at_least: int = 0,
        at_most: int,
        most_bytes: int | None = None,
        wanted: Mapping[str, Tensor] | None = None,
        mixed: bool = False,
    ) -> Assembled:
        """Return the state of a part of the model, from members whose stages hold its layers or held them.

        Takes the newest iteration within the bounds that covers the whole part, from the members that should
        have it (`covering`). `needs_ends`: for a part with ends, under full training. `most_bytes`: limit on
        one state. `wanted`: the parameters that the state is for (`StageModel.trainable()`); without them,
        every layer must be present. `mixed`: take the newest state of each layer. Raises CheckpointError if
        no member holds a layer or, without `mixed`, if no iteration is complete.
        """
        told = await of_each(sorted({*peers} - {self._peer_id}), self._holdings_of)
        own = {self._peer_id: self.holdings()}
        most = self._limits.max_state_bytes if most_bytes is None else most_bytes
        # Other members come first: the first of equals counts, and we may be the one that has lost track.
        holders = (*self._settled, self._former)
        every = (*offers(told, holders), *offers(own, holders))
        offered = [offer for offer in every if offer.holding.size_bytes <= most]
        while True:
            chosen = covering(
                offered, part, needs_ends=needs_ends, at_least=at_least, at_most=at_most, mixed=mixed
            )
            if chosen is None:
                raise CheckpointError(
                    f"no members hold layers {part.first_layer} to {part.end_layer - 1} of one iteration "
                    f"between {at_least} and {at_most}",
                    hint="start these layers from the model's folder, or from a checkpoint",
                )
            tensors, failed = await self._fetch_all(chosen, part, wanted)
            if failed is None:
                iteration = min((offer.holding.iteration for offer in chosen), default=at_most)
                is_disputed = any(offer.is_disputed for offer in chosen)
                return Assembled(of_part(tensors, part), iteration, is_disputed)
            # Do not wait again, for the next state, for members that failed to deliver this one.
            failing = set(failed.holders) - {self._peer_id}
            offered = [o for o in offered if o != failed and not failing.issuperset(o.holders)]

    async def _fetch_all(
        self, chosen: Sequence[Offer], part: StagePart, wanted: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], Offer | None]:
        """Return the tensors of these states, and the offer that failed: its bytes did not come, or do not
        fit."""
        tensors: dict[str, Tensor] = {}
        for offer in chosen:
            try:
                held = self._at_hand(offer.holding.digest) or await self.fetch(offer)
                found = await asyncio.to_thread(_opened, held.data, offer.holding, part, wanted)
            except CheckpointError as error:
                logger.warning("looking for layers at another peer: %s", error.message)
                return {}, offer
            tensors = found | tensors
        return tensors, None

    async def _continue(self, peer_id: str, holding: Holding, data: bytearray) -> None:
        """Append the bytes of a state that this holder sends. Bytes that came before a failure are kept."""

        def rest(size_bytes: int) -> int:
            begun.reschedule(None)
            if size_bytes != holding.size_bytes:
                raise Rejected("wrong_size", f"of the state {holding.digest[:8]}")
            return holding.size_bytes - len(data)

        question = AskState(holding.digest, len(data))
        timeout_s = self._seconds(holding.size_bytes - len(data))
        try:
            async with asyncio.timeout(self._limits.answer_timeout_s) as begun:
                await self._streams.ask(
                    peer_id, MemberService.STATES, question, int,
                    timeout_s=timeout_s, body=AnswerBody(rest, data),
                )  # fmt: skip
        except (NetworkError, Rejected, TimeoutError) as error:
            logger.debug("%s did not give a complete state: %s", peer_id, error)

    async def _holdings_of(self, peer_id: str) -> tuple[Holding, ...]:
        timeout_s = self._limits.answer_timeout_s
        try:
            told = await self._streams.ask(
                peer_id, MemberService.STATES, AskHoldings(), Holdings, timeout_s=timeout_s
            )
            return told.held
        except (NetworkError, Rejected) as error:
            logger.debug("%s did not say what it holds: %s", peer_id, error)
            return ()

    async def _answer(self, incoming: Incoming[StateQuestion]) -> Reply:
        question = incoming.message
        if isinstance(question, AskHoldings):
            return Reply(Holdings(self.holdings()[:MAX_HOLDINGS]))
        if isinstance(question, OfferCopy):
            return Reply(await self._keep(incoming.peer_id, question.holding))
        held = self._at_hand(question.digest)
        if held is None or question.offset > len(held.data):
            raise Rejected(Refusal.UNKNOWN_STATE, question.digest)
        return Reply(len(held.data), memoryview(held.data)[question.offset :])

    async def _keep(self, peer_id: str, holding: Holding) -> bool:
        """Fetch an offered copy if it is ours to keep, newer than the one we have, and there is room for
        it."""
        former = self._copies.kept.get(peer_id)
        if former is not None and holding.iteration <= former.holding.iteration:
            return former.holding == holding
        if not self._copies.is_ours_to_keep(peer_id, holding) or peer_id in self._copies.coming:
            return False
        with self._copies.room(peer_id, holding.size_bytes) as is_room:
            if not is_room:
                return False
            try:
                self._copies.kept[peer_id] = await self.fetch(Offer(holding, (peer_id,)))
            except CheckpointError:
                return False
            return True

    def _at_hand(self, digest: str) -> HeldState | None:
        left = () if self._left is None else (self._left,)
        held = (*self._own, *left, *self._earlier, *self._copies.kept.values())
        return next((one for one in held if one.holding.digest == digest), None)

    def _seconds(self, size_bytes: int) -> float:
        return self._limits.answer_timeout_s + size_bytes / self._limits.least_bytes_per_s


def _place(holding: Holding) -> tuple[int, int, int]:
    return holding.first_layer, holding.end_layer, holding.iteration


def _opened(
    data: bytes, holding: Holding, part: StagePart, wanted: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return the tensors of a state that belong to this part and to the layers that its holder reported.
    Raises CheckpointError if any are missing or do not fit."""
    first = max(holding.first_layer, part.first_layer)
    said = StagePart(first, max(first, min(holding.end_layer, part.end_layer)), holding.has_ends)
    found = of_part(of_part(unpack_state(data), said), part)
    strange = {str(tensor.dtype) for tensor in found.values()} - {str(dtype) for dtype in DTYPES}
    if strange:
        raise CheckpointError(f"a stage's state holds {', '.join(sorted(strange))}")
    if wanted is not None:
        own = of_part(wanted, said)
        matching_tensors(found, own)
        matching_moments(found, own)
    elif missing := set(range(said.first_layer, said.end_layer)) - {layer_of(name) for name in found}:
        raise CheckpointError(f"a stage's state lacks layers {sorted(missing)}")
    return found
