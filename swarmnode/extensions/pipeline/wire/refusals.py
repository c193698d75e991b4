"""The reasons for which a member does not take what another one asks, and how it says so.

incoming_streams.py, services -> [Refused] -> wire -> [MemberRefused] -> whoever asked
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected

MAX_DETAIL_CHARS = 400


class Refusal(StrEnum):
    """Reason why a message was not taken. On the wire it is one of these or malformed, so their number is
    bounded."""

    NOT_A_MEMBER = "not_a_member"
    TOO_MANY_STREAMS = "too_many_streams"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    MALFORMED = "malformed"
    OTHER_VERSION = "other_version"
    UNKNOWN_PLAN = "unknown_plan"
    WRONG_ROUTE = "wrong_route"
    WRONG_SHAPE = "wrong_shape"
    BAD_SIGNATURE = "bad_signature"
    """The data node in whose name it comes has not signed it."""
    NOT_FINITE = "not_finite"
    NO_MEMORY = "no_memory"
    """Its bytes would have had to wait for longer than it is of use, or it does not fit beside what the stage
    holds."""
    NO_SLOT = "no_slot"
    """The stage holds as many micro-batches as it may."""
    UNKNOWN_WORK = "unknown_work"
    """A gradient for hidden states that were never sent, or an answer that is too late."""
    UNKNOWN_STATE = "unknown_state"
    """A state of a stage that is not held here."""
    TOO_EARLY = "too_early"
    """A question about an iteration that is far away."""
    TOO_OFTEN = "too_often"
    NOT_OWN = "not_own"
    """A presence that a peer brings as its own and that is another's, or one that describes another
    member."""
    OLD_NEWS = "old_news"
    OTHER_TERMS = "other_terms"
    """Another model, or settings that have to be equal and are not."""
    NOT_INVITED = "not_invited"
    FULL = "full"
    UNKNOWN_MEMBER = "unknown_member"
    """We have no presence of the asking member: it should introduce itself."""
    NOT_CONVENER = "not_convener"
    """A member with a smaller peer id lives and has the turn."""
    OUTBID = "outbid"
    """There is a proposal with a higher epoch, or with an equal one by a smaller peer id."""
    EPOCH_LEAP = "epoch_leap"
    ITERATION_LEAP = "iteration_leap"
    NOT_IN_IT = "not_in_it"
    """The proposal leaves out its receiver or its sender."""
    WRONG_PART = "wrong_part"
    """The proposal says that we hold other layers than we do."""
    BEGUN = "begun"
    """The named iteration has begun here under the former plan."""
    OTHER_EPOCH = "other_epoch"
    NOT_READY = "not_ready"
    BAD_PEER_ID = "bad_peer_id"
    STALE = "stale"
    """Costs measured too long ago or in the future: a clock is wrong."""
    LEFT = "left"
    INTERRUPTED = "interrupted"
    """The stream ended, or we are leaving."""
    INTERNAL = "internal"


class Refused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The refusal of a message as it is sent: it was not taken and will not be."""

    reason: Refusal
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    """Advice for people."""

    @classmethod
    def of(cls, rejected: Rejected) -> "Refused":
        """Return the refusal that a peer is told for an error of ours."""
        return cls(reason_of(rejected), str(rejected)[:MAX_DETAIL_CHARS])


class MemberRefused(Rejected):
    """A member has refused what it was asked."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason, refused.detail)
        self.refusal = refused.reason


class BadAnswer(MemberRefused):
    """A member has answered, and it is no answer or one that we reject; `reason` is ours."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(Refused.of(rejected))
        self.reason = rejected.reason


def reason_of(rejected: Rejected) -> Refusal:
    """Return the reason of an error; `internal` for those that no member is told."""
    return Refusal(rejected.reason) if rejected.reason in set(Refusal) else Refusal.INTERNAL
