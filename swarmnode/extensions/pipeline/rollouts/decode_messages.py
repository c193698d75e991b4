"""Messages that are sent along a path while sequences are generated, bounded before anything is allocated.

decode_node.py -> [decode_messages] -> wire -> [decode_messages] -> decode_node.py

Hidden states follow a `DecodeStep` as raw bytes (codec.py). The data node hears from the last node of the
path, or from one that could not go on.
"""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.rollouts.chain import Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments
from swarmnode.extensions.pipeline.wire.hop_messages import MAX_PATH, Count, Digest, Index, TensorHeader
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers, members_of
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MemberMessage

MAX_DETAIL = 200

Path = Annotated[tuple[Index, ...], Meta(min_length=2, max_length=MAX_PATH)]
PathPosition = Annotated[int, Meta(ge=1, le=MAX_PATH)]


class _OfSession(MemberMessage, frozen=True, kw_only=True):
    plan: Digest
    session: Count
    """The data node's number of the session."""
    path: Path
    """Nodes in order of visit, the data node first."""
    position: PathPosition
    """Position of the receiver on the path; behind its end it is the data node again."""

    def __post_init__(self) -> None:
        if self.position > len(self.path) or len(set(self.path)) < len(self.path):
            raise ValueError(f"position {self.position} of a path {self.path}")

    @property
    def target(self) -> int:
        return self.path[self.position % len(self.path)]


class DecodeStep(_OfSession, frozen=True, kw_only=True, tag="step"):
    """Hidden states of the tokens of one step, for the node at `position`. Behind the end of the path, only
    those of the last tokens."""

    number: Count
    """Number of the feed. A data node never uses one twice."""
    version: Count
    """Policy version that must compute it."""
    segments: Segments
    tensor: TensorHeader

    @property
    def payload_bytes(self) -> int:
        return self.tensor.payload_bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = len(self.segments.counts) if self.position == len(self.path) else self.segments.tokens
        if len(self.tensor.shape) != 2 or self.tensor.shape[0] != rows:
            raise ValueError(f"a tensor {self.tensor.shape} for {rows} tokens")


class Halted(_OfSession, frozen=True, kw_only=True, tag="halted"):
    """Tells the data node that one of its feeds does not come. `position` is that of the node at fault."""

    number: Count
    why: StopReason
    detail: Annotated[str, Meta(max_length=MAX_DETAIL)] = ""

    @property
    def stopped(self) -> Stopped:
        """The reason and the node of the stop. A position behind the end is the data node, which the last
        node of the path did not reach. A stage whose numbers are not finite is lost: only our own say
        something of our policy."""
        if self.position == len(self.path):
            return Stopped(StopReason.FORGOTTEN, None, self.detail)
        why = StopReason.LOST if self.why is StopReason.NOT_FINITE else self.why
        return Stopped(why, self.path[self.position], self.detail)


class Closed(_OfSession, frozen=True, kw_only=True, tag="closed"):
    """Tells a node to forget a session that is over, and to tell the next node."""


DecodeMessage = DecodeStep | Halted | Closed


def check_message(message: DecodeMessage, peer_id: str, plans: Mapping[str, PlanMembers]) -> PlanMembers:
    """Return the members of the plan of a message. Raises Rejected if this peer may not send it to us:
    unknown_plan, not_a_member, wrong_route.

    A step comes from the node before us on its path. A halt comes from the node that it concerns or from a
    neighbour on the path, so that a member cannot accuse others.
    """
    members = members_of(message.plan, peer_id, plans)
    if max(message.path) >= len(members.peers):
        raise Rejected(Refusal.WRONG_ROUTE, "a node that the plan does not have")
    if isinstance(message, Halted):
        to_us = message.path[0] == members.own
        near = message.path[max(message.position - 1, 1) : message.position + 2]
        from_path = any(members.peers[node] == peer_id for node in near)
    else:
        to_us = message.target == members.own
        from_path = members.peers[message.path[message.position - 1]] == peer_id
    if not to_us or not from_path:
        raise Rejected(Refusal.WRONG_ROUTE, f"{type(message).__name__} on path {message.path}")
    return members
