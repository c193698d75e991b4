"""The copies of other members' states that are kept here, and the choice of copies to drop for new ones.

state_service.py (a copy is offered, and fetched) -> [StateCopies] -> state_service.py (what is held)

Bookkeeping only. Within limits, we keep copies for the members that the plan assigns to us. Copies of members
that have left stay as long as there is room: they exist for that case.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from swarmnode.extensions.pipeline.states.holdings import HeldState, Holding, LayerHolders


class StateCopies:
    """Copies of other members' states, and room for them."""

    def __init__(self, peer_id: str, *, most: int, most_bytes: int) -> None:
        """`peer_id`: our own. `most`: number of copies. `most_bytes`: limit on all copies together."""
        self._peer_id = peer_id
        self._most = most
        self._most_bytes = most_bytes
        self.kept: dict[str, HeldState] = {}
        """The newest copy of each owner, by its peer id."""
        self.coming: dict[str, int] = {}
        """By owner, the bytes of copies that are being fetched."""
        self.layer_holders = LayerHolders()
        """The holders and keepers under the plan. They determine whose copies are ours to keep."""

    def is_ours_to_keep(self, peer_id: str, holding: Holding) -> bool:
        layers = holding.first_layer, holding.end_layer
        is_keeper = self.layer_holders.keepers.get(peer_id) == self._peer_id
        return is_keeper and self.layer_holders.ranges.get(peer_id) == layers

    @contextmanager
    def room(self, peer_id: str, size_bytes: int) -> Iterator[bool]:
        """Reserve room for a copy that is fetched within the context, dropping other copies if necessary.
        Yields False if there is not enough room.

        The oldest copy is dropped first, whoever owns it: a stage that is still trained has newer copies
        elsewhere, and a member may die before its new keeper has its first copy. Copies that are ours to keep
        stay.
        """
        going = self._going_for(peer_id, size_bytes)
        if going is None:
            yield False
            return
        for gone in going:
            self.kept.pop(gone, None)
        self.coming[peer_id] = size_bytes
        try:
            yield True
        finally:
            del self.coming[peer_id]

    def _going_for(self, peer_id: str, size_bytes: int) -> list[str] | None:
        others = {peer: held.holding for peer, held in self.kept.items() if peer != peer_id}
        sizes = {peer: holding.size_bytes for peer, holding in others.items()} | self.coming
        idle = others.keys() - self.coming
        gone = [peer for peer in idle if not self.is_ours_to_keep(peer, others[peer])]
        gone.sort(key=lambda peer: (others[peer].iteration, peer))
        going: list[str] = []
        while len(sizes) >= self._most or size_bytes + sum(sizes.values()) > self._most_bytes:
            if not gone:
                return None
            going.append(gone.pop(0))
            del sizes[going[-1]]
        return going
