"""The settings, counters and length estimates of the partial-rollout scheduler, and its state in a
checkpoint."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from swarmnode.errors import CheckpointError, ConfigError
from swarmnode.rollout.engine import InFlight, Sampled
from swarmnode.rollout.schedule.group import OpenCompletion, OpenGroup
from swarmnode.types import Example, ExampleKey, Span


@dataclass(frozen=True, slots=True)
class PartialSettings:
    """The settings of a round.

    >>> PartialSettings("refill", groups=4, group_size=8, max_lag=8).round_requests
    32
    """

    mode: Literal["refill", "april", "sync"]
    groups: int
    """N: number of groups that a round hands out."""
    group_size: int
    max_lag: int
    """K: age in versions of the oldest token that may be handed out, counted back from the newest policy."""
    over_provision: float = 2.0
    """r: number of groups that a round of "april" starts, in units of N."""
    concurrency: int | None = None
    """C: number of requests that "refill" keeps in the engine. None: chosen from the cost of a step
    (concurrency.py)."""
    inflight: InFlight = "keep"
    """Treatment of requests in flight at a new policy; the nearest one if the engine cannot do it."""
    in_turn: bool = True
    """True if "refill" begins with groups in the order in which they were drawn (under_way.py). Without it,
    its first rounds are of short answers: for comparison."""

    def __post_init__(self) -> None:
        if min(self.groups, self.group_size, 1 if self.concurrency is None else self.concurrency) < 1:
            raise ConfigError(
                "a round needs at least one group, of one completion, and one request at a time"
            )
        if self.max_lag < 0 or not 1 <= self.over_provision < float("inf"):
            raise ConfigError(
                f"max_lag {self.max_lag} with over_provision {self.over_provision} is not possible",
                hint="max_lag is at least 0, over_provision at least 1",
            )

    @property
    def groups_ahead(self) -> int:
        """Most groups that may be open beyond those that the round still has to hand out (under_way.py)."""
        if self.mode == "refill":
            return self.max_lag * self.groups
        return round((self.over_provision - 1) * self.groups) if self.mode == "april" else 0

    @property
    def round_requests(self) -> int:
        """Number of completions that a round hands out."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class PartialStats:
    """The state of the scheduler, with counters since it was made. None: not measured yet."""

    groups_in_flight: int
    """Groups begun and not complete."""
    groups_not_begun: int
    """Groups drawn, without any request yet."""
    surplus_groups: int
    """Groups complete and kept for the next round."""
    concurrency: int
    step_base_s: float | None
    step_per_request_s: float | None
    dropped_stale: int
    """Groups that were older than `max_lag` allows and began again from scratch."""
    dropped_not_redrawable: int
    """Groups of a checkpoint whose example could not be drawn again."""
    refused: int
    """Examples that the engine refused."""
    resumed_requests: int
    """Requests that went to the engine with tokens."""
    idle_share: float | None
    """Share of the wanted slots in which nothing ran, over all steps."""
    mean_tokens_produced: float | None
    mean_tokens_trained: float | None
    """Mean tokens of handed-out completions. Below `mean_tokens_produced`: long answers are still under
    way."""


@dataclass(slots=True)
class RunningMean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, count: int = 1) -> None:
        """Adds `count` values whose sum is `value`."""
        self.total += value
        self.count += count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class PartialCounters:
    """The scheduler's counters, for its stats."""

    dropped_stale: int = 0
    dropped_not_redrawable: int = 0
    refused: int = 0
    refused_in_a_row: int = 0
    resumed: int = 0
    busy: RunningMean = field(default_factory=RunningMean)
    """Running requests per wanted slot."""
    produced: RunningMean = field(default_factory=RunningMean)
    """Tokens per completion."""
    trained: RunningMean = field(default_factory=RunningMean)


# ---- how long the answers to a prompt will be ----

NEWEST_SHARE = 0.5
"""Weight of the newest group in a prompt's average: the policy changes, and its answers with it."""
NEWEST_SHARE_OF_TASK = 0.1
"""Weight of the newest length in a task's average, where single prompts differ much more."""
MAX_PROMPTS = 4096
MAX_TASKS = 256


class LengthEstimates:
    """Expected completion lengths in tokens.

    >>> from swarmnode.types import ExampleKey
    >>> short = Example(ExampleKey("sums", "1", 0, 0), "1+1")
    >>> long = Example(ExampleKey("sums", "1", 0, 1), "9*9")
    >>> lengths = LengthEstimates()
    >>> lengths.observe(short, 5), lengths.observe(long, 50)
    (None, None)
    >>> [example.prompt for example in lengths.longest_first([short, long])]
    ['9*9', '1+1']
    """

    def __init__(self, prompts: Mapping[str, float] | None = None, tasks: Mapping[str, float] | None = None):
        """`prompts` and `tasks`: averages to begin with; empty by default."""
        self._prompts = _Averages(prompts or {}, MAX_PROMPTS, NEWEST_SHARE)
        self._tasks = _Averages(tasks or {}, MAX_TASKS, NEWEST_SHARE_OF_TASK)

    def observe(self, example: Example, mean_tokens: float) -> None:
        """Records the mean length of a group of completions."""
        self._prompts.observe(_prompt_digest(example), mean_tokens)
        self._tasks.observe(example.key.task, mean_tokens)

    def expected_tokens(self, example: Example) -> float | None:
        """Returns the expected length in tokens. None: neither the prompt nor its task was answered
        before."""
        own = self._prompts.values.get(_prompt_digest(example))
        return self._tasks.values.get(example.key.task) if own is None else own

    def longest_first(self, examples: Sequence[Example]) -> list[Example]:
        """Returns the examples in the order in which they should start; equal ones as they came. An unknown
        length comes first: it may be long, and is worth knowing."""

        def shortness(example: Example) -> float:
            expected = self.expected_tokens(example)
            return -math.inf if expected is None else -expected

        return sorted(examples, key=shortness)

    @property
    def prompts(self) -> Mapping[str, float]:
        """Averages by digest of the prompt, the longest unseen first."""
        return self._prompts.values

    @property
    def tasks(self) -> Mapping[str, float]:
        return self._tasks.values


class _Averages:
    """Exponential moving averages by name, of at most `size` names."""

    def __init__(self, values: Mapping[str, float], size: int, newest_share: float) -> None:
        self.values = OrderedDict(values)
        self._size = size
        self._newest_share = newest_share

    def observe(self, name: str, value: float) -> None:
        before = self.values.get(name, value)
        self.values[name] = before + self._newest_share * (value - before)
        self.values.move_to_end(name)
        if len(self.values) > self._size:
            self.values.popitem(last=False)


def _prompt_digest(example: Example) -> str:
    return hashlib.blake2b(example.prompt.encode(), digest_size=8).hexdigest()


# ---- unfinished groups as bytes ----

FORMAT: Literal[1] = 1
"""Number of the state's format, raised with every change of the records below. Other formats are refused."""

MAX_GROUP_SIZE = 4096
"""Most members of a group, more than any has: a damaged file must not ask for endless memory."""

MAX_STAGES = 64
"""Most stages on a token's path, as many as a micro-batch visits (the pipeline's hop_messages.py)."""

Stage = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
_Message = tuple[str, str]


class _Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    start: int
    end: int
    kv: Literal["fresh", "stale"]


class _Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float, ...]
    spans: tuple[_Span, ...]
    finish: Literal["stop", "length"] | None
    path: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    """Path through a pipeline. Older states have none: theirs are whole models."""
    given: tuple[tuple[TokenId, TokenId], ...] = ()
    """Ranges of inserted tokens. States from before environments existed end before it."""
    observed: tuple[tuple[_Message, ...], ...] = ()
    stands: Literal["", "asking", "broken off"] = ""


class _Group(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    task: str
    version: str
    seed: int
    index: int
    members: Annotated[tuple[_Member, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUP_SIZE)]


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    groups: tuple[_Group, ...]
    prompt_lengths: Annotated[dict[str, Length], msgspec.Meta(max_length=MAX_PROMPTS)]
    task_lengths: Annotated[dict[str, Length], msgspec.Meta(max_length=MAX_TASKS)]
    may_stay_behind: Length | None = None
    """Groups that may stay behind. Older states have none: their groups had no such bound."""


class SavedState(msgspec.Struct, frozen=True):
    """The checked contents of a state."""

    groups: Sequence[tuple[ExampleKey, list[OpenCompletion]]]
    lengths: LengthEstimates
    may_stay_behind: float | None
    """Number of groups that may stay behind younger ones (under_way.py). None: not recorded."""


def encode(
    groups: Iterable[OpenGroup],
    in_engine: Mapping[str, Sampled],
    lengths: LengthEstimates,
    may_stay_behind: float,
) -> bytes:
    """`in_engine`: the tokens so far of requests in the engine, by request id. `may_stay_behind`: a number of
    groups."""
    begun = tuple(_group(group, in_engine) for group in groups)
    state = _State(FORMAT, begun, dict(lengths.prompts), dict(lengths.tasks), may_stay_behind)
    return msgspec.msgpack.encode(state)


def decode(state: bytes) -> SavedState:
    """Returns the contents of a state. Raises CheckpointError if it is damaged, of another format, or no
    state at all."""
    try:
        found = msgspec.msgpack.decode(state, type=_State)
        groups = [_checked(group) for group in found.groups]
    # Sampled and its spans check themselves with ValueErrors, and so does UTF-8.
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(
            f"the unfinished rollouts in this checkpoint cannot be read: {error}",
            hint="start over with --fresh (nothing is deleted)",
        ) from error
    lengths = LengthEstimates(found.prompt_lengths, found.task_lengths)
    return SavedState(groups, lengths, found.may_stay_behind)


def _group(group: OpenGroup, in_engine: Mapping[str, Sampled]) -> _Group:
    key = group.example.key
    members = tuple(
        _member(in_engine.get(group.request_id(place), member.sampled), member)
        for place, member in enumerate(group.members)
    )
    return _Group(key.task, key.version, key.seed, key.index, members)


def _member(sampled: Sampled, member: OpenCompletion) -> _Member:
    spans = tuple(_Span(span.version, span.start, span.end, span.kv) for span in sampled.spans)
    observed = tuple(
        tuple((message["role"], message["content"]) for message in messages) for messages in member.observed
    )
    stands = "asking" if member.asking else "broken off" if member.broken_off else ""
    return _Member(
        sampled.token_ids,
        sampled.logprobs,
        spans,
        member.finish,
        sampled.path,
        sampled.given,
        observed,
        stands,
    )


def _checked(group: _Group) -> tuple[ExampleKey, list[OpenCompletion]]:
    key = ExampleKey(group.task, group.version, group.seed, group.index)
    return key, [_checked_member(member) for member in group.members]


def _checked_member(member: _Member) -> OpenCompletion:
    if not all(map(math.isfinite, member.logprobs)):
        raise ValueError("a log-probability is not a finite number")
    if member.finish is not None and not member.token_ids:
        raise ValueError("a completion ended before its first token")
    if len(member.observed) != len(member.given) or not all(member.observed):
        raise ValueError("what an environment said does not fit the tokens of it")
    spans = tuple(Span(span.version, span.start, span.end, span.kv) for span in member.spans)
    observed = tuple(
        tuple({"role": role, "content": content} for role, content in messages)
        for messages in member.observed
    )
    return OpenCompletion(
        Sampled(member.token_ids, member.logprobs, spans, member.path, member.given),
        member.finish,
        observed,
        asking=member.stands == "asking",
        broken_off=member.stands == "broken off",
    )
