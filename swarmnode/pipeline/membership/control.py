"""What members tell each other about the pipeline itself: presence, state, proposals. Bounded and strict.

membership.py -> [control] -> gossip, Host.request -> [control] -> membership.py

A `Presence` is signed by its author for one pipeline of one swarm, so it can be gossiped, handed on in a
proposal and believed whoever brings it. Everything else is a request to one member, whose transport tells the
truth about who asks. Every request is answered at once with the `Status` of the one that was asked, or with a
`RefusalReply`; what takes long (planning, loading) is started, and shows in later statuses.
"""

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.identity.keys import NodeKey, seal, unseal
from swarmnode.pipeline.plans.costs import MAX_LAYERS, CostAnnouncement, PeerId, check

PROTOCOL = "/swarmnode/pipeline-control/1"
VERSION = 1
"""First byte of every request, reply and presence."""

MAX_MEMBERS = 64
"""The most members of one pipeline. More are better split into two: everyone pings everyone."""

MAX_PRESENCE_BYTES = 32 * 1024
"""Links to and observations of MAX_MEMBERS others are 10 KB; gossip allows 64 KiB."""

MAX_REQUEST_BYTES = MAX_MEMBERS * MAX_PRESENCE_BYTES + 16 * 1024
"""A proposal carries the presences of all members."""

MAX_REPLY_BYTES = 8 * 1024
MAX_TERMS = 48
MAX_DETAIL_CHARS = 400

Number = Annotated[int, Meta(ge=0, le=2**53)]
Epoch = Annotated[int, Meta(ge=1, le=2**53)]
Term = Annotated[str, Meta(max_length=64)]
Digest = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Ends = Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_LAYERS)], ...], Meta(max_length=MAX_MEMBERS)]


class RefusalReason(StrEnum):
    """Why something was not taken. Values never come from the wire, so their number is bounded."""

    MALFORMED = "malformed"
    OTHER_VERSION = "other_version"
    TOO_LARGE = "too_large"
    TOO_OFTEN = "too_often"
    NOT_OWN = "not_own"
    """A presence brought as the own one by somebody else, or one about somebody else."""
    OLD_NEWS = "old_news"
    OTHER_TERMS = "other_terms"
    """Another model, or settings that have to be equal and are not."""
    NOT_INVITED = "not_invited"
    FULL = "full"
    UNKNOWN_MEMBER = "unknown_member"
    """We have no presence of the one that asks: it should introduce itself."""
    NOT_CONVENER = "not_convener"
    """Somebody with a smaller peer id lives, whose turn it is."""
    OUTBID = "outbid"
    """There is a proposal with a higher epoch, or an equal one by a smaller peer id."""
    EPOCH_LEAP = "epoch_leap"
    NOT_IN_IT = "not_in_it"
    """The proposal leaves out the one that it is sent to, or the one that sends it."""
    WRONG_PART = "wrong_part"
    """The proposal says that we hold other layers than we do."""
    BEGUN = "begun"
    """The iteration named has begun here under the former plan."""
    OTHER_EPOCH = "other_epoch"
    NOT_READY = "not_ready"
    BAD_PEER_ID = "bad_peer_id"
    BAD_SIGNATURE = "bad_signature"
    STALE = "stale"
    """Costs measured too long ago, or in the future: a clock is wrong."""
    LEFT = "left"


class ProposalProgress(StrEnum):
    """How far a member is with the latest proposal that it took. In this order."""

    NONE = "none"
    PLANNING = "planning"
    PREPARED = "prepared"
    """Planned, and the weights of a new stage are loaded as far as they can be ahead of time."""
    HELD = "held"
    """Does not begin the iteration named under the former plan."""
    READY = "ready"
    """Has taken its assignment under the new plan."""
    BEGUN = "begun"
    """All have taken theirs: micro-batches may be sent."""
    FAILED = "failed"


class Presence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """A member, as it announces itself."""

    session: Number
    """Number of this run of the process; another one means that it was restarted and holds nothing."""
    sequence: Number
    """Number of the presence within the session, rising."""
    terms: Annotated[dict[Term, Term], Meta(max_length=MAX_TERMS)]
    """Model and settings that have to be equal on all members, by name."""
    costs: CostAnnouncement


class Status(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Where a member stands."""

    session: Number
    sequence: Number
    """Sequence number of its newest presence."""
    iteration: Number
    """Optimizer steps taken."""
    busy: bool
    """Trains that iteration, as a data node."""
    in_force: Number = 0
    """Epoch of the plan that it works under; 0: none."""
    plan: Digest = ""
    """Digest of that plan."""
    stage: Annotated[int, Meta(ge=-1, lt=MAX_MEMBERS)] = -1
    """The stage that it holds; -1: none."""
    ends: Ends = ()
    """The layers behind each stage, as it knows them."""
    weights: Digest = ""
    """Digest of the stage's weights at that iteration; empty while unknown."""
    epoch: Number = 0
    """The highest that it has taken a proposal of."""
    progress: ProposalProgress = ProposalProgress.NONE
    proposed: Digest = ""
    """The plan that it computed from that proposal."""
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    """Why it failed, for people."""
    resigned: bool = False
    """Does not convene for now; the next one does."""

    def __post_init__(self) -> None:
        _check_rising(self.ends)


class Ping(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ping"):
    """Are you there?"""

    status: Status
    """Status of the one that asks."""


class Introduce(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="introduce"):
    """The presence of the one that asks, sealed."""

    presence: Annotated[bytes, Meta(max_length=MAX_PRESENCE_BYTES)]


class Propose(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="propose"):
    """The inputs of a plan, for everyone to compute it."""

    epoch: Epoch
    ends: Ends
    """Where the former stages end; empty when nobody holds anything."""
    stage_of: Annotated[
        dict[PeerId, Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]], Meta(max_length=MAX_MEMBERS)
    ]
    """Who holds which of them."""
    presences: Annotated[
        tuple[Annotated[bytes, Meta(max_length=MAX_PRESENCE_BYTES)], ...],
        Meta(min_length=1, max_length=MAX_MEMBERS),
    ]
    """Sealed by the members that shall take part."""

    def __post_init__(self) -> None:
        _check_rising(self.ends)


class Hold(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hold"):
    """Do not begin this iteration under the former plan."""

    epoch: Epoch
    iteration: Number


class TakeAssignment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="seat"):
    """Take up your assignment from this iteration on."""

    epoch: Epoch
    iteration: Number


class Begin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="begin"):
    """Everyone has an assignment."""

    epoch: Epoch


class Suspect(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="suspect"):
    """This member did not answer me: look for yourself."""

    peer_id: PeerId


class Leave(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="leave"):
    """I am leaving."""


Request = Ping | Introduce | Propose | Hold | TakeAssignment | Begin | Suspect | Leave


class StatusReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="status"):
    """The request was taken."""

    status: Status


class RefusalReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="refusal"):
    """The request was not taken."""

    reason: RefusalReason
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    """What to do about it, for people."""


Reply = StatusReply | RefusalReply

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_presence_decoder = msgspec.msgpack.Decoder(Presence)


def topic_of(swarm: str, name: str) -> str:
    """Where the members of a pipeline announce themselves."""
    return f"/swarmnode/1/{swarm}/pipeline/{name}"


def encode(message: Request | Reply) -> bytes:
    """A request or a reply, version first."""
    return bytes([VERSION]) + _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """A request within every bound. Raises Rejected: too_large, other_version, malformed."""
    return _decode(_request_decoder, data, MAX_REQUEST_BYTES)


def decode_reply(data: bytes) -> Reply:
    """A reply. Raises Rejected: too_large, other_version, malformed."""
    return _decode(_reply_decoder, data, MAX_REPLY_BYTES)


def seal_presence(key: NodeKey, presence: Presence, *, topic: str) -> bytes:
    """Signed for the pipeline with this topic, and for nothing else."""
    return seal(key, _context(topic), bytes([VERSION]) + _encoder.encode(presence))


def open_presence(sealed: bytes, *, topic: str, now_s: float) -> tuple[str, Presence]:
    """Its author, and what it announces; `now_s` since the epoch.

    Raises Rejected: too_large, malformed, bad_peer_id, bad_signature, other_version, not_own, stale.
    """
    envelope = unseal(sealed, _context(topic), max_bytes=MAX_PRESENCE_BYTES)
    presence = _decode(_presence_decoder, envelope.payload, MAX_PRESENCE_BYTES)
    check(presence.costs, author=envelope.author, now_s=now_s)
    if max(len(presence.costs.links), len(presence.costs.observed)) > MAX_MEMBERS:
        raise Rejected(RefusalReason.TOO_LARGE, f"more than {MAX_MEMBERS} links or observations")
    return envelope.author, presence


def differing(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Which terms differ, in words; empty when none does.

    >>> differing({"skip": "0.25", "model": "a"}, {"skip": "0.5", "model": "a"})
    "skip is '0.5' there and '0.25' here"
    """
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    # Foreign text goes to a screen: escaped.
    told = (
        f"{ascii(name)[1:-1]} is {theirs.get(name)!a} there and {ours.get(name)!a} here" for name in names
    )
    return "; ".join(told)


def _check_rising(ends: Ends) -> None:
    """Raises ValueError, which a decoder turns into a refusal."""
    if any(later <= former for former, later in pairwise(ends)):
        raise ValueError("a stage without layers")


def _context(topic: str) -> str:
    return f"pipeline-presence {topic}"


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes, max_bytes: int) -> _T:
    if len(data) > max_bytes:
        raise Rejected(RefusalReason.TOO_LARGE, f"{len(data)} bytes, at most {max_bytes}")
    if data[:1] != bytes([VERSION]):
        raise Rejected(RefusalReason.OTHER_VERSION if data else RefusalReason.MALFORMED)
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(RefusalReason.MALFORMED, str(error)) from error
