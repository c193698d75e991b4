"""Members of the running plans, and the check that a message comes from the right member.

Assignment (assignment.py) -> [PlanMembers, check_sender] -> tensor_transport.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.hop_messages import Finished, Hop, Message
from swarmnode.extensions.pipeline.wire.refusals import Refusal


@dataclass(frozen=True, slots=True)
class PlanMembers:
    """Members of a plan: the peer ids in node order, and the number of our own node."""

    plan: str
    """Digest of the plan (plan.py)."""
    peers: tuple[str, ...]
    own: int
    stage_of: tuple[int, ...] = ()
    """The stage of each node; -1 for a node that holds none. Only the nodes that sample need it."""


def checked_members(plan: str, peer_id: str, members: PlanMembers | None) -> PlanMembers:
    """Return our members of a plan. Raises Rejected unless it is this plan and this peer is one of them:
    unknown_plan, not_a_member."""
    if members is None or members.plan != plan:
        raise Rejected(Refusal.UNKNOWN_PLAN)
    if peer_id not in members.peers:
        raise Rejected(Refusal.NOT_A_MEMBER)
    return members


def check_sender(message: Message, peer_id: str, plans: Mapping[str, PlanMembers]) -> None:
    """Raises Rejected if this peer may not send us this message: unknown_plan, not_a_member, wrong_route.

    A hop must come from the node before us on its path, so a member cannot speak for another one.
    """
    members = checked_members(message.plan, peer_id, plans.get(message.plan))
    if isinstance(message, Finished) and members.peers.index(peer_id) != message.node:
        raise Rejected(Refusal.WRONG_ROUTE, f"in the name of node {message.node}")
    if not isinstance(message, Hop):
        return
    if max(message.path) >= len(members.peers):
        raise Rejected(Refusal.WRONG_ROUTE, "a node that the plan does not have")
    if message.target != members.own or members.peers[message.source] != peer_id:
        raise Rejected(Refusal.WRONG_ROUTE, f"from node {message.source} to node {message.target}")
