"""A data node's feeds in flight, and the events that end the wait for them.

decode_node.py (what comes around, what halted) --v
membership.py (who is gone) ----------> [InFlightSteps] -> decode_node.py (send_around) -> remote_chain.py
decode_node.py (another plan) ---------------^

Without this, a lost feed would be awaited until its deadline, which is as long as a slow member may take. So
any news about a member or the plan immediately ends the feeds that it concerns, with the reason.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from swarmnode.extensions.pipeline.rollouts.chain import Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_messages import DecodeStep, Halted
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.refusals import Refusal

Arrival = asyncio.Future[Tensor | Stopped]


@dataclass(slots=True)
class InFlightStep:
    """One feed of ours, with the fields that a message about it must match."""

    members: PlanMembers
    step: DecodeStep
    """The feed as it leaves our own stage."""
    found: Arrival

    def is_meant(self, message: DecodeStep | Halted) -> bool:
        step = self.step
        return (message.plan, message.path, message.session) == (step.plan, step.path, step.session)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the hidden states that come around: sequences x width."""
        return len(self.step.segments.counts), self.step.tensor.shape[1]

    def stop(self, stopped: Stopped) -> None:
        if not self.found.done():
            self.found.set_result(stopped)


class InFlightSteps:
    """A data node's awaited feeds, by number.

    >>> with in_flight.expect(members, step) as expected:                                  # doctest: +SKIP
    ...     result = await expected.found
    """

    def __init__(self, refused: Counter[Refusal]) -> None:
        """`refused`: counter of messages that were not accepted, by reason."""
        self._refused = refused
        self._expected: dict[int, InFlightStep] = {}

    @contextmanager
    def expect(self, members: PlanMembers, step: DecodeStep) -> Iterator[InFlightStep]:
        """Register a feed while its result is awaited."""
        found = asyncio.get_running_loop().create_future()
        self._expected[step.number] = expected = InFlightStep(members, step, found)
        try:
            yield expected
        finally:
            del self._expected[step.number]

    def arrived(self, message: DecodeStep | Halted, result: Tensor | Stopped) -> bool:
        """Resolve a feed with the result in a message. Returns True if that was the awaited hidden states."""
        expected = self._expected.get(message.number)
        if expected is None or expected.found.done() or not expected.is_meant(message):
            self._refused[Refusal.UNKNOWN_WORK] += 1
            return False
        if isinstance(result, Tensor) and tuple(result.shape) != expected.shape:
            self._refused[Refusal.WRONG_SHAPE] += 1
            expected.stop(Stopped(StopReason.LOST, message.path[-1], f"sent {tuple(result.shape)}"))
            return False
        expected.found.set_result(result)
        return isinstance(result, Tensor)

    def replanned(self, detail: str) -> None:
        """End all feeds because our own stage changes, so that their plan is over."""
        for expected in self._expected.values():
            expected.stop(Stopped(StopReason.OTHER_PLAN, None, detail))

    def lose(self, peer_id: str, why: str) -> None:
        """End every feed whose path includes a member that is gone."""
        for expected in self._expected.values():
            peers = expected.members.peers
            for node in expected.step.path[1:]:
                if peers[node] == peer_id:
                    expected.stop(Stopped(StopReason.LOST, node, why))
