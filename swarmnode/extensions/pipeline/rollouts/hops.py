"""Brings a data node's own steps around their path: sends them, waits for them, and finds what stops them.

stage_decode.py -> [DecodeHops.run] -> decode_streams.py -> the members of the path -> in_flight_feeds.py ->
    [DecodeHops]
                  |
              tracing.py: who does not answer, who is not ready

A step ends with hidden states or with a reason, and with the reason as soon as it is known: a member that is
gone, or that has no stage under our plan yet. Its deadline is for what nobody tells.
"""

import asyncio
from collections.abc import Callable
from typing import TypeGuard

from torch import Tensor

from swarmnode.errors import HostDown, NetworkError
from swarmnode.extensions.pipeline.rollouts.chain import Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_streams import BrokenOff, FrameStreams
from swarmnode.extensions.pipeline.rollouts.in_flight_feeds import (
    InFlightStep,
    InFlightSteps,
    result_or_event,
)
from swarmnode.extensions.pipeline.rollouts.stage_cache import Segments
from swarmnode.extensions.pipeline.rollouts.tracing import Tracing
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers


class DecodeHops:
    """Brings any number of steps around at once."""

    def __init__(
        self, streams: FrameStreams, codec: CodecName, in_flight: InFlightSteps, tracing: Tracing
    ) -> None:
        self._streams = streams
        self._codec: CodecName = codec
        self._in_flight = in_flight
        self._tracing = tracing

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
            try:
                async with asyncio.timeout(timeout_s):
                    bringing = self._bring(expected, segments, hidden_ND, version, timeout_s)
                    result = await result_or_event(bringing, expected.found)
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

    async def _bring(
        self,
        expected: InFlightStep,
        segments: Segments,
        hidden_ND: Tensor,
        version: int,
        timeout_s: float,
    ) -> Tensor | Stopped:
        """Send the step, and wait for its result."""
        members, path = expected.members, expected.path
        try:
            expected.outgoing = await self._streams.send_step(
                members, segments, hidden_ND, self._codec, plan=members.plan, session=expected.session,
                path=path, position=1, number=expected.number, version=version, deadline_s=timeout_s,
            )  # fmt: skip
        except (BrokenOff, HostDown) as error:
            return Stopped(StopReason.OTHER_PLAN, path[1], error.message)
        except NetworkError as error:
            return Stopped(StopReason.LOST, path[1], str(error))
        return await asyncio.shield(expected.found)


def _is_not_ready(result: Tensor | Stopped) -> TypeGuard[Stopped]:
    """Return True if another node holds its stage under another plan."""
    return isinstance(result, Stopped) and result.why is StopReason.OTHER_PLAN and result.node is not None
