"""The gate of our daemon, which decides the peers that may stay connected to it.

P2pdHost -> [PeerGate] -> ControlClient.disconnect;   supervisor -> [PeerGate.guard, .relieve]
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from swarmnode.errors import PeerBarred
from swarmnode.network.barred_peers import BarredPeers
from swarmnode.network.daemon.control_client import ControlClient, DaemonRefused, PeerAddresses
from swarmnode.network.daemon.traffic import Traffic, largest_senders

logger = logging.getLogger(__name__)

SIEGE_S = 10.0
"""Seconds after a barred peer was seen during which connections are checked more often."""

SIEGE_LOOK_EVERY_S = 0.04

SIEGE_LOOKS = 5
"""Most checks in a row before the size of the daemon is looked at again."""


class PeerGate:
    """Bars peers, and disconnects them whenever they come back."""

    def __init__(self, listen: Callable[[], Sequence[str]], *, relays: bool = False) -> None:
        """`listen`: the addresses that our daemon listens on. `relays`: the daemon passes on streams between
        others."""
        self.barred = BarredPeers()
        self.traffic = Traffic(relays=relays)
        self._listen = listen
        self._besieged_until_s = 0.0

    def check(self, peer_id: str) -> None:
        """Raises PeerBarred for a peer that is barred."""
        if peer_id in self.barred:
            raise PeerBarred(f"we banned {peer_id} for a while: it broke the rules")

    def admits(self, peer_id: str) -> bool:
        """Returns True if streams of this peer are read at all."""
        if peer_id in self.barred:
            self._besiege()
            return False
        return True

    def bar(self, peer_id: str, for_s: float) -> None:
        if for_s > 0:
            self.barred.bar(peer_id, for_s)
            self._besiege()

    async def disconnect(self, control: ControlClient, peer_id: str) -> None:
        """Ends every connection to a peer. Raises HostDown."""
        try:
            await control.disconnect(peer_id)
        except DaemonRefused as error:
            logger.debug("cannot disconnect %s: %s", peer_id, error)

    async def look(self, control: ControlClient) -> set[str]:
        """Records the traffic, disconnects barred peers and flooders, and returns the other connected
        peers."""
        connections = await control.connected_peers()
        kept_bytes = self.traffic.kept_bytes(self._listen(), connections)
        await self._send_away(control, self.traffic.flooders(kept_bytes), kept_bytes)
        return await self._turn_away(control, connections)

    async def guard(self, control: ControlClient) -> None:
        """Checks connections continuously, not just once a second, while barred peers come straight back: a
        flooder sends megabytes in a second."""
        for _ in range(SIEGE_LOOKS):
            if time.monotonic() >= self._besieged_until_s:
                return
            await self._turn_away(control, await control.connected_peers())
            await asyncio.sleep(SIEGE_LOOK_EVERY_S)

    async def relieve(self, control: ControlClient) -> None:
        """Called as the daemon grows. Disconnects the largest senders, as far as they are known."""
        kept_bytes = self.traffic.kept_bytes(self._listen(), await control.connected_peers())
        await self._send_away(control, largest_senders(kept_bytes), kept_bytes)

    async def _send_away(
        self, control: ControlClient, peers: Sequence[str], kept_bytes: Mapping[str, int]
    ) -> None:
        for peer_id in peers:
            barred_s = self.traffic.bar_for_s(peer_id)
            logger.warning(
                "%s sent the network process %.1f MiB of useless data within seconds;"
                " disconnected for %.0f s",
                peer_id, kept_bytes[peer_id] / 2**20, barred_s,
            )  # fmt: skip
            self.bar(peer_id, barred_s)
            await self.disconnect(control, peer_id)

    async def _turn_away(self, control: ControlClient, connections: Sequence[PeerAddresses]) -> set[str]:
        connected = {connection.peer_id for connection in connections}
        barred = self.barred.among(connected)
        for peer_id in barred:
            logger.debug("disconnecting %s again: it is barred", peer_id)
            self._besiege()
            await self.disconnect(control, peer_id)
        return connected - barred

    def _besiege(self) -> None:
        self._besieged_until_s = time.monotonic() + SIEGE_S
