"""Why something was not used, and what that costs the peer it came from.

validation, bodies, gossip -> [Reason] -> Ledger -> status, metrics

Every reason is in one table, with its points and its words. Points are taken from a score of 100; below 20
the peer is banned (reputation.py). Being slow, late, far away, badly clocked or interested in other tasks
costs nothing; messages that no honest peer sends cost a lot.

Faults that an honest peer may make now and then, but that cost us a fetch or a judgement, cost little: a rare
one is forgotten before the next, a stream of them ends in a ban. Reasons without points are of three kinds:
the message is refused before it costs more than hearing it, which the allowances bound; its author is asked
again only after a pause, which bounds the bytes; or nobody is to blame.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """Short codes for counters, each with its rule. Values never come from the wire, so their number is
    bounded. docs/metrics.md has them as a table."""

    points: float
    """Points taken from the score of the peer it came from; 0: none."""
    words: str
    """Text for a person: the given one, or the code without its underscores."""

    def __new__(cls, code: str, points: float = 0, words: str = "") -> Self:
        """Makes a reason from its code, which metrics and JSON contain, its points and its words."""
        reason = str.__new__(cls, code)
        reason._value_, reason.points, reason.words = code, points, words or code.replace("_", " ")
        return reason

    # A header was not taken in.
    BANNED = "banned"
    """Its author is banned for now: its score fell below 20."""
    # Honest peers keep to nine tenths of their allowance; a network that held messages back may bunch them.
    RATE_LIMITED = "rate_limited", 0.05, "too many from one peer"
    """Its author announces more than HEADERS_PER_S."""
    OVER_CAPACITY = "over_capacity", 0, "more than we can process"
    """All authors together announce more than we can process."""
    TOO_LARGE = "too_large", 10
    """Over a bound of exchange/limits.py; of our own, a reward too large to claim."""
    # No honest host sends one, and its author signed it.
    GOSSIP_TOO_LARGE = "gossip_too_large", 50
    """A gossip message over MAX_GOSSIP_BYTES."""
    MALFORMED = "malformed", 10
    """A header or page that does not decode."""
    BAD_PEER_ID = "bad_peer_id", 10
    """Its author's name is not a peer id."""
    BAD_SIGNATURE = "bad_signature", 20
    """It is not signed by its author."""
    SENDER_MISMATCH = "sender_mismatch", 20
    """A peer other than its author sent it."""
    NOT_A_PUBLISHER = "not_a_publisher"
    """The founder of this private swarm does not let its author publish."""
    OTHER_PROTOCOL = "other_protocol"
    """Another version of swarmnode, whose messages differ."""
    OTHER_SWARM = "other_swarm", 10
    """Its header names another swarm (swarm.name)."""
    OTHER_TASK = "other_task", 0, "of tasks that we do not have"
    """We have no such task (tasks.names)."""
    OTHER_VERSION = "other_version", 0, "of other versions of our tasks"
    """We have another version of this task: its file, rewards or settings differ."""
    NOT_EXCHANGED = "not_exchanged"
    """Its task stays at home: a vote, a judge behind a URL, or exchangeable = False."""
    EXPIRED = "expired", 0, "announced too long ago"
    """It was announced longer ago than we look back."""
    FROM_THE_FUTURE = "from_the_future"
    """Its author's clock is ahead of ours by more than MAX_CLOCK_SKEW_S."""
    NO_SPREAD = "no_spread", 0, "claimed equal rewards"
    """By its author's own account all rewards are equal."""
    OVERSIZED = "oversized", 0, "larger than we accept"
    """A body of this size can only hold answers longer than rollout.max_tokens."""
    DUPLICATE = "duplicate", 0, "heard before"
    """We heard it before."""
    BEFORE_OUR_TIME = "before_our_time", 0, "older than this node"
    """It is older than this start of the node, and may have been heard before it."""

    # A body could not be fetched.
    UNAVAILABLE = "unavailable", 0, "could not be fetched"
    """No peer that we asked for the body had it, or could be reached."""
    TIMEOUT = "timeout", 0, "fetched too slowly"
    """The body did not come in time."""
    # A peer that hands it over knows its hash, so it is not a mistake; each also costs the peer a pause.
    WRONG_BODY = "wrong_body", 25
    """The bytes received do not have the hash in the header."""

    # A body was fetched and not accepted.
    BAD_COMPRESSION = "bad_compression", 20
    """The body is not one zstd frame, or longer than it states."""
    MALFORMED_BODY = "malformed_body", 20
    """The body does not decode, or has turns where the task has none."""
    BODY_MISMATCH = "body_mismatch", 20
    """The body names another author, example or number of answers than its header."""
    NOT_DRAWABLE = "not_drawable", 10, "question not in our copy of the task"
    """Our copy of the task has no such example."""
    NO_TOKENS = "no_tokens", 10
    """All of its answers are empty."""
    # Honest peers may have other limits or tokenizers, or say the same by chance.
    TOO_LONG = "too_long", 4, "answers longer in our tokenizer than we accept (rollout.max_tokens)"
    """Half of its answers or more have more tokens in our tokenizer than our rollout.max_tokens."""
    # An environment that draws at random where it promises not to is a mistake, not an attack.
    UNPLAYABLE = "unplayable", 4
    """Our copy of the environment ends half of its episodes or more elsewhere."""
    # An author's own limit of turns may end an honest episode.
    UNFINISHED = "unfinished", 1
    """Half of its episodes or more did not come to their end."""
    LONG_PROMPT = "long_prompt", 0, "questions longer than we accept (rollout.max_prompt_tokens)"
    """The question has more of our tokens than we accept (rollout.max_prompt_tokens)."""
    COPIED = "copied"
    """The same answers came earlier, from this author or another."""
    UNSCORABLE = "unscorable", 0, "our judge gave no score"
    """Our judge gave no score: its code raised, or its process ended."""
    # Our judge or environment may be slow for everybody. The time itself comes out of an allowance, so that
    # scores recover faster than overruns can lower them.
    SCORE_TIMEOUT = "score_timeout", 1, "judged too slowly"
    """Judging it took longer than strangers' groups may."""
    PLAY_TIMEOUT = "play_timeout", 1, "played too slowly"
    """Playing its episodes took longer than PLAY_S."""
    JUDGE_STUCK = "judge_stuck"
    """Our judge is held up by earlier groups."""
    JUDGE_BUSY = "judge_busy"
    """Our judge had no time for any of its answers."""
    ZERO_ADVANTAGE = "zero_advantage", 0, "equal rewards"
    """Our judge gives all of its answers the same reward."""
    INTERNAL = "internal", 4, "internal error"
    """An internal error of this node; its traceback is in the log. It costs points all the same: whoever
    found out how to cause one must not go on for ever."""

    # It was accepted all the same, and counted.
    # Judges that run code may flicker; a node that lies does it in every group.
    FALSE_CLAIM = "false_claim", 10, "claimed other rewards than ours"
    """It is used, but our judge gives different rewards than its author claimed."""

    # It waited and was never drawn.
    STALE = "stale", 0, "too old to train on"
    """It waited too long to be trained on."""
    CROWDED_OUT = "crowded_out", 0, "not needed, newer ones took their place"
    """Newer ones took its place: there was enough, or its author is paused (`swarmnode peers`)."""
    OVER_SHARE = "over_share", 0, "too many from one author"
    """Its author has its share of what waits (MAX_AUTHOR_SHARE)."""

    # A request to us was not answered.
    BAD_REQUEST = "bad_request", 10
    """A request that does not decode."""
    TOO_MANY_REQUESTS = "too_many_requests", 0.5
    """A peer asks more than REQUESTS_PER_S."""
    UPLOAD_LIMITED = "upload_limited", 0, "our upload was full"
    """Our upload was full (exchange.upload_mb_per_s)."""

    # A group of our own was not announced.
    NOT_OURS = "not_ours"
    """Another policy than ours sampled it."""
    GROUP_SIZE = "group_size"
    """It has fewer or more answers than a group may."""
    PRIVATE = "private", 0, "stays at home"
    """Our rollouts stay at home (tasks.private), or those of this task."""
    PACED = "paced", 0, "more than others would accept"
    """Others would not accept more from us in this time."""
    HOST_DOWN = "host_down", 0, "the network was down"
    """The network was down."""


NOT_NEEDED = frozenset(
    {Reason.STALE, Reason.CROWDED_OUT, Reason.OVER_SHARE, Reason.DUPLICATE, Reason.EXPIRED, Reason.NO_SPREAD}
)
"""Reasons for which nobody is to blame: there was enough to train on, or nothing to learn from it."""

KNOWN = frozenset(Reason)
"""All codes, since Python 3.11 does not answer `text in Reason`."""


def in_words(counts: Mapping[str, int]) -> str:
    """Returns counters by code in one line for a person, the largest first.

    >>> in_words({"stale": 3, "bad_signature": 41})
    '41 bad signature, 3 too old to train on'
    """
    most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = {code: Reason(code).words if code in KNOWN else code.replace("_", " ") for code in counts}
    return ", ".join(f"{count} {words[code]}" for code, count in most_first) or "nothing"
