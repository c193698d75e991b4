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
    """Short codes for counters, each with its rule. Values never come from the wire, so their number is
    bounded. docs/metrics.md has them as a table."""

    # A header was not taken in.
    BANNED = "banned"
    """Its author is not listened to for now: its score fell below 20."""
    RATE_LIMITED = "rate_limited"
    """Its author announces more than HEADERS_PER_S."""
    OVER_CAPACITY = "over_capacity"
    """All authors together announce more than we hear."""
    TOO_LARGE = "too_large"
    """Over a bound of exchange/limits.py; of our own, a reward too large to claim."""
    GOSSIP_TOO_LARGE = "gossip_too_large"
    """A gossip message over MAX_GOSSIP_BYTES."""
    MALFORMED = "malformed"
    """A header or page that does not decode."""
    BAD_PEER_ID = "bad_peer_id"
    """The name of its author is not a peer id."""
    BAD_SIGNATURE = "bad_signature"
    """It is not signed by its author."""
    SENDER_MISMATCH = "sender_mismatch"
    """Somebody else than its author sent it."""
    NOT_A_PUBLISHER = "not_a_publisher"
    """The founder of this private swarm does not let its author publish."""
    OTHER_PROTOCOL = "other_protocol"
    """Another version of swarmnode, whose messages differ."""
    OTHER_SWARM = "other_swarm"
    """Its header names another swarm (swarm.name)."""
    OTHER_TASK = "other_task"
    """We have no such task (tasks.names)."""
    OTHER_VERSION = "other_version"
    """We have another version of this task: its file, rewards or settings differ."""
    NOT_EXCHANGED = "not_exchanged"
    """Its task stays at home: a vote, a judge behind a URL, or exchangeable = False."""
    EXPIRED = "expired"
    """It was announced longer ago than we look back."""
    FROM_THE_FUTURE = "from_the_future"
    """Its author's clock is ahead of ours by more than MAX_CLOCK_SKEW_S."""
    NO_SPREAD = "no_spread"
    """By its author's own account all rewards are equal."""
    OVERSIZED = "oversized"
    """A body of so many bytes only holds answers longer than rollout.max_tokens."""
    DUPLICATE = "duplicate"
    """We heard it before."""
    BEFORE_OUR_TIME = "before_our_time"
    """It is older than this start of the node, which may have heard it before."""

    # A body could not be had.
    UNAVAILABLE = "unavailable"
    """Nobody who was asked for the body had it, or could be reached."""
    TIMEOUT = "timeout"
    """The body did not come in time."""
    WRONG_BODY = "wrong_body"
    """The bytes that came do not have the hash that the header names."""

    # A body was had and not accepted.
    BAD_COMPRESSION = "bad_compression"
    """The body is not one frame of zstd, or longer than it says."""
    MALFORMED_BODY = "malformed_body"
    """The body does not decode, or has turns where the task has none."""
    BODY_MISMATCH = "body_mismatch"
    """The body names another author, example or number of answers than its header."""
    NOT_DRAWABLE = "not_drawable"
    """Our copy of the task has no such example."""
    NO_TOKENS = "no_tokens"
    """All of its answers are empty."""
    TOO_LONG = "too_long"
    """Half of its answers or more have more tokens in our tokenizer than our rollout.max_tokens."""
    UNPLAYABLE = "unplayable"
    """Our copy of the environment ends half of its episodes or more elsewhere."""
    UNFINISHED = "unfinished"
    """Half of its episodes or more did not come to their end."""
    LONG_PROMPT = "long_prompt"
    """The question is longer than we take in our tokens (rollout.max_prompt_tokens)."""
    COPIED = "copied"
    """The same answers came before, under this name or another."""
    UNSCORABLE = "unscorable"
    """Our judge gave no score: its code raised, or its process ended."""
    SCORE_TIMEOUT = "score_timeout"
    """Judging it took longer than strangers' groups may."""
    PLAY_TIMEOUT = "play_timeout"
    """Playing its episodes took longer than PLAY_S."""
    JUDGE_STUCK = "judge_stuck"
    """Our judge is held up by earlier groups."""
    JUDGE_BUSY = "judge_busy"
    """Our judge had no time for any of its answers."""
    ZERO_ADVANTAGE = "zero_advantage"
    """Our judge gives all of its answers the same reward."""
    INTERNAL = "internal"
    """A defect of ours: its traceback is in the log."""

    # It was accepted all the same, and counted.
    FALSE_CLAIM = "false_claim"
    """It is used, but our judge gives other rewards than its author claimed."""

    # It waited and was never drawn.
    STALE = "stale"
    """It waited too long to be trained on."""
    CROWDED_OUT = "crowded_out"
    """Newer ones took its place: there was enough, or its author is paused (`swarmnode peers`)."""
    OVER_SHARE = "over_share"
    """Its author has its share of what waits (MAX_AUTHOR_SHARE)."""

    # A request to us was not answered.
    BAD_REQUEST = "bad_request"
    """A request that does not decode."""
    TOO_MANY_REQUESTS = "too_many_requests"
    """A peer asks more than REQUESTS_PER_S."""
    UPLOAD_LIMITED = "upload_limited"
    """Our upload was full (exchange.upload_mb_per_s)."""

    # A group of our own was not announced.
    NOT_OURS = "not_ours"
    """Another policy than ours sampled it."""
    GROUP_SIZE = "group_size"
    """It has fewer or more answers than a group may."""
    PRIVATE = "private"
    """Our rollouts stay at home (tasks.private), or those of this task."""
    PACED = "paced"
    """Others would not hear more of us in this time."""
    HOST_DOWN = "host_down"
    """The network was down."""


NOT_NEEDED = frozenset(
    {Reason.STALE, Reason.CROWDED_OUT, Reason.OVER_SHARE, Reason.DUPLICATE, Reason.EXPIRED, Reason.NO_SPREAD}
)
"""Reasons that blame nobody: there was enough to train on, or nothing to learn from it."""

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
    Reason.INTERNAL: 4,
    # Honest peers keep to nine tenths of their allowance; a network that held messages back may bunch them.
    Reason.RATE_LIMITED: 0.05,
    Reason.TOO_MANY_REQUESTS: 0.5,
}
"""Points of the score that a reason costs; one that is not listed costs nothing."""
