"""Sends a data node's own steps around their paths, waits for them, and finds out what stops them.

decode_node.py -> [DecodeHops.run] -> member_streams.py -> the members of the path -> in_flight_steps.py ->
    [DecodeHops]

A step ends with hidden states or with a reason, as soon as that is known. Its deadline covers the failures
that no node reports: each node waits for the next one slightly less long than the node before waits for it.
So the first to give up is the node before the one at fault, and it reports this.

Members adopt a plan at slightly different times, and a newcomer does not know the other members before it has
a plan. A step that a member is not ready for is sent again until the member is ready, our own plan changes,
or the deadline comes.
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
    """Sends any number of steps around at once."""

    def __init__(self, streams: MemberStreams, codec: CodecName, in_flight: InFlightSteps) -> None:
        self._streams = streams
        self._codec: CodecName = codec
        self._in_flight = in_flight
        self._sending: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        """Stop sending."""
        sending = tuple(self._sending)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    async def run(
        self,
        members: PlanMembers,
        step: DecodeStep,
        hidden_ND: Tensor,
        *,
        timeout_s: float,
        suspect: Callable[[str, str], None],
    ) -> Tensor | Stopped:
        """Send the output of our own stage around the path of a step at position 0. Returns the hidden states
        of the last tokens after the end of the path.

        `suspect(peer_id, why)` is called with a member that keeps us waiting.
        """
        not_ready: Stopped | None = None
        pause_s = FIRST_PAUSE_S
        with self._in_flight.expect(members, step) as expected:
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    while True:
                        left_s = (limit.when() or 0.0) - asyncio.get_running_loop().time()
                        result = await self._result(expected, hidden_ND, left_s)
                        if isinstance(result, Tensor) or result.why is not StopReason.OTHER_PLAN:
                            return result
                        if result.node is None:
                            return result  # We are the ones with another plan.
                        if not_ready is None:
                            peer_id = members.peers[result.node]
                            logger.info("generation waits for %s: %s", peer_id, result.detail)
                            suspect(peer_id, result.detail)
                        not_ready = result
                        await asyncio.wait({expected.news}, timeout=pause_s)
                        if expected.news.done():
                            return expected.news.result()
                        pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except TimeoutError:
                if not_ready is not None:
                    detail = f"{not_ready.detail}, for {timeout_s:g} s"
                    return Stopped(StopReason.LOST, not_ready.node, detail)
                return Stopped(StopReason.FORGOTTEN, None, f"nothing came around within {timeout_s:g} s")

    async def _result(self, expected: InFlightStep, hidden_ND: Tensor, timeout_s: float) -> Tensor | Stopped:
        """Send one of our steps to the first node of its path, and wait for the result."""
        expected.begin()
        sending = asyncio.ensure_future(self._begin(expected, hidden_ND, timeout_s))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        result = await asyncio.shield(expected.found)
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
        try:
            await self._streams.ask(
                members.peers[step.target], MemberService.GENERATION, step, type(None),
                timeout_s=timeout_s, payload=encoded.payload,
            )  # fmt: skip
        except (BrokenOff, HostDown) as error:
            return Stopped(StopReason.OTHER_PLAN, None, error.message)
        except MemberRefused as refused:
            is_late = refused.refusal is Refusal.TOO_SLOW
            return Stopped(StopReason.LOST if is_late else StopReason.OTHER_PLAN, None, str(refused))
        except NetworkError as error:
            return Stopped(StopReason.LOST, None, str(error))
        return None

    async def _begin(self, expected: InFlightStep, hidden_ND: Tensor, timeout_s: float) -> None:
        """Send one of our steps to the first node of its path. Ends the feed if that node does not accept
        it."""
        stopped = await self.pass_on(expected.members, expected.step, hidden_ND, timeout_s=timeout_s)
        if stopped is not None:
            expected.stop(Stopped(stopped.why, expected.step.path[1], stopped.detail))
