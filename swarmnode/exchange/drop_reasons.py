"""Why something was not used, and what that costs the peer it came from.

validation, bodies, gossip -> [Reason] -> Ledger -> status, metrics

Every reason is in one table, with its penalty. A penalty is taken from a score of 100; below 20 the peer is
banned (reputation.py). Being slow, late, far away, badly clocked or interested in other tasks costs nothing;
saying what cannot be honest costs a lot.

What an honest peer may do now and then, but which costs us a fetch or a judgement, costs little: a rare one
is forgotten before the next, a stream of them ends in a ban. What is free is either refused before it has
cost more than hearing it, which the allowances bound, or followed by a pause before its author is asked
again, which bounds the bytes, or nobody's doing.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Short codes for counters. Values never come from the wire, so their number is bounded."""

    # A header was not taken in.
    BANNED = "banned"
    RATE_LIMITED = "rate_limited"
    OVER_CAPACITY = "over_capacity"
    TOO_LARGE = "too_large"
    GOSSIP_TOO_LARGE = "gossip_too_large"
    MALFORMED = "malformed"
    BAD_PEER_ID = "bad_peer_id"
    BAD_SIGNATURE = "bad_signature"
    SENDER_MISMATCH = "sender_mismatch"
    NOT_A_PUBLISHER = "not_a_publisher"
    OTHER_PROTOCOL = "other_protocol"
    OTHER_SWARM = "other_swarm"
    OTHER_TASK = "other_task"
    NOT_EXCHANGED = "not_exchanged"
    EXPIRED = "expired"
    FROM_THE_FUTURE = "from_the_future"
    NO_SPREAD = "no_spread"
    OVERSIZED = "oversized"
    DUPLICATE = "duplicate"
    BEFORE_OUR_TIME = "before_our_time"

    # A body could not be had.
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    WRONG_BODY = "wrong_body"

    # A body was had and not accepted.
    BAD_COMPRESSION = "bad_compression"
    MALFORMED_BODY = "malformed_body"
    BODY_MISMATCH = "body_mismatch"
    NOT_DRAWABLE = "not_drawable"
    NO_TOKENS = "no_tokens"
    TOO_LONG = "too_long"
    UNPLAYABLE = "unplayable"
    UNFINISHED = "unfinished"
    LONG_PROMPT = "long_prompt"
    COPIED = "copied"
    UNSCORABLE = "unscorable"
    SCORE_TIMEOUT = "score_timeout"
    PLAY_TIMEOUT = "play_timeout"
    JUDGE_STUCK = "judge_stuck"
    JUDGE_BUSY = "judge_busy"
    ZERO_ADVANTAGE = "zero_advantage"
    INTERNAL = "internal"

    # It was accepted all the same, and counted.
    FALSE_CLAIM = "false_claim"

    # It waited and was never drawn.
    STALE = "stale"
    CROWDED_OUT = "crowded_out"
    OVER_SHARE = "over_share"

    # A request to us was not answered.
    BAD_REQUEST = "bad_request"
    TOO_MANY_REQUESTS = "too_many_requests"
    UPLOAD_LIMITED = "upload_limited"

    # A group of our own was not announced.
    NOT_OURS = "not_ours"
    GROUP_SIZE = "group_size"
    PRIVATE = "private"
    PACED = "paced"
    HOST_DOWN = "host_down"


PENALTIES: dict[Reason, float] = {
    Reason.TOO_LARGE: 10,
    # No honest host lets one go, and its author signed it.
    Reason.GOSSIP_TOO_LARGE: 50,
    Reason.MALFORMED: 10,
    Reason.BAD_PEER_ID: 10,
    Reason.BAD_SIGNATURE: 20,
    Reason.SENDER_MISMATCH: 20,
    Reason.OTHER_SWARM: 10,
    # Whoever hands it over knows its hash: nobody does so by mistake, and each costs the peer a pause, too.
    Reason.WRONG_BODY: 25,
    Reason.BAD_COMPRESSION: 20,
    Reason.MALFORMED_BODY: 20,
    Reason.BODY_MISMATCH: 20,
    Reason.NOT_DRAWABLE: 10,
    Reason.NO_TOKENS: 10,
    # Judges that run code may flicker; a node that lies does it in every group.
    Reason.FALSE_CLAIM: 10,
    Reason.BAD_REQUEST: 10,
    # Honest peers may have other limits or tokenizers, or say the same by chance.
    Reason.TOO_LONG: 4,
    # Environments that draw by lot where they promise not to are somebody's mistake, not an attack.
    Reason.UNPLAYABLE: 4,
    # An author's own limit of turns may end an honest episode.
    Reason.UNFINISHED: 1,
    # Our judge or environment may be slow for everybody. The time itself comes out of an allowance, so that
    # scores recover faster than overruns can lower them.
    Reason.SCORE_TIMEOUT: 1,
    Reason.PLAY_TIMEOUT: 1,
    Reason.COPIED: 4,
    Reason.INTERNAL: 4,
    # Honest peers keep to nine tenths of their allowance; a network that held messages back may bunch them.
    Reason.RATE_LIMITED: 0.05,
    Reason.TOO_MANY_REQUESTS: 0.5,
}
"""Points of the score that a reason costs; one that is not listed costs nothing."""
