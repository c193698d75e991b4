"""Sends steps of generation from node to node, and a data node's own steps around their paths.

decode_node.py -> [DecodeHops.run] -> member_streams.py -> the members of the path -> in_flight_steps.py ->
    [DecodeHops]

A step ends with hidden states or with a reason, as soon as that is known. Its deadline covers the failures
that no node reports: each node waits for the next one slightly less long than the node before waits for it.
So the first to give up is the node before the one at fault, and it reports this.

Members adopt a plan at slightly different times, and a newcomer does not know the other members before it has
a plan. A step that the next node is not ready for is sent to it again until it is ready, our own plan
changes, or the deadline comes.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
from torch import Tensor

from swarmnode.errors import HostDown, NetworkError
from swarmnode.extensions.pipeline.rollouts.chain import Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_messages import DecodeStep
from swarmnode.extensions.pipeline.rollouts.in_flight_steps import InFlightStep, InFlightSteps
from swarmnode.extensions.pipeline.rollouts.stage_caches import last_rows
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName
from swarmnode.extensions.pipeline.wire.member_streams import BrokenOff, MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused, Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""Limit of the growing pause before a step is sent again to a member that was not ready."""

MARGIN_S = 1.0
MARGIN_SHARE = 0.2
"""A node waits less long than the node before it by this time, or by this share of a short time."""


class DecodeHops:
    """Sends any number of steps at once."""

    def __init__(
        self,
        streams: MemberStreams,
        codec: CodecName,
        in_flight: InFlightSteps,
        *,
        plan: Callable[[], str | None],
        suspect: Callable[[str, str], None],
    ) -> None:
        """`plan`: returns the digest of our plan. `suspect(peer_id, why)` is called with a member that keeps
        us waiting."""
        self._streams = streams
        self._codec: CodecName = codec
        self._in_flight = in_flight
        self._plan = plan
        self._suspect = suspect
        self._sending: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        """Stop sending."""
        sending = tuple(self._sending)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    async def run(
        self, members: PlanMembers, step: DecodeStep, hidden_ND: Tensor, *, timeout_s: float
    ) -> Tensor | Stopped:
        """Send the output of our own stage around the path of a step at position 0. Returns the hidden states
        of the last tokens after the end of the path."""
        with self._in_flight.expect(members, step) as expected:
            sending = asyncio.ensure_future(self._begin(expected, hidden_ND, timeout_s))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
            try:
                async with asyncio.timeout(timeout_s):
                    result = await expected.found
            except TimeoutError:
                result = Stopped(StopReason.FORGOTTEN, None, f"nothing came around within {timeout_s:g} s")
        if isinstance(result, Stopped):
            sending.cancel()
        # Otherwise leave it: the answers to our step are still on their way back along the path.
        return result

    async def pass_on(
        self, members: PlanMembers, step: DecodeStep, hidden_ND: Tensor, *, timeout_s: float
    ) -> Stopped | None:
        """Send our stage's output of a step to the next node; after the end of the path, only the last
        tokens. Returns None once that node has passed them on, or else the reason why it did not, without a
        node."""
        timeout_s -= min(MARGIN_S, MARGIN_SHARE * timeout_s)
        position = step.position + 1
        is_last = position == len(step.path)
        encoded = encode(last_rows(hidden_ND, step.segments) if is_last else hidden_ND, self._codec)
        step = msgspec.structs.replace(step, position=position, tensor=encoded.header)
        peer_id, clock = members.peers[step.target], asyncio.get_running_loop().time
        until_s, pause_s = clock() + timeout_s, FIRST_PAUSE_S
        while self._plan() == step.plan:
            try:
                return await self._streams.ask(
                    peer_id, MemberService.GENERATION, step, type(None),
                    timeout_s=max(until_s - clock(), 0.001), payload=encoded.payload,
                )  # fmt: skip
            except (BrokenOff, HostDown) as error:
                why = error.message
            except MemberRefused as refused:
                why = str(refused)
                if refused.refusal is Refusal.TOO_SLOW:
                    return Stopped(StopReason.LOST, None, why)
            except NetworkError as error:
                return Stopped(StopReason.LOST, None, str(error))
            if clock() + pause_s >= until_s:
                return Stopped(StopReason.LOST, None, f"{why}, for {timeout_s:g} s")
            if pause_s == FIRST_PAUSE_S:
                logger.info("generation waits for %s: %s", peer_id, why)
                self._suspect(peer_id, why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return Stopped(StopReason.OTHER_PLAN, None, "holds its stage under another plan")

    async def _begin(self, expected: InFlightStep, hidden_ND: Tensor, timeout_s: float) -> None:
        """Send one of our steps to the first node of its path. Ends the feed if that node does not accept
        it."""
        stopped = await self.pass_on(expected.members, expected.step, hidden_ND, timeout_s=timeout_s)
        if stopped is not None:
            expected.stop(Stopped(stopped.why, expected.step.path[1], stopped.detail))
