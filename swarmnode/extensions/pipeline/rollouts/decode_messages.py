"""Messages sent along a path to generate sequences, with bounds checked before anything is allocated.

decode_node.py -> [decode_messages] -> wire -> [decode_messages] -> decode_node.py

Hidden states follow a `DecodeStep` as raw bytes (codec.py). The data node hears from the last node of the
path, or from one that could not continue.
"""

from typing import Annotated

from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.rollouts.chain import Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments
from swarmnode.extensions.pipeline.wire.hop_messages import MAX_PATH, Count, Digest, Index, TensorHeader
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers, checked_members
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MemberMessage

MAX_DETAIL = 200

Path = Annotated[tuple[Index, ...], Meta(min_length=2, max_length=MAX_PATH)]
PathPosition = Annotated[int, Meta(ge=1, le=MAX_PATH)]


class _OfSession(MemberMessage, frozen=True, kw_only=True):
    plan: Digest
    session: Count
    """Number that the data node gave the session."""
    path: Path
    """Nodes in order of visit, starting with the data node."""
    position: PathPosition
    """Position of the receiver on the path. The position after the end is the data node again."""

    def __post_init__(self) -> None:
        if self.position > len(self.path) or len(set(self.path)) < len(self.path):
            raise ValueError(f"position {self.position} of a path {self.path}")

    @property
    def target(self) -> int:
        return self.path[self.position % len(self.path)]


class DecodeStep(_OfSession, frozen=True, kw_only=True, tag="step"):
    """Hidden states of the tokens of one step, for the node at `position`. After the end of the path, only
    the hidden states of the last tokens."""

    number: Count
    """Number of the feed. A data node never uses a number twice."""
    version: Count
    """Policy version that must compute the step."""
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
    """Tells the data node that one of its feeds was stopped. `position` is that of the node at fault."""

    number: Count
    why: StopReason
    detail: Annotated[str, Meta(max_length=MAX_DETAIL)] = ""

    @property
    def stopped(self) -> Stopped:
        """The reason and the node of the stop. The position after the end is the data node, which the last
        node of the path could not reach. A stage with non-finite numbers counts as lost: only those of our
        own stage tell us about our policy. One with another plan refuses steps; if it halts them, it has
        forgotten ours."""
        if self.position == len(self.path):
            return Stopped(StopReason.FORGOTTEN, None, self.detail)
        changed = {StopReason.NOT_FINITE: StopReason.LOST, StopReason.OTHER_PLAN: StopReason.FORGOTTEN}
        why = changed.get(self.why, self.why)
        return Stopped(why, self.path[self.position], self.detail)


class Closed(_OfSession, frozen=True, kw_only=True, tag="closed"):
    """Tells a node to forget a session that is over, and to tell the next node."""


DecodeMessage = DecodeStep | Halted | Closed


def check_message(message: DecodeMessage, peer_id: str, members: PlanMembers | None) -> PlanMembers:
    """Return the members of our plan. Raises Rejected if this peer may not send us the message: unknown_plan,
    not_a_member, wrong_route.

    A step must come from the node before us on its path. A halt must come from the node that it is about or a
    neighbour of it on the path, so that a member cannot accuse others.
    """
    members = checked_members(message.plan, peer_id, members)
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
