"""A random two-layer Qwen2 as base model, and rollout groups for it."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from swarmnode.extensions.native import compiler
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, Span, one_span

VOCABULARY = 40
EOS = 1


@pytest.fixture
def base() -> LoadedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    return LoadedModel("random", model, SimpleNamespace(eos_token_id=EOS), "fingerprint")


@pytest.fixture
def policy(base: LoadedModel) -> Policy:
    return Policy(base, PolicyConfig(lora_rank=4, lora_alpha=8), seed=0)


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds norms to float32 even in a float64 model, our layers do not: a comparison of the
    two in float64 needs norms that are not rounded on either side."""

    def norm(self: Any, x: Tensor) -> Tensor:
        exact = x if x.dtype == torch.float64 else x.float()
        rstd = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (exact * rstd).to(x.dtype)

    for name in ("llama.modeling_llama.Llama", "qwen2.modeling_qwen2.Qwen2", "qwen3.modeling_qwen3.Qwen3"):
        monkeypatch.setattr(f"transformers.models.{name}RMSNorm.forward", norm)


@pytest.fixture(params=["kernels", "torch"])
def with_and_without_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs twice: with the C kernels, and with the operations of torch in their place."""
    if request.param == "torch":
        with compiler.turned_off():
            yield
    elif compiler.library() is None:
        pytest.skip("no C compiler on this machine")
    else:
        yield


@pytest.fixture
def nudged(policy: Policy) -> Policy:
    """A policy whose adapter is not the identity any more."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


@pytest.fixture
def group() -> Callable[..., RolloutGroup]:
    def make(
        completions: Sequence[Sequence[int]],
        rewards: Sequence[float | None],
        *,
        logprobs: Sequence[Sequence[float]] | None = None,
        spans: Sequence[Sequence[Span]] | None = None,
        author: str = "me",
        prompt: str = "prompt",
        **extra: Any,
    ) -> RolloutGroup:
        key = ExampleKey("fake", "1", 0, 0)
        answers = tuple(
            Completion(
                "",
                tuple(ids),
                tuple(logprobs[i]) if logprobs else None,
                tuple(spans[i]) if spans else one_span(0, len(ids)),
                extra.get("finish", "stop"),
            )
            for i, ids in enumerate(completions)
        )
        scores = tuple({"correct": reward} for reward in rewards)
        return RolloutGroup(Example(key, prompt), answers, scores, author, 0)

    return make
