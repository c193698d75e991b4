"""The copies of other members' states that are kept here, and the choice of those that make room for others.

state_service.py (a copy is offered, and fetched) -> [StateCopies] -> state_service.py (what is held)

Bookkeeping. Copies are kept for those members that the plan gives us to keep, within bounds. Those of members
that have left stay as long as there is room: they are for that.
"""

from swarmnode.extensions.pipeline.states.holdings import HeldState, Holding, LayerHolders


class StateCopies:
    """Copies of other members' states: the newest of each owner, by its peer id."""

    def __init__(self, peer_id: str, *, most: int, most_bytes: int) -> None:
        """`peer_id`: ours. `most`: number of copies. `most_bytes`: of all copies together."""
        self._peer_id = peer_id
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[str, HeldState] = {}
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

    def makes_room(self, peer_id: str, size_bytes: int) -> bool:
        """Drop copies of others until one of this size has room. Returns False, and drops none, if it cannot
        have any.

        The oldest copy goes first, whoever owns it: a stage that has gone on has newer ones elsewhere, and a
        member may die before its new keeper has its first. Copies that are ours to keep stay.
        """
        others = {peer: held.holding for peer, held in self._kept.items() if peer != peer_id}
        idle = [peer for peer, holding in others.items() if not self.is_ours_to_keep(peer, holding)]
        going = sorted(idle, key=lambda peer: (others[peer].iteration, peer), reverse=True)
        while (
            len(others) >= self._most
            or size_bytes + sum(holding.size_bytes for holding in others.values()) > self._most_bytes
        ):
            if not going:
                return False
            del others[going.pop()]
        self._kept = {peer: held for peer, held in self._kept.items() if peer == peer_id or peer in others}
        return True

    def keep(self, peer_id: str, held: HeldState) -> bool:
        """Keep a copy if it has room. Returns False if not."""
        if not self.makes_room(peer_id, held.holding.size_bytes):
            return False
        self._kept[peer_id] = held
        return True
