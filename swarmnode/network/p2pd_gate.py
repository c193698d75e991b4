"""Who may stay connected to our daemon: it lets anybody in, so the gate is kept from here.

Host.disconnect (bans), a daemon that grows -> [Gate] -> p2pd_control.py disconnects
                                               blame.py says who, barred.py how long
"""

import logging
import time
from collections.abc import Callable, Sequence

from swarmnode.errors import PeerUnreachable
from swarmnode.network.barred import BarredPeers
from swarmnode.network.blame import Traffic, largest_senders
from swarmnode.network.p2pd_control import ControlClient, DaemonRefused, PeerAddresses

logger = logging.getLogger(__name__)

SIEGE_S = 10.0
"""How long after a barred peer was there we look for it more often."""


class Gate:
    """Bars peers, and sends them away whenever they come back."""

    def __init__(self, listen: Callable[[], Sequence[str]]) -> None:
        """`listen`: the addresses that our daemon listens on."""
        self.barred = BarredPeers()
        self.traffic = Traffic()
        self._listen = listen
        self._besieged_until_s = 0.0

    def check(self, peer_id: str) -> None:
        """Raise PeerUnreachable for a peer that is barred."""
        if peer_id in self.barred:
            raise PeerUnreachable(f"{peer_id} is barred: it broke the rules a while ago")

    def admits(self, peer_id: str) -> bool:
        """Whether a stream of this peer is read at all."""
        if peer_id in self.barred:
            self._besiege()
            return False
        return True

    def bar(self, peer_id: str, for_s: float) -> None:
        if for_s > 0:
            self.barred.bar(peer_id, for_s)
            self._besiege()

    async def disconnect(self, control: ControlClient, peer_id: str) -> None:
        """End every connection to a peer. Raises HostDown."""
        try:
            await control.disconnect(peer_id)
        except DaemonRefused as error:
            logger.debug("%s could not be disconnected: %s", peer_id, error)

    async def look(self, control: ControlClient) -> set[str]:
        """Note what came in, send the barred away, and return who else is connected."""
        connections = await control.connected_peers()
        self.traffic.kept_bytes(self._listen(), connections)
        return await self._turn_away(control, connections)

    async def guard(self, control: ControlClient) -> None:
        """While barred peers come back at once, look five times a second rather than once."""
        if time.monotonic() < self._besieged_until_s:
            await self._turn_away(control, await control.connected_peers())

    async def relieve(self, control: ControlClient) -> None:
        """The daemon grows: send away who sends it the most, as far as that is known."""
        kept_bytes = self.traffic.kept_bytes(self._listen(), await control.connected_peers())
        for peer_id in largest_senders(kept_bytes):
            barred_s = self.traffic.bar_for_s(peer_id)
            logger.warning(
                "the network process grows, and %s sent it %.1f MiB within seconds; disconnected for %.0f s",
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
