"""The seam between us and any generator: token ids in, token ids and log-probabilities out.

collector -> [Engine] -> embedded.py (torch, CPU and any GPU) | testing.FakeEngine

An engine is driven, never runs by itself: `submit` queues, `step` advances everything in flight by one token
and hands out what finished, `abort` returns the rest as far as it came. It holds no task, no reward, no text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swarmnode.types import FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy; `seed` makes one request reproducible in any batch."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion and stay in it. The engine's own EOS tokens are always among them."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. `request_id` is the caller's and must be unique among those in flight."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Output:
    """What an engine produced for a request. `logprobs` has one entry per token, under the distribution the
    token was sampled from (after temperature, top-p and top-k). Greedy: under the untempered softmax."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    finish: FinishReason


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
class EngineStats:
    """Counters since the engine was made."""

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    generation_s: float


class Engine(Protocol):
    """A generator for one policy. Calls are blocking and not thread-safe: one caller at a time."""

    @property
    def policy_version(self) -> int: ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises EngineError for an empty prompt, a duplicate id, one that cannot fit."""
        ...

    def step(self) -> Sequence[Output]:
        """Advance every running request by one token; return the finished ones. Idle: returns ()."""
        ...

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        """Stop these requests (all when None) and return their tokens so far, finish "abort"."""
        ...

    def set_policy(self, update: PolicyUpdate) -> None:
        """Sample from another policy version from now on. Raises EngineError while requests are in flight."""
        ...

    def stats(self) -> EngineStats: ...
