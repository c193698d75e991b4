"""The interface between us and any generator: token ids in, token ids and log-probabilities out.

schedule/partial_rollouts.py -> [Engine] -> decode/ (torch, CPU and any GPU) | vllm/ | testing.FakeEngine

An engine has one caller: `submit` queues requests, `step` advances everything in flight and returns the
finished outputs (an engine in another process may be further ahead), `abort` returns the rest with the tokens
so far, and `set_policy` changes the policy without losing a token. Sampled tokens are plain data: an aborted
output can be submitted again, here or after a restart, and continues where it stopped. An engine does not
know about tasks, rewards or texts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, Protocol

from swarmnode.errors import EngineError
from swarmnode.types import FinishReason, Span, Stretch, check_given, check_spans

InFlight = Literal["keep", "recompute"]
"""Treatment of requests in flight when the policy changes.

keep: they continue under the new version with their present keys and values (stale; nothing is recomputed).
recompute: they continue under the new version, with keys and values computed again.
"""

BASE_VERSION = -1
"""Version of the model without any adapter, which is always live in addition to the policy versions."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of sampling. `temperature` 0 is greedy; `seed` makes one request reproducible in any batch."""

    max_tokens: int
    """The longest completion in tokens, including those it was resumed with."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion and stay in it, in addition to the engine's own EOS tokens."""
    ignore_eos: bool = False
    """True if only `stop_token_ids` and the length end the completion: for benchmarks with forced lengths."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of one completion so far. `logprobs` has one entry per token, under the distribution the token
    was sampled from (after temperature, top-p and top-k), or under the untempered softmax if sampling is
    greedy. A token that no model sampled was certain: 0.0."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    path: tuple[int, ...] = ()
    """Stages of a pipeline in order of visit: the path is part of the policy, and further tokens are sampled
    along the same one. Empty: a whole model, or no token yet, so any path is possible."""
    given: tuple[Stretch, ...] = ()
    """Ranges of tokens that an environment inserted and nobody sampled. Their log-probabilities are 0.0;
    `spans` run across them."""

    def __post_init__(self) -> None:
        check_given(self.given, len(self.token_ids))
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens")
        check_spans(self.spans, len(self.token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def turn_start(self) -> int:
        """Index of the first token after the last inserted one."""
        return self.given[-1][1] if self.given else 0

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token. None: there is no token."""
        return min((span.version for span in self.spans), default=None)

    def extended(
        self, token_ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]
    ) -> "Sampled":
        """Returns the tokens with more sampled ones appended. `spans` count from the first token of the whole
        completion; adjacent spans of one version and kind are merged."""
        return Sampled(
            (*self.token_ids, *token_ids),
            (*self.logprobs, *logprobs),
            merged((*self.spans, *spans)),
            self.path,
            self.given,
        )

    def with_given(self, token_ids: Sequence[int]) -> "Sampled":
        """Returns the tokens with inserted ones appended, which were not sampled. At least one sampled token
        must precede them."""
        start, end = len(self), len(self) + len(token_ids)
        return replace(
            self,
            token_ids=(*self.token_ids, *token_ids),
            logprobs=(*self.logprobs, *[0.0] * len(token_ids)),
            spans=(*self.spans[:-1], replace(self.spans[-1], end=end)),
            given=(*self.given, (start, end)),
        )


NOTHING = Sampled()


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Joins neighbouring spans of one version and kind.

    >>> merged([Span(1, 0, 4), Span(1, 4, 6), Span(2, 6, 7)])
    (Span(version=1, start=0, end=6, kv='fresh'), Span(version=2, start=6, end=7, kv='fresh'))
    """
    result: list[Span] = []
    for span in spans:
        if result and (result[-1].version, result[-1].kv) == (span.version, span.kv):
            result[-1] = replace(result[-1], end=span.end)
        else:
            result.append(span)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. The caller chooses `request_id`, which must be unique among requests in
    flight."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    sampled: Sampled = NOTHING
    """Tokens sampled earlier, which the completion continues. Their keys and values are computed again
    unless they were kept (`goes_on`)."""
    version: int | None = None
    """Live version to sample from until the end. None: the newest one, through every `set_policy`."""
    priority: int = 0
    """Order in which waiting requests start: lowest number first, then order of arrival."""
    goes_on: bool = False
    """True if another request may follow whose completion begins with all of this one's, so its keys and
    values are worth keeping for a while after it stops. A hint that an engine may ignore; results are the
    same up to rounding. Kept keys and values are found by their tokens, and only used under the policy that
    computed them."""

    def resumed(self, sampled: Sampled) -> "Request":
        """Returns this request, continuing from the given tokens."""
        return replace(self, sampled=sampled)


@dataclass(frozen=True, slots=True)
class Output:
    """The whole completion of a request so far, including the tokens it was resumed with."""

    request_id: str
    sampled: Sampled
    finish: FinishReason
    kept_tokens: int = 0
    """Number of leading tokens whose keys and values had been kept when a resumed request (last) started."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.sampled.token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.sampled.logprobs

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.sampled.spans


MOST_LOGPROB = 1e-3
"""The highest log-probability that an engine may return: 0, with room for rounding in half precision."""


def check_logprobs(output: Output, engine: str) -> None:
    """Raises EngineError for an invalid log-probability, which would otherwise be trained on."""
    said = output.logprobs
    if not said or (isfinite(sum(said)) and max(said) <= MOST_LOGPROB):
        return
    for place, value in enumerate(said):
        if not (isfinite(value) and value <= MOST_LOGPROB):
            raise EngineError(
                f"the {engine} engine gave token {place} of an answer the log-probability {value}",
                hint="it must be that of the distribution the token was drawn from: finite, and at most 0",
            )


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """A policy version: the base weights plus these LoRA tensors.

    `tensors` maps PEFT state-dict names (`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`,
    shapes A [r, in] and B [out, r]) to torch tensors; the update of a weight is `scaling * B @ A`.
    No tensors at all: the base itself.
    """

    version: int
    tensors: Mapping[str, Any]
    scaling: float


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine. Callers check these, not its class."""

    name: str
    inflight: frozenset[InFlight]
    """Modes of `set_policy` that work while requests are in flight. Empty: the policy can only change when
    there are none."""
    max_versions: int
    """The most policy versions live at once, including the newest; the bare base does not count."""
    max_running: int
    """The most requests that run at once; the others wait."""
    max_length: int
    """The longest prompt and completion together, in tokens."""
    exact_resume: bool
    """True if a seeded request that is aborted and resumed draws exactly the tokens it would have drawn."""
    reserves_kv: bool = False
    """True if memory for keys and values is reserved at the start, not allocated as needed."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made, and the present load."""

    running: int
    waiting: int
    reprefilled_tokens: int
    """Tokens whose keys and values were computed again, for resumed requests and mode `recompute`."""
    kept_tokens: int
    """Tokens of resumed requests whose keys and values had been kept."""
    generated_tokens: int
    live_versions: tuple[int, ...]
    """Policy versions in use, oldest first, always including the newest."""
    swaps: int
    """Number of policies adopted through `set_policy`."""
    swap_s: float
    kv_use: float | None
    """Share of the memory for keys and values in use. None: its size is not fixed."""


class Engine(Protocol):
    """A generator for one policy. Calls block and are not thread-safe: one caller at a time."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def policy_version(self) -> int:
        """Newest version; 0 (the base) before the first `set_policy`."""
        ...

    def check(self, request: Request) -> None:
        """Raises the error of `submit` for this request, except for its id. Changes nothing."""
        ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues all requests, or none. Raises EngineError for an empty prompt, an id in flight, a version
        that is not live, or a request that cannot fit or has nothing left to sample."""
        ...

    def step(self) -> Sequence[Output]:
        """Advances the running requests, by one token each if the engine computes in this process, and
        returns the finished ones. Idle: returns ()."""
        ...

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        """Stops these requests (None: all) and returns their tokens so far, finish "abort". One that has
        finished in the meantime is returned finished. Ids that are not in flight are ignored."""
        ...

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        """Samples from another policy from now on.

        `inflight` concerns running requests without a version of their own; waiting ones simply start on the
        new policy. Requests with a version stay on it, in every mode. Keys and values of an earlier policy
        are never used for the new one except in mode "keep", whatever the version numbers are. Raises
        EngineError, changing nothing, for an adapter that does not fit the model, a mode that is not
        supported, or a version beyond `max_versions` (see `capabilities`).
        """
        ...

    def load(self, update: PolicyUpdate) -> None:
        """Makes a version live in addition to the newest, for requests that name it; it is dropped once no
        request does. Does nothing if the version is live already. Raises EngineError, changing nothing, for
        an adapter that does not fit the model or a version beyond `max_versions`."""
        ...

    def stats(self) -> EngineStats: ...

    def snapshot(self, request_ids: Iterable[str] | None = None) -> tuple[Request, ...]:
        """Returns these requests in flight (None: all) as requests that continue from their present state, in
        this or another engine. Plain data; changes nothing."""
        ...

    def sleep(self) -> Sequence[Output]:
        """Frees memory while something else needs the device: aborts everything, as `abort` does. The next
        `submit` wakes the engine."""
        ...

    def close(self) -> None:
        """Releases device, memory and processes. No other call may follow, except `close` again."""
        ...
