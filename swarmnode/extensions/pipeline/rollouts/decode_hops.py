"""Brings a data node's own steps around their path: sends them, waits for them, and finds what stops them.

decode_node.py -> [DecodeHops.run] -> member_streams.py -> the members of the path -> in_flight_steps.py ->
    [DecodeHops]
                  |
              tracing.py: who does not answer, who is not ready

A step ends with hidden states or with a reason, and with the reason as soon as it is known: a member that is
gone, or that has no stage under our plan yet. Its deadline is for what nobody tells.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from torch import Tensor

from swarmnode.errors import HostDown, NetworkError, RequestTimeout
from swarmnode.extensions.pipeline.rollouts.chain import Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_messages import DecodeStep
from swarmnode.extensions.pipeline.rollouts.in_flight_steps import (
    InFlightStep,
    InFlightSteps,
    result_or_event,
)
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments, tails_of
from swarmnode.extensions.pipeline.rollouts.tracing import Tracing
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName
from swarmnode.extensions.pipeline.wire.member_streams import BrokenOff, MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused, Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService


class DecodeHops:
    """Brings any number of steps around at once."""

    def __init__(
        self, streams: MemberStreams, codec: CodecName, in_flight: InFlightSteps, tracing: Tracing
    ) -> None:
        self._streams = streams
        self._codec: CodecName = codec
        self._in_flight = in_flight
        self._tracing = tracing
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
        path: tuple[int, ...],
        session: int,
        segments: Segments,
        hidden_ND: Tensor,
        *,
        version: int,
        timeout_s: float,
        suspect: Callable[[str, str], None],
    ) -> Tensor | Stopped:
        """Send the output of our own stage around the path. Returns the hidden states of the tails behind its
        end.

        `suspect(peer_id, why)` is called with a member that keeps us waiting.
        """
        not_ready: Stopped | None = None
        shape = sum(segments.tails), hidden_ND.shape[1]
        with self._in_flight.expect(members, path, session, shape) as expected:
            sending = asyncio.ensure_future(self._begin(expected, segments, hidden_ND, version, timeout_s))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
            try:
                async with asyncio.timeout(timeout_s):
                    result = await asyncio.shield(expected.found)
                    if not isinstance(result, Stopped):
                        # The answers to our step are on their way back along the path.
                        return result
                    sending.cancel()
                    if not _is_not_ready(result):
                        return result
                    not_ready = result
                    asking = self._tracing.until_assigned(members, result, suspect)
                    return await result_or_event(asking, expected.news)
            except TimeoutError:
                if not_ready is not None:
                    return Stopped(
                        StopReason.LOST, not_ready.node, f"{not_ready.detail}, for {timeout_s:g} s"
                    )
                detail = f"nothing came around within {timeout_s:g} s"
                return await self._tracing.find(members, path, expected.number, detail)

    async def pass_on(
        self, members: PlanMembers, segments: Segments, hidden_ND: Tensor, *, timeout_s: float, **fields: Any
    ) -> Stopped | None:
        """Send hidden states to the node at `position`; behind the end of the path only the tails. Returns
        None once that node has passed them on, or when there is no time left; otherwise the reason why it did
        not take them, without a node."""
        is_last = fields["position"] == len(fields["path"])
        encoded = encode(tails_of(hidden_ND, segments) if is_last else hidden_ND, self._codec)
        step = DecodeStep(
            cells=segments.cells, starts=segments.starts, counts=segments.counts, tails=segments.tails,
            forks=segments.forks, tensor=encoded.header, plan=members.plan, **fields,
        )  # fmt: skip
        try:
            await self._streams.ask(
                members.peers[step.target], MemberService.GENERATION, step, type(None),
                timeout_s=timeout_s, payload=encoded.payload,
            )  # fmt: skip
        except RequestTimeout:
            return None
        except (BrokenOff, HostDown) as error:
            return Stopped(StopReason.OTHER_PLAN, None, error.message)
        except MemberRefused as refused:
            # Who had too little time may have waited for another.
            is_late = refused.refusal is Refusal.TOO_SLOW
            return None if is_late else Stopped(StopReason.OTHER_PLAN, None, str(refused))
        except NetworkError as error:
            return Stopped(StopReason.LOST, None, str(error))
        return None

    async def _begin(
        self, expected: InFlightStep, segments: Segments, hidden_ND: Tensor, version: int, timeout_s: float
    ) -> None:
        """Send a step of ours to the first node of its path. The feed ends if it does not take it."""
        stopped = await self.pass_on(
            expected.members, segments, hidden_ND, timeout_s=timeout_s, session=expected.session,
            path=expected.path, position=1, number=expected.number, version=version,
        )  # fmt: skip
        if stopped is not None:
            expected.stop(Stopped(stopped.why, expected.path[1], stopped.detail))


def _is_not_ready(result: Stopped) -> bool:
    """Return True if another node holds its stage under another plan."""
    return result.why is StopReason.OTHER_PLAN and result.node is not None
