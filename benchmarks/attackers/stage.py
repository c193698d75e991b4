"""What every attack is given: whom to attack, for how long, and lines to and from whoever started it.

tests, attacks.py -> process -> [Stage] -> attack

Everything ends by itself: after `seconds`, or when standard input is closed by the end of who started it.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.errors import NetworkError
from swarmnode.exchange.gossip.header_gossip import topic_of
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.multiaddr import split_peer

from .daemon import MAX_FRAME_BYTES, Identity, identity
from .wire import GOSSIP, subscribing

REDIAL_S = 1.0
LOOK_EVERY_S = 0.5
SETTLE_LOOKS = 24
"""How often an attacker that dialled once more looks whether it is still connected: a node on a busy machine
looks after its own connections every few seconds."""


@dataclass
class Stage:
    """One run of one attack."""

    targets: tuple[str, ...]
    """Addresses; the first is the victim's."""
    swarm: str
    seconds: float
    folder: Path
    told: asyncio.StreamReader
    sent: Counter[str] = field(default_factory=Counter)
    """What was written, by kind."""
    seed: int = 0
    about: str = ""
    """What `half_open` opens, empty for bodies; which pipeline `steering_member` joins."""

    @property
    def topic(self) -> str:
        return topic_of(self.swarm)

    @property
    def until_s(self) -> float:
        return self._began_s + self.seconds

    def __post_init__(self) -> None:
        self._began_s = asyncio.get_running_loop().time()
        self._is_ready = False

    def say(self, event: str, **facts: object) -> None:
        """One line for whoever started us. The time of an attack runs from its first `ready`."""
        if event == "ready" and not self._is_ready:
            self._is_ready, self._began_s = True, asyncio.get_running_loop().time()
        print(json.dumps({"event": event, **facts}), flush=True)

    async def line(self) -> str:
        """The next line from whoever started us; empty once they are gone or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self.until_s):
                return (await self.told.readline()).decode().strip()
        return ""

    async def pace(self, per_s: float, most: int = sys.maxsize) -> AsyncIterator[int]:
        """0, 1, 2, ... at this rate, until the time is over or there were `most`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for number in range(most):
            wait_s = began_s + number / per_s - loop.time()
            if loop.time() + max(0.0, wait_s) >= self.until_s:
                return
            await asyncio.sleep(max(0.0, wait_s))
            yield number

    @asynccontextmanager
    async def attacker(self, key: NodeKey | None = None) -> AsyncIterator[Identity]:
        """An identity that is connected to every target."""
        async with identity(self.folder, key) as one:
            for target in self.targets:
                await one.connect(target)
            yield one

    async def connected_after(self, one: Identity) -> bool:
        """Whether an attacker that dials once more is let stay."""
        peer = split_peer(self.targets[0])[1]
        try:
            await one.connect(self.targets[0])
            for _ in range(SETTLE_LOOKS):
                if not await one.is_connected(peer):
                    return False
                await asyncio.sleep(LOOK_EVERY_S)
        except NetworkError:
            return False
        return True


class Line:
    """A stream of raw GossipSub to one target, dialled again when it is lost."""

    def __init__(self, stage: Stage, one: Identity, target: str) -> None:
        self._stage = stage
        self._one = one
        self._target = target
        self._writer: asyncio.StreamWriter | None = None
        self._tried_s = float("-inf")
        self.lost = 0

    async def send(self, frame: bytes) -> bool:
        """Write a framed RPC; False when it could not be, now."""
        writer = self._writer or await self._dial()
        if writer is None:
            return False
        try:
            writer.write(frame)
            async with asyncio.timeout(REDIAL_S):
                await writer.drain()
        except (OSError, TimeoutError):
            writer.transport.abort()
            self._writer = None
            self.lost += 1
            return False
        return True

    async def _dial(self) -> asyncio.StreamWriter | None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._tried_s + REDIAL_S:
            return None
        self._tried_s = now_s
        try:
            peer = await self._one.connect(self._target)
            _, self._writer = await self._one.open(peer, GOSSIP)
            self._writer.write(subscribing(self._stage.topic))
        except (NetworkError, OSError):
            self._writer = None
        return self._writer


async def swallow(peer: str, request: bytes) -> bytes | None:
    """An answer to nothing: what the victim writes on its own stream of gossip is read and forgotten."""
    assert len(request) <= MAX_FRAME_BYTES
    return None
