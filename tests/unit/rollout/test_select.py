"""Which engine a model gets, and the sentence that says why."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from swarmnode.rollout.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.rollout.fallback import GenerateEngine
from swarmnode.rollout.select import make_engine

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def test_a_dense_qwen2_runs_embedded(tiny: PreTrainedModel) -> None:
    engine, reason = make_engine(tiny, (0,))
    assert isinstance(engine, EmbeddedEngine)
    assert reason == "embedded engine: qwen2 runs continuously in our own decode loop."


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=64))


def sliding() -> PreTrainedModel:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, **window))


def dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


def mixed_types() -> PreTrainedModel:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head.to(torch.bfloat16)
    return model


@pytest.mark.parametrize(
    ("build", "word"), [(gpt2, "gpt2"), (sliding, "sliding"), (dynamic, "dynamic"), (mixed_types, "types")]
)
def test_any_other_model_runs_all_the_same_and_we_say_why(build: object, word: str) -> None:
    engine, reason = make_engine(build(), (0,))  # type: ignore[operator]
    assert isinstance(engine, GenerateEngine)
    assert reason.startswith("generate engine: one batch at a time, as ")
    assert word in reason


def test_the_limits_are_handed_on(tiny: PreTrainedModel) -> None:
    engine, _ = make_engine(tiny, (0,), max_slots=1, max_length=8)
    engine.submit([Request(str(i), (1, 2), SamplingParams(max_tokens=6)) for i in range(2)])
    engine.step()
    assert engine.stats().waiting == 1
