"""The gate that keeps banned peers off our connections.

Ledger -> [ConnectionGate.bar] -> Host.disconnect;   Host.peers -> [ConnectionGate] -> BodyTransfer

Merely ignoring a banned peer would not save the cost of receiving from it: the daemon reads, checks and
forwards its messages before we hear of them. So the gate tells the host (host.py), which keeps the peer away
for as long as its ban lasts.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarmnode.errors import NetworkError
from swarmnode.network.barred_peers import MAX_BARRED
from swarmnode.network.host import Host

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the connections, if nobody has just been banned."""


class ConnectionGate:
    """Disconnects the peers that `bar` names, and calls `tell` with the connected peers."""

    def __init__(
        self, host: Host, banned_for_s: Callable[[str], float], tell: Callable[[Sequence[str]], None]
    ) -> None:
        """`banned_for_s` returns how long the ban of a peer still lasts."""
        self._host = host
        self._banned_for_s = banned_for_s
        self._tell = tell
        self._to_bar: deque[str] = deque(maxlen=MAX_BARRED)
        self._knocked = asyncio.Event()

    def bar(self, peer: str) -> None:
        """Has a banned peer disconnected as soon as the host has time."""
        self._to_bar.append(peer)
        self._knocked.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._bar_all()
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._knocked.wait()
            self._knocked.clear()

    async def _bar_all(self) -> None:
        while self._to_bar:
            peer = self._to_bar.popleft()
            try:
                await self._host.disconnect(peer, barred_s=self._banned_for_s(peer))
            except NetworkError as error:
                logger.debug("%s is banned but could not be disconnected: %s", peer, error)

    async def _look(self) -> None:
        try:
            self._tell(await self._host.peers())
        except NetworkError as error:
            logger.debug("cannot list connected peers: %s", error)
