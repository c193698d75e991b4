"""Questions of a data node to others: how far a feed came, and if a stage is held under our plan.

decode_node.py (nothing came around) -> [Tracing.find] -> FeedQuestion -> [Tracing] of every node ->
    StepProgress
decode_node.py (a node is at another plan) -> [Tracing.until_assigned] -> that node, now and then

Members take their assignments under a plan a moment after each other, and a newcomer knows no other member
before it has one. A member that is not ready is asked again until it is ready, until our own plan changes, or
until it is gone.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import msgspec
from torch import Tensor

from swarmnode.errors import NetworkError, PeerUnreachable, Rejected
from swarmnode.extensions.pipeline.rollouts.chain import Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_messages import (
    FeedQuestion,
    StepProgress,
    who_stopped,
)
from swarmnode.extensions.pipeline.wire.member_streams import BrokenOff, MemberStreams
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.services import MemberService

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""Bound of the growing pause after which a node that is not ready is asked again."""

MAX_REMEMBERED = 1024
"""Feeds of which the progress is remembered: a data node asks about recent ones."""

MAX_BROKEN_OFF = 12
"""Feeds in a row that a member may break off while it says that it is ready, before it counts as lost."""


NOT_READY = StepProgress(came=False, went=False, assigned=False)


class Tracing:
    """Answers questions about the steps that pass us, and asks about our own."""

    def __init__(
        self,
        streams: MemberStreams,
        plans: Mapping[str, PlanMembers],
        *,
        ask_timeout_s: float,
        is_assigned: Callable[[str], bool],
    ) -> None:
        """`is_assigned`: returns True if our own stage is held under this plan."""
        self._streams = streams
        self._plans = plans
        self._ask_timeout_s = ask_timeout_s
        self._is_assigned = is_assigned
        self._progress: OrderedDict[tuple[str, int], StepProgress] = OrderedDict()
        self._broken_off: Counter[str] = Counter()

    def note(self, owner: str, number: int, progress: StepProgress) -> None:
        """Record the progress of another member's feed here."""
        self._progress[owner, number] = progress
        if len(self._progress) > MAX_REMEMBERED:
            self._progress.popitem(last=False)

    def came_around(self, peer_ids: tuple[str, ...]) -> None:
        """Record that a feed has passed these members."""
        for peer_id in peer_ids:
            del self._broken_off[peer_id]

    async def find(self, members: PlanMembers, path: tuple[int, ...], number: int, detail: str) -> Stopped:
        """Ask every node of the path of a feed that did not come around. Returns the stop with the node at
        which it stands."""
        asked = FeedQuestion(members.plan, number)
        answers = await of_each(path[1:], lambda node: self._progress_at(members.peers[node], asked))
        node = who_stopped(path, answers)
        return Stopped(StopReason.FORGOTTEN if node is None else StopReason.LOST, node, detail)

    async def until_assigned(
        self, members: PlanMembers, stopped: Stopped, suspect: Callable[[str, str], None]
    ) -> Tensor | Stopped:
        """Ask the node that stopped a feed until it is ready. Returns FORGOTTEN, so that everything is sent
        again, or LOST if the node cannot be reached. The caller sets the deadline; `suspect` is called
        first."""
        node, detail = stopped.node, stopped.detail
        assert node is not None
        peer_id, pause_s = members.peers[node], FIRST_PAUSE_S
        asked = FeedQuestion(members.plan, 0)
        while True:
            try:
                progress = await self._ask(peer_id, asked)
            except PeerUnreachable:
                return Stopped(StopReason.LOST, node, f"{detail}, and cannot be reached")
            except NetworkError as error:
                # It is slow, or it is us.
                logger.debug("%s does not say if it is ready: %s", peer_id, error)
                progress = NOT_READY
            if progress.assigned:
                break
            if pause_s == FIRST_PAUSE_S:
                logger.info("generation waits for %s to take its place: %s", peer_id, detail)
                suspect(peer_id, detail)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        if pause_s == FIRST_PAUSE_S:
            self._broken_off[peer_id] += 1
        if self._broken_off[peer_id] > MAX_BROKEN_OFF:
            return Stopped(StopReason.LOST, node, f"{detail} {MAX_BROKEN_OFF} times")
        return Stopped(StopReason.FORGOTTEN, node, detail)

    async def _progress_at(self, peer_id: str, asked: FeedQuestion) -> StepProgress | None:
        try:
            return await self._ask(peer_id, asked)
        except NetworkError as error:
            logger.debug("%s does not say how far it came: %s", peer_id, error)
            return None

    async def _ask(self, peer_id: str, asked: FeedQuestion) -> StepProgress:
        """Return the answer of a node; that it is not ready if it does not know us. Raises NetworkError."""
        try:
            return await self._streams.ask(
                peer_id, MemberService.GENERATION, asked, StepProgress, timeout_s=self._ask_timeout_s
            )
        except (BrokenOff, Rejected):
            return NOT_READY

    def tell(self, peer_id: str, asked: FeedQuestion) -> StepProgress:
        """Answer a question. About a plan that is not ours, or not the asker's, we say that we are not
        ready."""
        members = self._plans.get(asked.plan)
        if members is None or peer_id not in members.peers:
            return NOT_READY
        known = self._progress.get((peer_id, asked.number), StepProgress(False, False))
        return msgspec.structs.replace(known, assigned=self._is_assigned(asked.plan))
