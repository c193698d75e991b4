"""Decides which weights are right when the replicas of a stage differ after a step.

replica_exchange.py (what replicas say) -> [vote_of] -> ReplicaVote -> alignment.py (stay, take over, go
    back)
                          two states that stand against each other -> [is_near] -> alignment.py

Pure. The rule, in this order:

1. The largest side is right. The others take over its state, which must have the digest that was voted for.
   A replica that does not know where it stands (its state was older than the pipeline) has no vote and
   follows, if any other replica has a vote. If no replica knows, they follow the side with the smallest peer
   id.
2. Sides of equal size, as when two replicas differ: nothing shows which of them is wrong, so none is
   believed. Each fetches the others' states. If all are equal except for rounding (`is_near`), as between
   different kinds of machines, all take the state of the side with the smallest peer id.
3. Otherwise, if all say that they came from the same state before the step, all go back to it: each still has
   it, and a neighbour has a copy. For this stage it is as if no gradient had come.
4. Otherwise each keeps its own state and logs a warning.

What a liar can gain without a majority: rounding (`NEAR` of a step that the others took too, which is less
than its own gradients may move), or a stage that stands still. No other replica adopts weights that it made
up. Limits: two liars of three replicas are a majority. A replica that knows nothing follows one that claims
to know. A replica that makes up weights every time keeps its stage from learning until it is left out
(`pipeline.members`); every member's log names it. Honest replicas that lost contact in the middle of an
exchange and differ by more than rounding stay apart (4) until their next assignment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from swarmnode.extensions.pipeline.wire.hop_messages import Digest

NEAR = 0.01
"""Weights may differ by this share of the smaller step, and moments by an amount that changes the next step
by this share. Sums are bitwise equal, so only the optimizer's arithmetic can differ: 1e-6 in float32, 8e-3 in
bfloat16."""


class ReplicaWeights(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A replica's report after a step."""

    digest: Digest
    """Digest of the replica's state."""
    before: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    """Digest of the state that it can go back to. Empty if it does not know that this was the pipeline's
    state."""


@dataclass(frozen=True, slots=True)
class VoteSide:
    """Replicas that report the same digest."""

    digest: str
    peers: tuple[str, ...]
    """Their peer ids, sorted."""
    before: str
    """Digest of the state that all of them can go back to. Empty if their reports differ."""


@dataclass(frozen=True, slots=True)
class ReplicaVote:
    """The decision on our weights, based on the reports of the replicas that answered."""

    agrees: bool
    ask: tuple[str, ...] = ()
    """Replicas with the right weights, except us: fetch their state."""
    digest: str = ""
    """Digest of the right weights."""
    differs: bool = False
    """True if any two replicas reported different digests."""
    rivals: tuple[VoteSide, ...] = ()
    """If undecided, the sides of equal size, starting with the side of the smallest peer id."""


def vote_of(us: str, said: Mapping[str, ReplicaWeights]) -> ReplicaVote:
    """Return the vote over the reports `said`, by peer id, including ours.

    >>> said = {peer: ReplicaWeights(mark * 64, "0" * 64) for peer, mark in zip("abc", "122")}
    >>> vote_of("a", said).ask, vote_of("b", said).agrees
    (('b', 'c'), True)
    >>> del said["c"]
    >>> [side.peers for side in vote_of("a", said).rivals]
    [('a',), ('b',)]
    """
    knowing = {peer: weights for peer, weights in said.items() if weights.before}
    sides = _sides(knowing or said)
    most = max(len(side.peers) for side in sides)
    largest = [side for side in sides if len(side.peers) == most]
    is_open = len(largest) > 1 and us in knowing
    right = largest[0]
    return ReplicaVote(
        agrees=not is_open and said[us].digest == right.digest,
        ask=tuple(peer for peer in right.peers if peer != us),
        digest=right.digest,
        differs=len({weights.digest for weights in said.values()}) > 1,
        rivals=tuple(largest) if is_open else (),
    )


def is_near(one: Mapping[str, Tensor], other: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> bool:
    """Return True if two states after a step from `before` are equal except for rounding. Symmetric.

    Tensors are by global name, including Adam's moments (`exp_avg/<parameter>`). Moments are compared number
    by number: where the mean square is almost zero, a small difference causes a large step.
    """
    weights = [name for name in one if "/" not in name]
    if one.keys() != other.keys() or not before.keys() >= {*weights}:
        return False
    step = min(_distance(one, before, weights), _distance(other, before, weights))
    # Not `>`: every comparison with NaN is false.
    if not _distance(one, other, weights) <= NEAR * step:
        return False
    return all(_is_near_moment(one, other, name) for name in one if "/" in name)


def _sides(said: Mapping[str, ReplicaWeights]) -> list[VoteSide]:
    """Return the sides in the order of their smallest peer ids."""
    peers: dict[str, list[str]] = {}
    for peer_id in sorted(said):
        peers.setdefault(said[peer_id].digest, []).append(peer_id)
    befores = {digest: {said[peer].before for peer in those} for digest, those in peers.items()}
    return [
        VoteSide(digest, tuple(those), befores[digest].pop() if len(befores[digest]) == 1 else "")
        for digest, those in peers.items()
    ]


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Sequence[str]) -> float:
    parts = [(one[name].double() - other[name].double()).norm() for name in names]
    return torch.stack(parts).norm().item() if parts else 0.0


def _is_near_moment(one: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> bool:
    kind, _, parameter = name.partition("/")
    if kind == "step":
        return torch.equal(one[name], other[name])
    square = f"exp_avg_sq/{parameter}"
    if square not in one:
        return False
    least = torch.minimum(one[square], other[square]).double()
    room = least if kind == "exp_avg_sq" else least.sqrt()
    return bool(((one[name].double() - other[name].double()).abs() <= NEAR * room).all())
