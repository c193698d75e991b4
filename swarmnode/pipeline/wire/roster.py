"""Who may say what: the members of the plans that run, and whether a message comes from the right one.

Seat (seat.py) -> [Roster, check_sender] -> transport.py, inbound.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.errors import Rejected
from swarmnode.pipeline.wire.messages import Finished, Hop, Message, Refusal


@dataclass(frozen=True, slots=True)
class Roster:
    """Who runs a plan: the peer of each node, in the order of its instance, and which of them we are."""

    plan: str
    """The plan's digest (plan.py)."""
    peers: tuple[str, ...]
    own: int


def check_sender(message: Message, peer_id: str, rosters: Mapping[str, Roster]) -> None:
    """Whether this peer may say this to us. Raises Rejected: unknown_plan, not_a_member, wrong_route.

    A hop must come from the node before us on its own path, so a member cannot speak for another one.
    """
    roster = rosters.get(message.plan)
    if roster is None:
        raise Rejected(Refusal.UNKNOWN_PLAN)
    if peer_id not in roster.peers:
        raise Rejected(Refusal.NOT_A_MEMBER)
    if isinstance(message, Finished) and roster.peers.index(peer_id) != message.node:
        raise Rejected(Refusal.WRONG_ROUTE, f"in the name of node {message.node}")
    if not isinstance(message, Hop):
        return
    if max(message.path) >= len(roster.peers):
        raise Rejected(Refusal.WRONG_ROUTE, "a node that the plan does not have")
    if message.target != roster.own or roster.peers[message.source] != peer_id:
        raise Rejected(Refusal.WRONG_ROUTE, f"from node {message.source} to node {message.target}")
