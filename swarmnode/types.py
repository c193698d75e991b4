"""The types that all folders share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal

from swarmnode.chat import Message, Prompt, Said, messages_of, turns_of

FinishReason = Literal["stop", "length", "abort"]
"""Reason for the end of a completion. stop: the policy ended its answer (EOS or a stop token); length: it ran
out of tokens; abort: we cut it."""

Scores = Mapping[str, float | None]
"""Named rewards of one completion. None means "not scored", which is not zero."""

MIN_REWARD_SPREAD = 1e-6
"""Least standard deviation of rewards that differ; anything below is rounding."""

FULL_MARGIN = 0.05
"""Share of the distance from rewards that teach nothing to the best reward that an answer may lack and still
have full marks."""


@dataclass(frozen=True, slots=True)
class ExampleKey:
    """The name by which any node can draw an example again from its own copy of the task."""

    task: str
    version: str
    seed: int
    index: int


@dataclass(frozen=True, slots=True)
class Example:
    """One question, with the columns that its reward functions need."""

    key: ExampleKey
    prompt: Prompt
    """Question: a text, or a conversation (chat.py)."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Every other dataset column (`answer`, ...), passed to reward functions by name, as in TRL."""
    conversational: bool = False
    """True if the task gave its prompt as messages; its rewards then get prompts and completions as messages
    too."""

    @property
    def messages(self) -> list[Message]:
        """Returns the prompt as a conversation; a text is a message of the user."""
        return messages_of(self.prompt)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a completion, all sampled by one policy version."""

    version: int
    start: int
    end: int
    kv: Literal["fresh", "stale"] = "fresh"
    """State of the keys and values. stale: those of earlier tokens were partly computed by an older version.
    The recorded log-probabilities are exact even so: they come from the process that sampled."""


def one_span(version: int, tokens: int) -> tuple[Span, ...]:
    """Returns the spans of `tokens` tokens that one version sampled.

    >>> one_span(3, 5), one_span(3, 0)
    ((Span(version=3, start=0, end=5, kv='fresh'),), ())
    """
    return (Span(version, 0, tokens),) if tokens else ()


def check_spans(spans: Sequence[Span], tokens: int) -> None:
    """Raises ValueError unless `spans` cover `tokens` tokens without a gap, an overlap or an empty span."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise ValueError(f"{span} does not continue at token {end}")
        end = span.end
    if end != tokens:
        raise ValueError(f"spans cover {end} of {tokens} tokens")


Stretch = tuple[int, int]
"""Tokens [start, end) of a completion."""


def check_given(given: Sequence[Stretch], tokens: int) -> None:
    """Raises ValueError unless these stretches of `tokens` tokens are in order, disjoint and not empty."""
    last = 0
    for start, end in given:
        if not last <= start < end <= tokens:
            raise ValueError(f"tokens {start} to {end} of {tokens} cannot be the environment's")
        last = end


def sampled_places(tokens: int, given: Sequence[Stretch]) -> Sequence[int]:
    """Returns the indices among `tokens` tokens that a policy sampled; the `given` ones were inserted.

    >>> list(sampled_places(6, [(1, 3), (4, 5)]))
    [0, 3, 5]
    """
    if not given:
        return range(tokens)
    starts, ends = [0, *(end for _, end in given)], [*(start for start, _ in given), tokens]
    return [place for start, end in zip(starts, ends, strict=True) for place in range(start, end)]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. `token_ids` include the EOS token when `finish` is "stop"."""

    said: Said
    """A text of the policy, or in an environment the turns of both sides."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """Log-probability of each token under the distribution it was sampled from. None: a stranger's answer."""
    spans: tuple[Span, ...]
    """Policy version that sampled each token. Together the spans cover `token_ids`."""
    finish: FinishReason
    path: tuple[int, ...] = ()
    """Stages of the pipeline that sampled it, in the order visited: its log-probabilities are those of this
    path, and it must be trained along the same path. Empty: a whole model. Never leaves the node."""
    given: tuple[Stretch, ...] = ()
    """Tokens that an environment wrote between two turns of the policy, which reads them but is not trained
    on them. Their log-probabilities are 0.0, and `spans` include them."""
    broken_off: bool = False
    """True if its environment was lost midway, so that it has no reward."""

    def __post_init__(self) -> None:
        check_spans(self.spans, len(self.token_ids))
        check_given(self.given, len(self.token_ids))

    @property
    def text(self) -> str:
        """Everything that the policy said."""
        return "".join(turn.said for turn in turns_of(self.said))

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self.token_ids) - sum(end - start for start, end in self.given)

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled a token. None: there is no token."""
        return min((span.version for span in self.spans), default=None)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """One example with G completions and their scores: the unit of exchange and of training."""

    example: Example
    completions: tuple[Completion, ...]
    scores: tuple[Scores, ...]
    author: str
    """Peer id of the node that sampled the completions."""
    policy_version: int
    """The author's policy version when the group was complete. Versions of different authors cannot be
    compared."""

    def __post_init__(self) -> None:
        if len(self.completions) != len(self.scores):
            raise ValueError(f"{len(self.completions)} completions but {len(self.scores)} scores")

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Total reward per completion, shape [G]."""
        return tuple(total_reward(scores) for scores in self.scores)

    @property
    def reward_mean(self) -> float | None:
        """Mean of the scored rewards, None when nothing was scored."""
        return mean_or_none(self.rewards)

    @property
    def reward_std(self) -> float | None:
        """Population standard deviation of the scored rewards, None when nothing was scored."""
        scored = [r for r in self.rewards if r is not None]
        return spread_of(scored) if scored else None

    @property
    def has_gradient(self) -> bool:
        """True if the rewards differ, so that the group has something to teach."""
        return has_gradient(self.rewards)


def has_gradient(rewards: Sequence[float | None]) -> bool:
    """Returns True if the scored rewards differ. Otherwise all advantages are zero, and so is the gradient.

    >>> has_gradient([1.0, 0.0, None]), has_gradient([0.5, 0.5]), has_gradient([1.0, None])
    (True, False, False)
    """
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) >= 2 and spread_of(scored) >= MIN_REWARD_SPREAD


def total_reward(scores: Scores) -> float | None:
    """Returns the weighted sum of the named rewards that were scored, or None if none was.

    >>> total_reward({"correct": 1.0, "format": None}), total_reward({"correct": 1.0, "format*0.5": 0.5})
    (1.0, 1.25)
    """
    scored = [weight_of(name) * value for name, value in scores.items() if value is not None]
    return float(sum(scored)) if scored else None


def fully_scored(scores: Sequence[Scores]) -> list[bool]:
    """Returns, for each answer of a group, False if no reward of it is known, or one is unknown that another
    answer has. A judge that had no time for a reward finds another total than a judge that had.

    >>> fully_scored([{"tests": 1.0, "format": 0.5}, {"tests": None, "format": 0.5}, {}])
    [True, False, False]
    """
    known = {name for named in scores for name, value in named.items() if value is not None}
    return [
        total_reward(named) is not None and not any(named[name] is None for name in named.keys() & known)
        for named in scores
    ]


WEIGHT_MARK = "*"
"""Separator of a reward's name and its weight, so that scores always carry their weights."""


@lru_cache(maxsize=1024)
def weight_of(name: str) -> float:
    """Returns the weight of a reward, which ends its name if it is not 1.

    >>> weight_of("format*0.5"), weight_of("format")
    (0.5, 1.0)
    """
    try:
        weight = float(name.partition(WEIGHT_MARK)[2] or 1.0)
    except ValueError:
        return 1.0
    return weight if math.isfinite(weight) else 1.0


def by_reward(scores: Iterable[Scores]) -> dict[str, list[float]]:
    """Returns the unweighted values of each reward by name, without unknown ones.

    >>> by_reward([{"correct": 1.0, "format*0.5": None}, {"correct": 0.0, "format*0.5": 1.0}])
    {'correct': [1.0, 0.0], 'format': [1.0]}
    """
    found: dict[str, list[float]] = {}
    for named in scores:
        for name, value in named.items():
            if value is not None:
                found.setdefault(name.partition(WEIGHT_MARK)[0], []).append(value)
    return found


def spread_of(values: Sequence[float]) -> float:
    """Returns the population standard deviation. `statistics.pstdev` computes with fractions and takes twenty
    times as long.

    >>> spread_of([1.0, 0.0, 1.0, 0.0])
    0.5
    """
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the known values, or None if none is known: zero would be a measurement."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
