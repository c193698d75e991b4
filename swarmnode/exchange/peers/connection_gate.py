"""The gate that keeps banned peers off our connections.

Ledger -> [ConnectionGate.bar] -> Host.disconnect

Merely ignoring a banned peer would not save the cost of receiving from it: the daemon reads, checks and
forwards its messages before we hear of them. So the gate tells the host (host.py), which keeps the peer away
for as long as its ban lasts.
"""

import asyncio
import logging
from collections import deque

from swarmnode.errors import NetworkError
from swarmnode.network.barred_peers import MAX_BARRED
from swarmnode.network.host import Host

logger = logging.getLogger(__name__)


class ConnectionGate:
    """Disconnects the peers that `bar` names."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._to_bar: deque[tuple[str, float]] = deque(maxlen=MAX_BARRED)
        self._any_to_bar = asyncio.Event()

    def bar(self, peer: str, banned_for_s: float) -> None:
        """Has a banned peer disconnected as soon as the host has time, and barred while its ban lasts."""
        self._to_bar.append((peer, banned_for_s))
        self._any_to_bar.set()

    async def run(self) -> None:
        """Disconnects banned peers until cancelled."""
        while await self._any_to_bar.wait():
            self._any_to_bar.clear()
            while self._to_bar:
                peer, banned_for_s = self._to_bar.popleft()
                try:
                    await self._host.disconnect(peer, barred_s=banned_for_s)
                except NetworkError as error:
                    logger.debug("%s is banned but could not be disconnected: %s", peer, error)
