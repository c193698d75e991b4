"""A request in vLLM: its form there, and its tokens so far."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from swarmnode.extensions.vllm.vllm_policies import Lane, LoadedPolicy
from swarmnode.rollout.engine import Request, Sampled
from swarmnode.types import Span


@dataclass(slots=True)
class Row:
    """A request in vLLM."""

    request: Request
    key: str
    """Its number among all started requests, as text."""
    lane: Lane
    policy: LoadedPolicy
    """The policy of its newest tokens."""
    kv: Literal["fresh", "stale"] = "fresh"
    tokens: list[int] = field(default_factory=list[int])
    """Tokens sampled since it started or was resumed."""
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[Span] = field(default_factory=list[Span])
    """Spans of earlier policies."""
    kept_tokens: int = 0
    """Number of leading tokens that vLLM had cached when the request was resumed."""

    @property
    def follows(self) -> bool:
        return self.request.version is None

    @property
    def done(self) -> int:
        return len(self.request.sampled) + len(self.tokens)

    def move_to(self, policy: LoadedPolicy) -> None:
        """Samples from another policy from here on, using the keys and values of the current one."""
        self.spans = self._all_spans()
        self.policy, self.kv = policy, "stale"

    def sampled(self) -> Sampled:
        return self.request.sampled.extended(self.tokens, self.logprobs, self._all_spans())

    def _all_spans(self) -> list[Span]:
        start = self.spans[-1].end if self.spans else len(self.request.sampled)
        if start == self.done:
            return self.spans
        return [*self.spans, Span(self.policy.version, start, self.done, self.kv)]


def core_request(row: Row, eos_token_ids: tuple[int, ...]) -> Any:
    """Returns a row as vLLM's `EngineCoreRequest`. Its adapter must be loaded already; the adapter's folder
    is gone. Only our end tokens count, none from the model's files."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest

    request, sampling, adapter = row.request, row.request.sampling, row.lane.adapter
    done = len(request.sampled)
    return EngineCoreRequest(
        request_id=row.key,
        external_req_id=row.key,
        prompt_token_ids=[*request.prompt_ids, *request.sampled.token_ids],
        mm_features=None,
        sampling_params=VllmSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=None if sampling.seed is None else segment_seed(sampling.seed, done),
            max_tokens=sampling.max_tokens - done,
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)],
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        ),
        pooling_params=None,
        # This only sets the order. If two requests do not both fit, the one with the higher priority number
        # gives way, or else the later one.
        arrival_time=float(row.key),
        lora_request=None if adapter is None else LoRARequest(str(adapter), adapter, "loaded"),
        # Keys and values are shared only with those of the same salt.
        cache_salt=row.lane.policy.salt,
        data_parallel_rank=None,
        priority=request.priority,
    )


def segment_seed(seed: int, tokens_done: int) -> int:
    """Returns the seed for a request that continues after this many tokens: vLLM would restart its stream."""
    digest = hashlib.blake2b(f"{seed}/{tokens_done}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
