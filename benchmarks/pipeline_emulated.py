"""Slow links and slow machines on one computer: an instance of a plan as if its nodes were where it says.

Instance (hop_s, forward_s) -> [EmulatedLinks] -> transport.py, [EmulatedCompute] -> stage_worker.py

Links: a message arrives when it would over the emulated link, its chunks spread over the time between, so
that the real transfer on loopback hides within. With `bytes_per_s` a link carries one message after the
other; without, only its delay counts, as in the simulator, whose links know no contention. A loss is what it
is to a user of TCP: the message comes a retransmission later. Answers (a few bytes) are not delayed.

Machines: `EmulatedCompute` waits until a piece of real work has taken as long as it would there; what takes
longer in reality is counted, because then the emulation says nothing.

`scale` shrinks all of it: at 0.1 an iteration of 70 s runs in 7 s. Draws depend on the seed, the link and the
number of its message alone, so that two runs meet the same jitter and losses on each link in whatever order.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from math import inf

from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.wire.member_streams import ArrivalWindow

MAX_LOSSES = 8
"""How often in a row one message may be lost."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction between two nodes, in emulated time."""

    latency_s: float
    """Time between sending the last byte and its arrival."""
    bytes_per_s: float = inf
    """What the link carries; messages queue for it."""
    jitter_s: float = 0.0
    """How much later a message may come, evenly distributed."""
    loss: float = 0.0
    """Share of messages that come a retransmission later; of those, the same share another one."""
    retransmit_s: float = 0.2
    """TCP's least timeout on Linux."""


def links_of(instance: Instance, node: int, *, activation_bytes: int = 0) -> tuple[LinkSpeed, ...]:
    """The links out of `node` to each node: one activation arrives `hop_s` after it was sent.

    With `activation_bytes` all of that time is taken to be bandwidth, of which one link has only so much;
    without, it is delay, as in the simulator.
    """
    return tuple(
        LinkSpeed(0.0, activation_bytes / hop_s) if activation_bytes and hop_s > 0 else LinkSpeed(hop_s)
        for hop_s in instance.hop_s[node]
    )


class EmulatedLinks:
    """The links out of one node: a `LinkPace` for its transport."""

    def __init__(self, links: Mapping[str, LinkSpeed], *, seed: int, scale: float = 1.0) -> None:
        """`links`: by peer id. Peers that are not in it are as near as they really are."""
        if scale <= 0:
            raise ValueError(f"scale is {scale}, it must be above 0")
        self._links = dict(links)
        self._seed = seed
        self._scale = scale
        self._free_s: dict[str, float] = {}
        self._messages: Counter[str] = Counter()
        self._cut: set[str] = set()

    def arrival(self, peer_id: str, size_bytes: int, now_s: float) -> ArrivalWindow:
        """When the bytes of the next message to a peer arrive. Times of the event loop."""
        link = self._links.get(peer_id)
        number = self._messages[peer_id]
        self._messages[peer_id] += 1
        if peer_id in self._cut:
            return ArrivalWindow(inf, inf)
        if link is None:
            return ArrivalWindow(now_s, now_s)
        begins_s = max(now_s, self._free_s.get(peer_id, now_s))
        sent_s = begins_s + self._scale * size_bytes / link.bytes_per_s
        self._free_s[peer_id] = sent_s
        draw = random.Random(f"{self._seed}/{peer_id}/{number}")
        return ArrivalWindow(begins_s, sent_s + self._scale * _late_s(link, draw))

    def cut(self, peer_id: str) -> None:
        """Lose all that is sent there after this, and tell nobody."""
        self._cut.add(peer_id)

    def mend(self, peer_id: str) -> None:
        self._cut.discard(peer_id)


def _late_s(link: LinkSpeed, draw: random.Random) -> float:
    losses = 0
    while losses < MAX_LOSSES and draw.random() < link.loss:
        losses += 1
    return link.latency_s + losses * link.retransmit_s + draw.uniform(0.0, link.jitter_s)


class EmulatedCompute:
    """The machine of one node: real work that takes as long as it would there.

    async with compute.forward():
        hidden = await asyncio.to_thread(stage.forward, ...)
    """

    def __init__(self, instance: Instance, node: int, *, scale: float = 1.0) -> None:
        self._forward_s = instance.forward_s[node] * scale
        self._backward_factor = instance.backward_factor
        self._loss_factor = instance.loss_factor
        self.scale = scale
        """Real seconds for an emulated one."""
        self.gap_s = instance.gap_s * scale
        """Real seconds for which the machine is not available after a task."""
        self.first_gap_s = instance.first_gap_s * scale
        """The same after the first forward of a micro-batch."""
        self.overruns = 0
        """Pieces of work that really took longer than they were to."""
        self.overrun_s = 0.0
        """How much longer all of them took, in real seconds."""

    def forward(self) -> AbstractAsyncContextManager[None]:
        return self.lasting(self._forward_s)

    def backward(self) -> AbstractAsyncContextManager[None]:
        return self.lasting(self._forward_s * self._backward_factor)

    def loss(self) -> AbstractAsyncContextManager[None]:
        return self.lasting(self._forward_s * self._loss_factor)

    @asynccontextmanager
    async def lasting(self, duration_s: float) -> AsyncGenerator[None, None]:
        """Real work that lasts at least so many real seconds."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + duration_s
        yield
        rest_s = until_s - clock()
        if rest_s < 0:
            self.overruns += 1
            self.overrun_s -= rest_s
        else:
            await asyncio.sleep(rest_s)
