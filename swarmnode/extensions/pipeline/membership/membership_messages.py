"""Messages between members about the pipeline itself: presence, state, proposals. Bounded and strict.

membership.py -> [membership_messages] -> gossip, member_streams.py -> [membership_messages] -> membership.py

A `Presence` is signed by its author for one pipeline of one swarm, so it can be gossiped, handed on in a
proposal and believed whoever brings it. Everything else is a request to one member, whose transport tells the
truth about who asks. Every request is answered at once with the `Status` of the one that was asked, or
refused with a sentence; what takes long (planning, loading) is started, and shows in later statuses.
"""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.plans.member_costs import MAX_LAYERS, CostAnnouncement, PeerId, check
from swarmnode.extensions.pipeline.wire.frames import VERSION, check_version, decode, encode
from swarmnode.extensions.pipeline.wire.refusals import MAX_DETAIL_CHARS, Refusal
from swarmnode.extensions.pipeline.wire.services import MemberMessage
from swarmnode.identity.envelope import seal, unseal
from swarmnode.identity.node_key import NodeKey

MAX_MEMBERS = 64
"""Bound of the members of one pipeline. More are better split into two: every member pings every other."""

MAX_PRESENCE_BYTES = 32 * 1024
"""Bound of a sealed presence. Links to and observations of MAX_MEMBERS others are 10 KB; gossip allows 64
KiB."""

MAX_TERMS = 48

Number = Annotated[int, Meta(ge=0, le=2**53)]
Epoch = Annotated[int, Meta(ge=1, le=2**53)]
Term = Annotated[str, Meta(max_length=64)]
Digest = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Ends = Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_LAYERS)], ...], Meta(max_length=MAX_MEMBERS)]


class ProposalProgress(StrEnum):
    """Progress of a member with the latest proposal that it took, in this order."""

    NONE = "none"
    PLANNING = "planning"
    PREPARED = "prepared"
    """The plan is computed, and the weights of a new stage are loaded as far as that goes ahead of time."""
    HELD = "held"
    """The member does not begin the named iteration under the former plan."""
    READY = "ready"
    """The member has taken its assignment under the new plan."""
    BEGUN = "begun"
    """All members have taken theirs: micro-batches may be sent."""
    FAILED = "failed"


class Presence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The announcement of a member about itself."""

    session: Number
    """Number of this run of the process. A different one means that the member was restarted and holds
    nothing."""
    sequence: Number
    """Number of the presence within the session; it rises."""
    terms: Annotated[dict[Term, Term], Meta(max_length=MAX_TERMS)]
    """Model and settings that have to be equal on all members, by name."""
    costs: CostAnnouncement


class Status(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The state of a member with respect to plans."""

    session: Number
    sequence: Number
    """Sequence number of its newest presence."""
    iteration: Number
    """Optimizer steps taken."""
    busy: bool
    """True if it trains that iteration, as a data node."""
    in_force: Number = 0
    """Epoch of the plan that it works under; 0 for none."""
    plan: Digest = ""
    """Digest of that plan."""
    stage: Annotated[int, Meta(ge=-1, lt=MAX_MEMBERS)] = -1
    """The stage that it holds; -1 for none."""
    ends: Ends = ()
    """First layer behind each stage, as it knows them."""
    epoch: Number = 0
    """Highest epoch that it has taken a proposal of."""
    progress: ProposalProgress = ProposalProgress.NONE
    proposed: Digest = ""
    """Digest of the plan that it computed from that proposal."""
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    """Reason of a failure, for people."""
    resigned: bool = False
    """True if it does not convene for now, so that the next member does."""

    def __post_init__(self) -> None:
        _check_rising(self.ends)


class Ping(MemberMessage, frozen=True, tag="ping"):
    """Asks a member for its status."""

    status: Status
    """Status of the asking member."""


class Introduce(MemberMessage, frozen=True, tag="introduce"):
    """Carries the sealed presence of the asking member."""

    presence: Annotated[bytes, Meta(max_length=MAX_PRESENCE_BYTES)]


class Propose(MemberMessage, frozen=True, tag="propose"):
    """Proposes a plan by its inputs, from which each member computes it."""

    epoch: Epoch
    ends: Ends
    """First layer behind each former stage; empty if no member holds a stage."""
    stage_of: Annotated[
        dict[PeerId, Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]], Meta(max_length=MAX_MEMBERS)
    ]
    """The former stage of each member that holds one."""
    presences: Annotated[
        tuple[Annotated[bytes, Meta(max_length=MAX_PRESENCE_BYTES)], ...],
        Meta(min_length=1, max_length=MAX_MEMBERS),
    ]
    """Sealed presences of the members that shall take part."""

    def __post_init__(self) -> None:
        _check_rising(self.ends)


class Hold(MemberMessage, frozen=True, tag="hold"):
    """Asks a member not to begin this iteration under the former plan."""

    epoch: Epoch
    iteration: Number


class TakeAssignment(MemberMessage, frozen=True, tag="seat"):
    """Asks a member to take its assignment under the new plan from this iteration on."""

    epoch: Epoch
    iteration: Number


class Begin(MemberMessage, frozen=True, tag="begin"):
    """Tells a member that all have taken their assignments."""

    epoch: Epoch


class Suspect(MemberMessage, frozen=True, tag="suspect"):
    """Reports that a member did not answer the sender. The receiver checks it."""

    peer_id: PeerId


class Leave(MemberMessage, frozen=True, tag="leave"):
    """Tells a member that the sender leaves."""


Request = Ping | Introduce | Propose | Hold | TakeAssignment | Begin | Suspect | Leave

Ask = Callable[[str, Request, float], Awaitable[Status]]
"""Sends a member, possibly ourselves, a request and returns its status within so many seconds. Raises
MemberRefused or NetworkError."""


def topic_of(swarm: str, name: str) -> str:
    """Return the gossip topic on which the members of a pipeline announce themselves."""
    return f"/swarmnode/1/{swarm}/pipeline/{name}"


def seal_presence(key: NodeKey, presence: Presence, *, topic: str) -> bytes:
    """Return the presence signed for the pipeline with this topic, and for nothing else."""
    return seal(key, _context(topic), bytes([VERSION]) + encode(presence))


def open_presence(sealed: bytes, *, topic: str, now_s: float) -> tuple[str, Presence]:
    """Return the author of a sealed presence and the presence. `now_s`: seconds since the epoch.

    Raises Rejected: too_large, malformed, bad_peer_id, bad_signature, other_version, not_own, stale.
    """
    envelope = unseal(sealed, _context(topic), max_bytes=MAX_PRESENCE_BYTES)
    check_version(envelope.payload[0] if envelope.payload else 0)
    presence = decode(Presence, memoryview(envelope.payload)[1:])
    check(presence.costs, author=envelope.author, now_s=now_s)
    if max(len(presence.costs.links), len(presence.costs.observed)) > MAX_MEMBERS:
        raise Rejected(Refusal.TOO_LARGE, f"more than {MAX_MEMBERS} links or observations")
    return envelope.author, presence


def differing(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return the terms that differ, in words; empty if none does.

    >>> differing({"skip": "0.25", "stages": "None"}, {"skip": "0.5", "stages": "3"})
    'skip is 0.5 there and 0.25 here; stages is 3 there and unset here'
    """
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if "model" in names:
        return "the model there is another than here"  # Digests, and what follows from it, tell nobody more.
    return "; ".join(
        f"{_shown(name)} is {_shown(theirs.get(name))} there and {_shown(ours.get(name))} here"
        for name in names
    )


def _shown(term: str | None) -> str:
    """Return a name or a value for a screen: foreign text is escaped."""
    return "unset" if term in (None, "None") else ascii(term)[1:-1]


def _check_rising(ends: Ends) -> None:
    """Raises ValueError, which a decoder turns into a refusal, unless the layer numbers rise."""
    if any(later <= former for former, later in pairwise(ends)):
        raise ValueError("a stage without layers")


def _context(topic: str) -> str:
    return f"pipeline-presence {topic}"
