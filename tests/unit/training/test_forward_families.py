"""What an adapter learns from, family by family: transformers' log-probabilities, and PEFT's gradients.

Whichever way a model is computed in training (our dense layers or transformers', packed or padded rows, the
head in chunks), one sample at a time through plain transformers and stock PEFT is what it has to equal.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.families.family import FAMILIES
from swarmnode.model import dense_patch
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample
from tests.families import DENSE, TOY, ToyConfig, ToyForCausalLM, dense

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
TEMPERATURE = 0.9
LLAMAS_LAYERS = {"llama", "qwen2", "qwen3", "mistral"}
"""Families whose layers training computes itself."""
PADDED = {"gemma2"}
"""Families that packed attention does not compute: it caps no scores."""

Learned = tuple[list[Tensor], dict[str, Tensor]]
"""The log-probabilities of each sample, and the gradients of the adapter."""


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, 61, (count,), generator=generator).tolist())


def samples() -> list[TrainingSample]:
    """Prompts and completions far longer than the windows, two of them behind one prompt."""
    sizes = [(30, 41, 0), (30, 12, 0), (3, 60, 1), (17, 1, 2), (1, 25, 3)]
    return [
        TrainingSample(tokens(before, prompt), tokens(after, 9 + number), 1.0, None, ())
        for number, (before, after, prompt) in enumerate(sizes)
    ]


def a_policy(build: Callable[[], Any]) -> Policy:
    """With an adapter that is not the identity, on a base in which nothing is zero or one."""
    torch.manual_seed(5)
    model = build().eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data.copy_(noise * 0.15 if parameter.ndim == 2 else parameter + noise * 0.2)
    base = LoadedModel("random", model, SimpleNamespace(eos_token_id=1), "")
    policy = Policy(base, PolicyConfig(lora_rank=3, lora_alpha=6), seed=0)
    for parameter in policy.parameters:
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return policy


def weighted(logprobs_N: Tensor) -> Tensor:
    """A loss in which each place has a weight of its own."""
    return (logprobs_N * torch.linspace(0.5, 1.5, len(logprobs_N))).sum()


def by_stock_peft(policy: Policy) -> Learned:
    """One sample at a time, by transformers' eager attention and PEFT's own forward."""
    stock = copy.deepcopy(policy.peft_model)
    stock.get_base_model().set_attn_implementation("eager")
    found: list[Tensor] = []
    for sample in samples():
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        logits = stock(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        chosen = torch.tensor(sample.completion_ids)[:, None]
        logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(1, chosen)[:, 0]
        weighted(logprobs).backward()
        found.append(logprobs.detach())
    gradients = {n.replace(".default.", "."): p.grad for n, p in stock.named_parameters() if ".lora_" in n}
    return found, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def by_forward(policy: Policy, *, packed: bool) -> Learned:
    """As a node trains; `packed` says how its rows must come."""
    forward = Forward(policy, TrainingConfig(), temperature=TEMPERATURE)
    found: dict[TrainingSample, Tensor] = {}
    for batch in forward.batches(samples()):
        assert (batch.layout is not None) == packed
        with forward.policies_of(batch):
            rows = forward.logprobs(batch).logprobs_N.split(batch.completion_lengths)
            torch.stack([weighted(row) for row in rows]).sum().backward()
        found |= {sample: row.detach() for sample, row in zip(batch.samples, rows, strict=True)}
    gradients = {name: p.grad for name, p in policy.trainable().items()}
    return [found[sample] for sample in samples()], {n: g for n, g in gradients.items() if g is not None}


@pytest.fixture
def own_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every layer that our dense layers have computed."""
    original, calls = dense_patch.out_of_attention, []

    def call(attended: Tensor, *others: Any) -> Tensor:
        calls.append(len(attended))
        return original(attended, *others)

    monkeypatch.setattr(dense_patch, "out_of_attention", call)
    return calls


def assert_same(found: Learned, expected: Learned) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    assert found[1].keys() == expected[1].keys() and found[1]
    for name, theirs in expected[1].items():
        assert (found[1][name] - theirs).norm() <= 1e-4 * theirs.norm(), name


@pytest.mark.usefixtures("with_and_without_kernels")
@pytest.mark.parametrize("family", list(DENSE))
def test_what_is_learned_from_is_that_of_transformers_and_peft(family: str, own_layers: list[int]) -> None:
    policy = a_policy(lambda: dense(family, **SIZES))
    expected = by_stock_peft(policy)
    assert_same(by_forward(policy, packed=family not in PADDED), expected)
    assert bool(own_layers) == (family in LLAMAS_LAYERS)


@pytest.mark.parametrize("known", [True, False], ids=["with a record", "without"])
def test_a_family_of_ones_own_has_our_layers_once_it_has_a_record(
    known: bool, own_layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if known:
        monkeypatch.setitem(FAMILIES, "toy", TOY)
    policy = a_policy(lambda: ToyForCausalLM(ToyConfig(**SIZES)))
    expected = by_stock_peft(policy)
    assert_same(by_forward(policy, packed=True), expected)
    assert bool(own_layers) == known
