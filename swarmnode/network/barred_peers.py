"""Peers that a host keeps away, for as long as the layers above it said.

exchange -> Host.disconnect(peer, barred_s=...) -> [BarredPeers] <- memory_network.py, peer_gate.py

The daemon has no such list: it lets anybody connect. So peer_gate.py checks the connections at every probe
and disconnects barred peers again; in the meantime they are neither dialled, nor remembered, nor served.
"""

import time
from collections.abc import Callable, Iterable

MAX_BARRED = 4096
"""Most barred peers. Identities are free, so there is a bound: beyond it the bar that ends first is
dropped."""


class BarredPeers:
    """Peer ids, each with the time when its bar ends.

    >>> barred = BarredPeers(clock=lambda: 100.0)
    >>> barred.bar("12D3KooWA", 60)
    >>> "12D3KooWA" in barred, "12D3KooWB" in barred
    (True, False)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def __contains__(self, peer_id: str) -> bool:
        until_s = self._until_s.get(peer_id)
        return until_s is not None and until_s > self._clock()

    def __len__(self) -> int:
        self._forget()
        return len(self._until_s)

    def bar(self, peer_id: str, for_s: float) -> None:
        """Bars a peer for this many seconds from now; a longer bar that it already has stays."""
        until_s = self._clock() + for_s
        if for_s <= 0 or self._until_s.get(peer_id, until_s) > until_s:
            return
        self._until_s[peer_id] = until_s
        if len(self._until_s) > MAX_BARRED:
            self._forget()
        if len(self._until_s) > MAX_BARRED:
            del self._until_s[min(self._until_s, key=lambda peer: self._until_s[peer])]

    def among(self, peer_ids: Iterable[str]) -> set[str]:
        """Returns the barred ones among these peers."""
        return {peer_id for peer_id in peer_ids if peer_id in self}

    def _forget(self) -> None:
        now_s = self._clock()
        self._until_s = {peer: until_s for peer, until_s in self._until_s.items() if until_s > now_s}
