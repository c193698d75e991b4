"""The peers of a node, each with all that its status says of it.

node_status.py -> [known_peers] -> `swarmnode peers`, the page, `swarmnode report`
"""

import msgspec

from swarmnode.exchange.exchange_stats import PeerFigures
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.training.records import OTHERS

MOST_KNOWN = 64


class KnownPeer(msgspec.Struct, frozen=True):
    """A peer that is connected, was learnt from, or did something."""

    peer: str
    name: str
    """The name that its peer id stands for."""
    connected: str | None
    """Its distance: machine, lan, public or relayed; empty: not known. None: it is not connected."""
    gave: int
    """Groups of it that were learnt from, over all starts."""
    waits: bool
    """Its answers are not learnt from until they agree with what we found ourselves."""
    figures: PeerFigures | None
    """Its groups and its reputation. None: there is nothing to say."""


def known_peers(status: NodeStatus) -> list[KnownPeer]:
    """Returns whoever is connected, was learnt from or did something, those who gave most first."""
    gave, waiting = status.exchange.trained, set(status.training.doubted)
    connected = {one.peer: one.distance for one in status.network.connected}
    figures = {one.peer: one for one in status.exchange.peers}
    ids = gave.keys() | connected.keys() | figures.keys()
    most_first = sorted(ids, key=lambda peer: (-gave.get(peer, 0), peer not in connected, peer))
    return [
        KnownPeer(
            peer,
            peer if peer == OTHERS else memorable_name(peer),
            connected.get(peer),
            gave.get(peer, 0),
            peer in waiting,
            figures.get(peer),
        )
        for peer in most_first[:MOST_KNOWN]
    ]
