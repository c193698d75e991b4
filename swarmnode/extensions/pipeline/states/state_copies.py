"""The copies of other members' states that are kept here, and the choice of those that make room for others.

state_service.py (a copy is offered, and fetched) -> [StateCopies] -> state_service.py (what is held)

Bookkeeping. Copies are kept for those members that the plan gives us to keep, within bounds. Those of members
that have left stay as long as there is room: they are for that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from swarmnode.extensions.pipeline.states.holdings import HeldState, Holding, LayerHolders


class StateCopies:
    """Copies of other members' states: the newest of each owner, by its peer id."""

    def __init__(self, peer_id: str, *, most: int, most_bytes: int) -> None:
        """`peer_id`: ours. `most`: number of copies. `most_bytes`: of all copies together."""
        self._peer_id = peer_id
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[str, HeldState] = {}
        self._coming: dict[str, int] = {}
        self.layer_holders: LayerHolders | None = None
        """Who holds and who keeps what under the plan: whose copies are ours to keep."""

    def held(self) -> tuple[HeldState, ...]:
        return tuple(self._kept.values())

    def of(self, peer_id: str) -> HeldState | None:
        """Return the copy of this peer's state, if there is one."""
        return self._kept.get(peer_id)

    def is_ours_to_keep(self, peer_id: str, holding: Holding) -> bool:
        layer_holders = self.layer_holders
        if layer_holders is None or layer_holders.keepers.get(peer_id) != self._peer_id:
            return False
        return layer_holders.ranges.get(peer_id) == (holding.first_layer, holding.end_layer)

    def is_coming(self, peer_id: str) -> bool:
        """Return True if a copy of this peer's state is being fetched."""
        return peer_id in self._coming

    def keep(self, peer_id: str, held: HeldState) -> None:
        self._kept[peer_id] = held

    @contextmanager
    def room(self, peer_id: str, size_bytes: int) -> Iterator[bool]:
        """Reserve room for a copy that is fetched in the context, dropping others for it. Yields False if
        there is none.

        The oldest copy goes first, whoever owns it: a stage that has gone on has newer ones elsewhere, and a
        member may die before its new keeper has its first. Copies that are ours to keep stay.
        """
        going = self._going_for(peer_id, size_bytes)
        if going is None:
            yield False
            return
        for gone in going:
            self._kept.pop(gone, None)
        self._coming[peer_id] = size_bytes
        try:
            yield True
        finally:
            del self._coming[peer_id]

    def _going_for(self, peer_id: str, size_bytes: int) -> list[str] | None:
        kept = {peer: h.holding.size_bytes for peer, h in self._kept.items()}
        sizes = {peer: size for peer, size in (kept | self._coming).items() if peer != peer_id}
        held = {peer: h.holding for peer, h in self._kept.items() if peer in sizes}
        idle = [peer for peer in held if peer not in self._coming]
        others = [peer for peer in idle if not self.is_ours_to_keep(peer, held[peer])]
        gone = sorted(others, key=lambda peer: (held[peer].iteration, peer))
        going: list[str] = []
        while len(sizes) >= self._most or size_bytes + sum(sizes.values()) > self._most_bytes:
            if not gone:
                return None
            going.append(gone.pop(0))
            del sizes[going[-1]]
        return going
