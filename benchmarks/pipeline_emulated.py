"""Slow links and slow machines on one computer: an instance of a plan as if its nodes were where it says.

Instance (hop_s, forward_s) -> [PacedStreams] -> tensor_transport.py, [EmulatedQueue] -> stage_worker.py

Links: a message of training is sent when all of it would have come over the emulated link; loopback adds
little. A link carries one message after the other at its `bytes_per_s`; where that is infinite only its delay
counts, as in the simulator, whose links know no contention. Answers (a few bytes) are not delayed.

Machines: a task of the stage takes as long as it would there; what takes longer in reality is counted,
because then the emulation says nothing.

All times are real seconds. `shrunk` makes a plan of seconds that last as long as one likes: at 0.1 an
iteration of 70 s runs in 7 s.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from swarmnode.errors import RequestTimeout
from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import Kind
from swarmnode.extensions.pipeline.wire.frames import encode
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.network.streams import StreamHost

T = TypeVar("T")


def shrunk(plan: Plan, scale: float) -> Plan:
    """Returns the plan with all of its times multiplied."""
    instance = plan.instance
    return replace(
        plan,
        instance=replace(
            instance,
            forward_s=tuple(seconds * scale for seconds in instance.forward_s),
            hop_s=tuple(tuple(seconds * scale for seconds in row) for row in instance.hop_s),
            gap_s=instance.gap_s * scale,
            first_gap_s=instance.first_gap_s * scale,
        ),
    )


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction between two nodes."""

    latency_s: float
    """Time between sending the last byte and its arrival."""
    bytes_per_s: float = inf
    """Bytes that the link carries; messages queue for it."""


class EmulatedLinks:
    """The links out of one node."""

    def __init__(self, links: Mapping[str, LinkSpeed]) -> None:
        """`links`: by peer id. Peers that are not in it are as near as they really are."""
        self._links = dict(links)
        self._free_s: dict[str, float] = {}

    def arrival_s(self, peer_id: str, size_bytes: int, now_s: float) -> float:
        """Returns the time at which the last byte of the next message to a peer arrives."""
        link = self._links.get(peer_id)
        if link is None:
            return now_s
        sent_s = max(now_s, self._free_s.get(peer_id, now_s)) + size_bytes / link.bytes_per_s
        self._free_s[peer_id] = sent_s
        return sent_s + link.latency_s


class PacedStreams(MemberStreams):
    """Streams whose messages of training take their time."""

    def __init__(self, host: StreamHost, links: EmulatedLinks) -> None:
        super().__init__(host)
        self.links = links

    async def ask(
        self,
        peer_id: str,
        service: MemberService,
        message: Any,
        answer: type[T],
        *,
        timeout_s: float,
        **more: Any,
    ) -> T:
        if service == MemberService.HOPS:
            clock = asyncio.get_running_loop().time
            size_bytes = len(encode(message)) + message.payload_bytes
            wait_s = self.links.arrival_s(peer_id, size_bytes, clock()) - clock()
            await asyncio.sleep(min(wait_s, timeout_s))
            timeout_s -= wait_s
            if timeout_s <= 0:
                raise RequestTimeout(f"{peer_id} is farther away than the message is of use")
        return await super().ask(peer_id, service, message, answer, timeout_s=timeout_s, **more)


class EmulatedQueue(StageQueue):
    """The compute of one node of a plan: a task takes as long as it would there, and the node is not
    available for a gap afterwards, as in the simulator."""

    def __init__(self, node: int) -> None:
        super().__init__()
        self._node = node
        self._instance: Instance | None = None
        self._ranks: dict[int, int] = {}
        self._began_s: float | None = None
        self.tasks = 0
        self.overruns = 0
        """Tasks that really took longer than they were to."""
        self.overrun_s = 0.0
        """Seconds by which all of them took longer."""

    def begin(self, plan: Plan) -> None:
        """Stand for the node in another iteration of this plan."""
        own = [agent for agent, path in enumerate(plan.paths) if path[0] == self._node]
        self._instance, self._ranks, self._began_s = plan.instance, {a: r for r, a in enumerate(own)}, None

    async def perform(self, kind: Kind, agent: int, work: Callable[[], T]) -> T:
        clock = asyncio.get_running_loop().time
        assert self._instance is not None, "begin comes first"
        if kind == "forward" and agent in self._ranks:
            # A data node releases its agents one forward after the other.
            self._began_s = clock() if self._began_s is None else self._began_s
            release_s = self._began_s + self._ranks[agent] * self._instance.forward_s[self._node]
            await asyncio.sleep(max(0.0, release_s - clock()))
        await self._turn.acquire()
        gap_s = 0.0
        try:
            found = await self._paced(kind, work)
            is_first = kind == "forward" and agent in self._ranks
            gap_s = self._instance.first_gap_s if is_first else self._instance.gap_s
            return found
        finally:
            asyncio.get_running_loop().call_later(gap_s, self._turn.release)

    async def _paced(self, kind: Kind, work: Callable[[], T]) -> T:
        instance, clock = self._instance, asyncio.get_running_loop().time
        assert instance is not None, "begin comes first"
        factors = {"forward": 1.0, "loss": instance.loss_factor, "backward": instance.backward_factor}
        until_s = clock() + instance.forward_s[self._node] * factors[kind]
        found = await self.compute(work)
        rest_s = until_s - clock()
        self.tasks += 1
        if rest_s < 0:
            self.overruns += 1
            self.overrun_s -= rest_s
        else:
            self.busy_s += rest_s
            await asyncio.sleep(rest_s)
        return found
