"""A family is one record: what a new one takes, and that nothing unknown about a model is passed over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from swarmnode.extensions.generate.generate_engine import GenerateEngine
from swarmnode.extensions.native import compiler
from swarmnode.families.family import FAMILIES, Family, longest_sequence_of
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.decode.weights import longest_sequence, unsupported_reason
from swarmnode.rollout.engine import Output, Request
from swarmnode.rollout.engine_choice import make_engine
from tests.families import DENSE, TOY, ToyConfig, ToyForCausalLM, dense

Ask = Callable[..., Request]
Run = Callable[..., dict[str, Output]]

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """With weights that make tokens differ, and norms that are not what they begin with."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.ndim == 2 else parameter + noise * 0.2)
    return model.eval()


def assert_samples_as_transformers(
    engine: EmbeddedEngine,
    model: PreTrainedModel,
    requests: list[Request],
    run: Run,
    atol: float,
    rtol: float = 0.0,
) -> None:
    for request in requests:
        output = run(engine, [request])[request.request_id]
        with torch.no_grad():
            ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=atol, rtol=rtol)


GEMMA = Family("gemma", "Gemma", norm_offset=1.0, scales_embedding=True)
"""Gemma 1 (arXiv 2403.08295), which is not in the list."""


@pytest.mark.parametrize(
    ("family", "build"),
    [
        (TOY, lambda: ToyForCausalLM(ToyConfig(**SIZES))),
        (GEMMA, lambda: AutoModelForCausalLM.from_config(GemmaConfig(**SIZES, head_dim=16))),
    ],
    ids=["toy", "gemma"],
)
def test_a_family_is_added_by_one_record(
    family: Family,
    build: Callable[[], PreTrainedModel],
    ask: Ask,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, model = family.model_type, lively(build())
    engine, reason = make_engine(model, (), lora_rank=4)
    assert isinstance(engine, GenerateEngine) and f"{name} is not one of" in reason
    monkeypatch.setitem(FAMILIES, name, family)
    engine, reason = make_engine(model, (), lora_rank=4)
    assert isinstance(engine, EmbeddedEngine) and f"{name} runs in our own decode loop" in reason
    assert_samples_as_transformers(engine, model, [ask(0, 9, 30), ask(1, 40, 30)], run, atol=1e-5)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("family", list(DENSE))
def test_a_long_text_is_that_of_transformers(family: str, kernels: bool, ask: Ask, run: Run) -> None:
    """Far beyond the windows, through several bands, with the C kernels and with torch's operations."""
    model = lively(dense(family, **SIZES))
    requests = [ask(0, 3, 140), ask(1, 70, 80)]
    if kernels:
        assert_samples_as_transformers(EmbeddedEngine(model, ()), model, requests, run, atol=3e-5)
        return
    with compiler.turned_off():
        assert_samples_as_transformers(EmbeddedEngine(model, ()), model, requests, run, atol=3e-5)


@pytest.mark.parametrize("family", list(DENSE))
def test_bfloat16_is_near_that_of_transformers(family: str, ask: Ask, run: Run) -> None:
    model = lively(dense(family, **SIZES)).bfloat16()
    requests = [ask(i, 5 + 9 * i, 12) for i in range(3)]
    # Both round at every layer, at different places: about three significant digits.
    assert_samples_as_transformers(EmbeddedEngine(model, ()), model, requests, run, atol=0.2, rtol=0.02)


# What is not known


def llama(**settings: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **settings))


def of(family: str, **changes: Any) -> PreTrainedModel:
    config = dense(family, **SIZES).config
    for field, value in changes.items():
        setattr(config, field, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **settings}}


def partly_rotated() -> PreTrainedModel:
    return of("phi3", **rope("default", partial_rotary_factor=0.5))


def long_rope() -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 1.0}
    original = {"original_max_position_embeddings": 32}
    return of("phi3", **original, **rope("longrope", **original, **factors))


def with_sinks() -> PreTrainedModel:
    model: Any = llama()
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    return model


def with_half_of_its_biases() -> PreTrainedModel:
    model: Any = llama(attention_bias=True)
    model.model.layers[0].self_attn.k_proj.bias = None
    return model


def with_a_biased_head() -> PreTrainedModel:
    model: Any = llama()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(61))
    return model


def without_a_norm() -> PreTrainedModel:
    model: Any = of("gemma3_text")
    del model.model.layers[2].post_feedforward_layernorm
    return model


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (partly_rotated, "only a part of each head is rotated"),
        (long_rope, "longrope depends on the sequence length"),
        (lambda: llama(**rope("dynamic", factor=2.0)), "dynamic depends on the sequence length"),
        (lambda: llama(hidden_act="relu"), "activation is relu"),
        (with_sinks, "sinks is not supported in llama"),
        (with_half_of_its_biases, "_proj.bias is not supported"),
        (with_a_biased_head, "lm_head.bias is not supported"),
        (without_a_norm, "it lacks model.layers.2.post_feedforward_layernorm.weight"),
        (lambda: of("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (lambda: of("gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (lambda: of("gemma2", _attn_implementation="sdpa"), "sdpa leaves out the cap"),
    ],
)
def test_what_is_not_known_of_a_model_sends_it_to_transformers_with_the_reason(
    build: Callable[[], PreTrainedModel], word: str
) -> None:
    model = build()
    assert word in (unsupported_reason(model) or "it is taken")
    engine, reason = make_engine(model, (), lora_rank=4)
    assert isinstance(engine, GenerateEngine) and word in reason


def test_no_sequence_is_so_long_that_others_in_its_batch_would_be_rotated_otherwise() -> None:
    assert longest_sequence(long_rope()) == 32
    assert longest_sequence(llama(**rope("dynamic", factor=2.0))) == SIZES["max_position_embeddings"]
    assert longest_sequence(of("gemma3_text")) == SIZES["max_position_embeddings"]
    assert longest_sequence_of(BloomConfig()) is None


def test_a_rotary_scaling_that_nobody_has_heard_of_is_named() -> None:
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 100.0}
    assert FAMILIES["llama"].why_not(config) == "its rotary scaling spiral is not supported"


def test_layers_of_another_kind_are_named() -> None:
    config = dense("gemma3_text", **SIZES).config
    config.layer_types = ["sliding_attention", "linear_attention", "full_attention"]
    assert FAMILIES["gemma3_text"].why_not(config) == "it has layers of type linear_attention"


def test_training_takes_the_families_whose_layers_are_llamas() -> None:
    taken = [family.model_type for family in FAMILIES.values() if family.has_llama_layers]
    assert taken == ["llama", "qwen2", "qwen3", "mistral"]
