"""Decoder layers on our arithmetic: transformers' loss and gradients, and its own forward elsewhere."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from swarmnode.errors import ModelError
from swarmnode.model.adapters.lora_patch import RoutedTokens
from swarmnode.model.base_model import LoadedModel, enable_checkpointing
from swarmnode.model.dense_patch import fuse_layers, read_arguments
from swarmnode.model.layout import packed_layout
from swarmnode.model.packable import prepare_for_packing
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig

pytestmark = pytest.mark.usefixtures("exact_norms", "with_and_without_kernels")

VOCABULARY, HIDDEN, LAYERS, TOKENS = 40, 16, 2, 48
RUNS, PROMPTS = [8, 15, 10, 15], [None, 0, 0, None]
IDS = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
}
Step = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def exact_norms_of_mistral(exact_norms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norm is Llama's under another name, so it is not rounded either."""
    monkeypatch.setattr(MistralRMSNorm, "forward", LlamaRMSNorm.forward)


def a_policy(
    family: str = "qwen3", dtype: torch.dtype = torch.float64, *, beside: Policy | None = None
) -> Policy:
    """With an adapter that is not the identity, and norms and biases that are not one and zero."""
    torch.manual_seed(0 if beside is None else 1)
    base = None if beside is None else beside.base
    if base is None:
        model = FAMILIES[family]().eval().to(dtype)
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        prepare_for_packing(model)
        base = LoadedModel(family, model, SimpleNamespace(eos_token_id=1), "")
    policy = Policy(base, PolicyConfig(lora_rank=3, lora_alpha=6), seed=0, beside=beside)
    for parameter in policy.parameters:
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).to(dtype)
    return policy


def packed() -> dict[str, Any]:
    return packed_layout(RUNS, IDS.device, PROMPTS).arguments(IDS)


def rows() -> dict[str, Any]:
    return {"input_ids": IDS.view(2, -1), "use_cache": False}


def step(policy: Policy, arguments: dict[str, Any] | None = None) -> Step:
    policy.peft_model.zero_grad(set_to_none=True)
    arguments = packed() if arguments is None else arguments
    logits = policy.model(**arguments).logits
    wide = logits.double() if logits.dtype == torch.bfloat16 else logits
    loss = nn.functional.cross_entropy(wide.flatten(0, 1), IDS.flatten())
    loss.backward()
    named = policy.peft_model.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same(ours: Step, theirs: Step, bound: float = 1e-9) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=bound, atol=bound)
    assert ours[1].keys() == theirs[1].keys() and theirs[1]
    for name, gradient in theirs[1].items():
        distance = (ours[1][name].double() - gradient.double()).norm() / gradient.double().norm()
        assert distance <= bound, (name, float(distance))


@contextmanager
def theirs_of(model: Any) -> Iterator[None]:
    """Has the layers of a model compute as those of their class do."""
    kept = [vars(layer).pop("forward") for layer in model.model.layers]
    yield
    for layer, forward in zip(model.model.layers, kept, strict=True):
        layer.forward = forward


@pytest.fixture
def dense_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every layer that our arithmetic has computed."""
    import swarmnode.model.dense_patch as patch

    original, calls = patch.out_of_attention, []

    def call(attended: Tensor, *others: Any) -> Tensor:
        calls.append(len(attended))
        return original(attended, *others)

    monkeypatch.setattr(patch, "out_of_attention", call)
    return calls


@pytest.mark.parametrize("arguments", [packed, rows])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_every_gradient_are_those_of_transformers(
    family: str,
    dtype: torch.dtype,
    bound: float,
    arguments: Callable[[], dict[str, Any]],
    dense_calls: list[int],
) -> None:
    policy = a_policy(family, dtype)
    theirs = step(policy, arguments())
    policy.fuse()
    assert_same(step(policy, arguments()), theirs, bound)
    assert dense_calls == [TOKENS] * LAYERS


@pytest.mark.parametrize("family", list(FAMILIES))
def test_products_of_onednn_give_the_same_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = a_policy(family, torch.float32)
    theirs = step(policy)
    policy.fuse()
    monkeypatch.setattr("swarmnode.model.dense_layer.ONEDNN_FROM", 0)
    assert_same(step(policy), theirs, 1e-5)


def test_bfloat16_is_as_close_to_the_exact_gradient_as_transformers_is() -> None:
    policy = a_policy("qwen3", torch.bfloat16)
    theirs = step(policy)
    policy.fuse()
    ours = step(policy)
    policy.model.double()
    exact = step(policy)

    def distance(found: Step) -> float:
        pairs = [(found[1][name].double(), gradient) for name, gradient in exact[1].items()]
        return sum(float((a - b).norm() / b.norm()) for a, b in pairs)

    assert distance(ours) <= 1.1 * distance(theirs)


READ = torch.tensor([3, 7, 8, 22, 30, 47])


def step_of_what_is_read(policy: Policy, arguments: dict[str, Any]) -> Step:
    """The loss at the places READ, wherever the decoder's output has them."""
    policy.peft_model.zero_grad(set_to_none=True)
    hidden_MD = policy.model.base_model(**arguments).last_hidden_state.flatten(0, 1)
    logits_RV = policy.model.lm_head(hidden_MD if len(hidden_MD) == len(READ) else hidden_MD[READ])
    loss = nn.functional.cross_entropy(logits_RV, IDS.flatten()[READ])
    loss.backward()
    named = policy.peft_model.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("arguments", [packed, rows])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_last_layer_is_computed_where_it_is_read_and_gradients_are_the_same(
    family: str, arguments: Callable[[], dict[str, Any]], dense_calls: list[int]
) -> None:
    policy = a_policy(family)
    policy.fuse()
    whole = step_of_what_is_read(policy, arguments())
    assert_same(step_of_what_is_read(policy, arguments() | read_arguments(policy.model, READ)), whole)
    assert dense_calls == [TOKENS] * (2 * LAYERS - 1) + [len(READ)]


def test_a_decoder_whose_last_layer_is_transformers_own_is_not_told_what_is_read() -> None:
    assert read_arguments(a_policy().model, READ) == {}


def test_float32_adapters_on_a_bfloat16_base_get_float32_gradients() -> None:
    policy = a_policy("qwen2", torch.bfloat16)
    for parameter in policy.parameters:
        parameter.data = parameter.data.float()
    theirs = step(policy)
    policy.fuse()
    ours = step(policy)
    assert_same(ours, theirs, 0.1)
    assert {gradient.dtype for gradient in ours[1].values()} == {torch.float32}


def test_the_gradient_of_the_input_goes_on_to_what_made_it(dense_calls: list[int]) -> None:
    policy = a_policy()

    def of_input() -> Tensor:
        embedded = policy.model.get_input_embeddings()(IDS).detach().requires_grad_()
        arguments = packed()
        del arguments["input_ids"]
        out = policy.model.base_model(inputs_embeds=embedded, **arguments).last_hidden_state
        out.square().sum().backward()
        assert embedded.grad is not None
        return embedded.grad

    theirs = of_input()
    policy.fuse()
    torch.testing.assert_close(of_input(), theirs, rtol=1e-9, atol=1e-9)
    assert dense_calls


def test_layers_that_are_computed_again_give_the_same_gradients(dense_calls: list[int]) -> None:
    policy = a_policy()
    policy.fuse()
    kept = step(policy)
    assert enable_checkpointing(policy.model) == LAYERS
    assert_same(step(policy), kept)
    assert len(dense_calls) == 3 * LAYERS


def test_the_adapter_can_be_disabled(dense_calls: list[int]) -> None:
    policy = a_policy()
    with torch.no_grad():
        theirs = policy.model(**packed()).logits
        with policy.peft_model.disable_adapter():
            base = policy.model(**packed()).logits
        policy.fuse()
        with policy.peft_model.disable_adapter():
            assert torch.equal(policy.model(**packed()).logits, base)
        assert not dense_calls
        torch.testing.assert_close(policy.model(**packed()).logits, theirs)
    assert dense_calls


def test_a_batch_of_one_of_several_policies_is_ours_and_a_mixed_one_is_not(dense_calls: list[int]) -> None:
    first = a_policy()
    second = a_policy(beside=first)
    for policy in (first, second):
        policy.wake()
    fused = first.fuse()
    routes: Sequence[list[RoutedTokens]] = [
        [RoutedTokens(second.adapter_name, TOKENS)],
        [RoutedTokens(first.adapter_name, 20), RoutedTokens(second.adapter_name, TOKENS - 20)],
        [RoutedTokens(None, TOKENS)],
    ]
    for tokens in routes[:2]:
        with fused.route(tokens):
            ours = step(first)
            with theirs_of(first.model):
                assert_same(ours, step(first))
    assert len(dense_calls) == LAYERS
    with torch.no_grad(), fused.route(routes[2]):
        found = first.model(**packed()).logits
    with torch.no_grad(), first.peft_model.disable_adapter():
        torch.testing.assert_close(found, first.model(**packed()).logits)
    assert len(dense_calls) == LAYERS


def test_another_number_of_tokens_than_were_routed_is_refused() -> None:
    policy = a_policy()
    route = policy.fuse().route([RoutedTokens(policy.adapter_name, TOKENS - 1)])
    with pytest.raises(ModelError, match="tokens were routed"), route:
        policy.model(**packed())


def test_generation_with_a_cache_is_transformers_own(dense_calls: list[int]) -> None:
    policy = a_policy()
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    theirs = policy.model.generate(IDS, **settings)
    policy.fuse()
    assert torch.equal(policy.model.generate(IDS, **settings), theirs)
    assert not dense_calls


def test_a_hook_inside_a_layer_is_called(dense_calls: list[int]) -> None:
    policy = a_policy()
    seen: list[nn.Module] = []
    policy.model.base_model.layers[0].mlp.register_forward_hook(lambda module, *_: seen.append(module))
    policy.fuse()
    step(policy)
    assert len(seen) == 1 and not dense_calls


def test_fewer_tokens_than_features_are_left_to_transformers(dense_calls: list[int]) -> None:
    policy = a_policy()
    policy.fuse()
    policy.model(input_ids=IDS[:, : HIDDEN - 1], use_cache=False)
    assert not dense_calls
    policy.model(input_ids=IDS[:, :HIDDEN], use_cache=False)
    assert len(dense_calls) == LAYERS


def test_files_have_the_names_that_peft_gives_them(tmp_path: Path) -> None:
    policy = a_policy()
    before = set(policy.peft_model.state_dict())
    policy.fuse()
    assert set(policy.peft_model.state_dict()) == before
    policy.peft_model.save_pretrained(tmp_path, save_embedding_layers=False)
    saved = policy.adapter()
    for parameter in policy.parameters:
        parameter.data.zero_()
    policy.load_adapter(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in policy.adapter().items())


class OtherNorm(nn.RMSNorm):
    """Not the one that the family has."""


def test_what_is_not_exactly_known_keeps_its_forward_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    odd = FAMILIES["qwen3"]()
    odd.model.layers[1].input_layernorm = OtherNorm(HIDDEN)
    assert fuse_layers(odd) == 0 and "its input_layernorm is a OtherNorm" in caplog.text
    gelu = Qwen2ForCausalLM(Qwen2Config(**SIZES, hidden_act="gelu"))
    assert fuse_layers(gelu) == 0 and "its activation is gelu" in caplog.text
    assert fuse_layers(nn.Linear(2, 2)) == 0 and "not known here" in caplog.text
    assert all("forward" not in vars(module) for module in [*odd.modules(), *gelu.modules()])
