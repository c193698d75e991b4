"""The reasons for which a member refuses what another member asks, and their form on the wire.

incoming_streams.py, services -> [Refused] -> wire -> [MemberRefused] -> whoever asked
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected

MAX_DETAIL_CHARS = 400


class Refusal(StrEnum):
    """Reason why a message was refused. Anything else on the wire is malformed, so the number of reasons is
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
    """The data node that it claims to come from has not signed it."""
    NOT_FINITE = "not_finite"
    NO_MEMORY = "no_memory"
    """Its bytes would have to wait for longer than the message is useful, or it does not fit into memory
    beside what the stage holds."""
    NO_SLOT = "no_slot"
    """The stage holds as many micro-batches as it can."""
    UNKNOWN_WORK = "unknown_work"
    """A gradient for hidden states that were never sent, or an answer that comes too late."""
    UNKNOWN_STATE = "unknown_state"
    """A state of a stage that we do not hold."""
    TOO_EARLY = "too_early"
    """A question about an iteration that is far ahead."""
    TOO_OFTEN = "too_often"
    NOT_OWN = "not_own"
    """A presence that a peer sends as its own but that belongs to another peer, or one that describes another
    member."""
    OLD_NEWS = "old_news"
    OTHER_TERMS = "other_terms"
    """Another model, or different values of settings that must be equal."""
    NOT_INVITED = "not_invited"
    FULL = "full"
    UNKNOWN_MEMBER = "unknown_member"
    """We have no presence of the asking member: it should introduce itself first."""
    NOT_CONVENER = "not_convener"
    """A member with a smaller peer id is alive and is the convener."""
    OUTBID = "outbid"
    """There is a proposal with a higher epoch, or with an equal epoch and a smaller peer id."""
    EPOCH_LEAP = "epoch_leap"
    ITERATION_LEAP = "iteration_leap"
    NOT_IN_IT = "not_in_it"
    """The proposal leaves out its receiver or its sender."""
    WRONG_PART = "wrong_part"
    """The proposal claims that we hold other layers than we do."""
    BEGUN = "begun"
    """The proposed iteration has already begun here under the former plan."""
    OTHER_EPOCH = "other_epoch"
    NOT_READY = "not_ready"
    BAD_PEER_ID = "bad_peer_id"
    STALE = "stale"
    """Costs that were measured too long ago or in the future: a clock is wrong."""
    LEFT = "left"
    INTERRUPTED = "interrupted"
    """The stream ended, or we are leaving."""
    INTERNAL = "internal"


class Refused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The refusal of a message as it is sent: the message was not accepted and will not be."""

    reason: Refusal
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    """Advice for people."""

    @classmethod
    def of(cls, rejected: Rejected) -> "Refused":
        """Return the refusal to send to a peer for an error of ours."""
        reason = reason_of(rejected)
        detail = rejected.detail if reason == rejected.reason else str(rejected)
        return cls(reason, detail[:MAX_DETAIL_CHARS])


class MemberRefused(Rejected):
    """A member has refused a message."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason, refused.detail)
        self.refusal = refused.reason


class BadAnswer(MemberRefused):
    """A member's answer is not valid, or we reject it. `reason` is ours."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(Refused.of(rejected))
        self.reason = rejected.reason


def reason_of(rejected: Rejected) -> Refusal:
    """Return the reason of an error, or `internal` if members are not told about it."""
    return Refusal(rejected.reason) if rejected.reason in set(Refusal) else Refusal.INTERNAL
