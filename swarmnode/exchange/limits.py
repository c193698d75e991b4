"""The numbers and reasons of the exchange: bounds, why something was not used, and what an operator may set.

[limits] -> messages, validation, inbox, reputation
validation, planes, inbox -> [Reason] -> Ledger -> status, metrics
config -> [ExchangeSettings] -> Exchange

Each bound stands with its reason. Every node of a swarm must agree on those of what may travel.

Every reason why something was not used is in one table, with what it costs the peer it came from. A penalty
is taken from a score of 100; below 20 the peer is banned (reputation.py). Being slow, late, far away, badly
clocked or interested in other tasks costs nothing; saying what cannot be honest costs a lot.

What an honest peer may do now and then, but which costs us a fetch or a judgement, costs little: a rare one
is forgotten before the next, a stream of them ends in a ban. What is free is either refused before it has
cost more than hearing it, which the allowances bound, or followed by a pause before its author is asked
again, which bounds the bytes, or nobody's doing.

The `[exchange]` section of the configuration fills in the settings.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum

from swarmnode.errors import ConfigError
from swarmnode.settings.config import SWARM_NAME

# ---- what may travel: a change here needs a new PROTOCOL ----

PROTOCOL = 3
"""Version of the messages. It is part of the topic and stream names, so that two versions never meet. In
version 1 a group had 64 answers at most; in version 2 a body was asked for without its author."""

MAX_HEADER_BYTES = 1024
"""A signed header, whole. Gossip multiplies each byte by about 16 on the wire (reference/network.md 1.6)."""

MAX_BODY_BYTES = 1024 * 1024
"""A compressed body. 4 x 8 completions of 1024 tokens are about 130 KiB before compression."""

MAX_RAW_BODY_BYTES = 4 * 1024 * 1024
"""A body once decompressed: what one hostile body can make us allocate, whatever its compression ratio."""

MIN_GROUP_SIZE = 2
"""One completion has no advantage over anything."""

MAX_GROUP_SIZE = 512
"""The widest group, as wide as published rollouts go (BroRL). What that costs us is bounded elsewhere: the
bytes of a body as for narrow groups, the time of judging by LOOK_S, memory and training by
`answers_per_group`."""

MAX_COMPLETION_CHARS = 128 * 1024
"""The longest completion, about 32k tokens: more than any policy that fits a home machine writes."""

MAX_EPISODE_TURNS = 64
"""Turns of one answer of an environment's task: the most that any environment grants."""

MAX_NAME_CHARS = 64
"""Swarm, task, version and model names. Four of them must fit into MAX_HEADER_BYTES."""

# ---- how we judge what arrives ----

MAX_CLOCK_SKEW_S = 120.0
"""How far ahead of ours an author's clock may be. Home machines without NTP drift by about this much."""

CLAIM_TOLERANCE = 1e-3
"""Claimed and own reward may differ by rounding, relative to their size (absolute below 1)."""

# ---- what we keep in memory ----

MAX_POOL_HEADERS = 1024
"""Headers waiting for selection, about 1 MiB. Selection is uniform, so a sample of the swarm will do."""

MAX_POOL_HEADERS_PER_AUTHOR = 32
"""A few rounds' worth of one node; it cannot fill the pool by talking more."""

MAX_SEEN = 32_768
"""Remembered headers and group contents, against replays: 5 to 7 MiB each."""

MAX_AUTHOR_SHARE = 0.25
"""Share of the replay buffer that one author may hold."""

MIN_AUTHOR_GROUPS = 16
"""What one author may hold of a small buffer all the same: in a swarm of two there is nobody else."""

MAX_TRACKED_PEERS = 4096
"""Peers whose conduct we remember, about 2 MiB. Those not heard of for longest are forgotten first."""

MAX_OWN_BODIES = 4096
"""Bodies kept for others to fetch, besides the bound in bytes."""

MAX_ANSWERED = 4096
"""Examples that we remember to have answered, so as to fetch what others answered to them."""

MAX_BUFFER_BYTES = 64 * 1024 * 1024
"""Bodies of the groups in the replay buffer, which a checkpoint keeps: wide groups have large ones."""

# ---- whose groups we fetch and draw, and how long we wait for them (selection.py) ----

PROVEN_AFTER = 4
"""Accepted groups that make an author a proven one: some rounds in which it was of use."""

NEWCOMER_SHARE = 0.25
"""Share of a draw that all newcomers together may have, and of the choices of whom to fetch from. Large
enough that a new node is heard within rounds, small enough that those who cost nothing cannot fill a
batch."""

DELAYED_SHARE = 0.25
"""Share of the fetches under way that may wait for newcomers; as much again may wait for slow authors."""

SLOW_S = 1.0
"""A fetch that takes longer does not occupy the place of a proven author any more: a body has about 30
KiB."""

NEWCOMER_PATIENCE_S = 2.0
"""What we wait for the body of an author that never gave us one; doubled with each failure, so that a far one
is not shut out, up to the deadline of all fetches."""

LEAST_NEED = 0.02
"""What a header of a task that we master counts beside one of a task that we always fail on: others may yet
know a better answer, and what we knew may be forgotten."""

MAX_WAIT_SHARE = 0.1
"""Share of the time of its own work that a round may wait for others."""

# ---- how much of us a peer may use ----

HEADERS_PER_S = 32.0
"""Sustained headers of one peer, half a percent of a core to hear: a round of 32 groups every second is as
fast as the demonstration policy goes, and far faster than a real model."""

PACE = 0.9
"""Share of that rate at which we announce: jitter on the way must not make honest headers too many."""

HEADERS_BURST = 64.0
"""A node announces all groups of a round at once."""

TOTAL_HEADERS_PER_S = 500.0
"""All proven authors together, and all others together: these cannot use up what those have. A header costs
0.16 ms, so this bounds listening to 16 % of a core."""

TOTAL_HEADERS_BURST = 2000.0

LATE_S = 120.0
"""A header this much older than its arrival may be a replay: gossip forgets what it has passed on by then,
and signed messages of others can be sent again by anybody. It is not taken from its author's allowance."""

LATE_HEADERS_PER_S = 16.0
"""Headers of all authors together that come so late, after a partition or from clocks that are behind."""

LATE_HEADERS_BURST = 256.0

REQUESTS_PER_S = 32.0
"""Sustained body requests of one peer: whoever may announce so much may also ask for so much."""

REQUESTS_BURST = 64.0

VAIN_ASKS_PER_S = 2.0
"""How often we ask others in vain for bodies of authors that are not proven: names of authors that nobody can
reach cost nothing. What is asked for and given is bounded by the fetches themselves."""

VAIN_ASKS_BURST = 8.0

TAKEN_PER_GIVEN = 8.0
"""Bytes that a peer may take for each that came from it, to be served as one who gives: one group of a node
is of use to several others. Nothing is free, as identities are: who has given nothing yet has its part of
what is not kept for givers."""

VAIN_DIALS_PER_S = 2.0
"""How often newcomers may be asked in vain whom we have to dial first, all together: names that announce
bodies and that nobody can reach cost nothing, and a dial with its look-up costs as much as many headers."""

VAIN_DIALS_BURST = 16

VAIN_BYTES_PER_S = 64.0 * 1024
"""Bodies that newcomers gave us and that were of no use, all together; when there were more, no newcomer is
asked until the time has made up for it."""

VAIN_BYTES_BURST = 2.0 * MAX_BODY_BYTES

MAX_BYTES_PER_TOKEN = 16
"""A compressed body has no more for each token of its answers: text has 2, noise 8. From the header alone we
see that a larger one could only hold answers too long for us."""

MAX_CHARS_PER_TOKEN = 64
"""Text with more characters per allowed token is too long without being tokenized, which would take
seconds."""

LOOK_S = 0.25
"""A wide group is judged part by part, each as large as what we train on of it, and no part is begun after
this time: so it takes the judge hardly longer than a narrow one. What is not looked at is not used."""

PLAY_S = 3.0
"""A group's episodes are played again one after the other, and none goes on after this time; nor may a single
answer of the environment take longer. What was not played to its end is not used."""

JUDGE_S_PER_S = 0.2
"""Seconds that the judge may work for strangers in each second: for proven authors together, and as much for
all others together. Turns that cost seconds took the cores from training before, and held up the rest."""

JUDGE_BURST_S = 5.0
"""A round's groups come at once: a hundred of the usual ones, or one that overruns."""

AUTHOR_JUDGE_S_PER_S = 0.1
"""The same for one author: several groups a second where they take 30 ms, one in ten seconds where they take
one."""

AUTHOR_JUDGE_BURST_S = 2.0

THRIFTY_S = 0.1
"""Authors whose groups take the judge no longer are fetched from alike; others the less often, the longer."""

UNFIT_AUTHORS = 3
"""So many different authors whose episodes overran PLAY_S, and nobody's that did not: our environment itself
is too slow for it."""

UNFIT_S = 600.0
"""So long such a task is given up; nor is one given up that fitted so lately."""

UNFIT_TRIAL_S = 60.0
"""So often one group of a task that is given up is tried all the same, for PLAY_S at most."""

MAX_STUCK_JUDGEMENTS = 4
"""Scoring threads that overran and cannot be killed; with more, nothing is judged until one returns. Of an
author on whose group a thread is stuck, nothing is fetched."""


# ---- why something was not used ----


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
"""What is not listed costs nothing."""


# ---- what an operator may set ----


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Defaults suit a node that trains on 4 own and 4 external groups a round."""

    swarm: str = "commons"
    """Nodes exchange rollouts when they name the same swarm."""
    shards: int = 1
    """Topics the swarm's headers are spread over, by task. The same number on every node of a swarm."""
    listen_shards: tuple[int, ...] | None = None
    """Shards to listen to. None: those of our own tasks, which is all that can be used."""
    publishers: Container[str] | None = None
    """Peer ids whose groups are accepted, in a private swarm. None: anyone's."""
    answers_per_group: int = 16
    """Most answers of one group of others that are kept and trained on: of a larger group those whose rewards
    differ most."""
    max_prompt_tokens: int = 4096
    """Longer prompts of others are left alone: our policy was not made for them."""
    max_completion_tokens: int = 4096
    """Longer completions of others are left alone: they would not fit into our training batch."""
    max_age_versions: int = 8
    """Oldest group still trained on, in our policy versions since its header arrived. 0: this one only."""
    max_age_s: float = 1800.0
    """Oldest header or group still used, in seconds."""
    buffer_groups: int = 256
    """Accepted external groups kept for later rounds."""
    prefetch_groups: int = 4
    """Groups fetched ahead of the round that asks for them, so that the trainer need not wait."""
    fetch_concurrency: int = 4
    """Bodies fetched at the same time, at most one per author."""
    patience_s: float = 0.2
    """How long `collect` waits for a first announcement when nothing is on its way."""
    fetch_timeout_s: float = 10.0
    """What a slow or silent peer may cost, and no more."""
    score_timeout_s: float = 20.0
    """Redrawing, tokenizing and scoring of one group."""
    store_bytes: int = 64 * 1024 * 1024
    """Memory for bodies that others may still ask for."""
    upload_bytes_per_s: float = 2 * 1024 * 1024
    """Bodies served to all peers together."""
    private: bool = False
    """Nothing of ours is announced; what others announce is used all the same."""

    def __post_init__(self) -> None:
        _require(
            re.fullmatch(SWARM_NAME, self.swarm), "swarm", "lower-case letters, digits, '.', '_' and '-'"
        )
        _require(self.shards >= 1, "shards", "at least 1")
        listened = self.listen_shards or ()
        _require(all(0 <= shard < self.shards for shard in listened), "listen_shards", "below shards")
        _require(
            MIN_GROUP_SIZE <= self.answers_per_group <= MAX_GROUP_SIZE,
            "answers_per_group",
            f"between {MIN_GROUP_SIZE} and {MAX_GROUP_SIZE}",
        )
        _require(self.max_prompt_tokens >= 1, "max_prompt_tokens", "at least 1")
        _require(self.max_completion_tokens >= 1, "max_completion_tokens", "at least 1")
        _require(self.max_age_versions >= 0, "max_age_versions", "0 or more")
        _require(self.max_age_s > 0, "max_age_s", "positive")
        _require(self.buffer_groups >= 1, "buffer_groups", "at least 1")
        _require(self.prefetch_groups >= 0, "prefetch_groups", "0 or more")
        _require(self.fetch_concurrency >= 1, "fetch_concurrency", "at least 1")
        _require(self.patience_s > 0, "patience_s", "positive")
        _require(self.fetch_timeout_s > 0, "fetch_timeout_s", "positive")
        _require(self.score_timeout_s > 0, "score_timeout_s", "positive")
        _require(
            self.store_bytes >= MAX_BODY_BYTES, "store_bytes", f"at least one body, {MAX_BODY_BYTES} bytes"
        )
        _require(
            self.upload_bytes_per_s >= MAX_BODY_BYTES,
            "upload_bytes_per_s",
            f"at least {MAX_BODY_BYTES} bytes",
        )


def _require(holds: object, name: str, expected: str) -> None:
    if not holds:
        raise ConfigError(f"exchange setting {name} is out of range", hint=f"it must be {expected}")


STRANGERS_TIMEOUT_S = 0.75 * ExchangeSettings().score_timeout_s
"""Limit of judging the answers of a stranger: within the exchange's deadline, which counts tokenizing as
well."""
