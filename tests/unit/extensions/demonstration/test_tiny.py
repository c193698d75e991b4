"""The tiny policy: a folder that is whole or absent, loads anywhere, and takes any text."""

import resource
from dataclasses import replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from swarmnode.errors import StorageError
from swarmnode.extensions.demonstration.tiny import (
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    QUICK_RECIPE,
    SUMS,
    VOCABULARY,
    build_quick_tiny,
    build_tiny,
)
from swarmnode.extensions.demonstration.warmup import TrainingPhase
from swarmnode.rollout.decode.weights import unsupported_reason
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import draw_held_out

FASTEST = replace(
    QUICK_RECIPE, phases=(TrainingPhase("two steps", 2, muon_lr=8e-3, adamw_lr=5e-3, ramp_steps=1),), batch=8
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build_quick_tiny(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny)


def answers(model, examples):
    """For held-out examples of every task: the probability that sampling gives exactly the answer, and
    whether greedy decoding does."""
    return [
        answer(model, example)
        for task in BUILTIN_TASKS
        for example in islice(draw_held_out(task, seed=1), examples)
    ]


@torch.inference_mode()
def answer(model, example):
    prompt, completion = example.prompt.encode(), [*example.columns["answer"].encode(), EOS_TOKEN_ID]
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
    return logprobs.sum().exp().item(), logits.argmax(-1).tolist() == completion


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@given(st.text())
def test_any_text_comes_back_as_it_was_one_token_per_byte(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text", ["e\u0301 \u212b", "<|end|><|pad|><|endoftext|>", " a  b\r\n\x00", "\U0001f600"]
)
def test_text_that_tokenizers_like_to_change_is_left_alone(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < PAD_TOKEN_ID


def test_the_end_and_padding_are_tokens_and_not_text(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 257, VOCABULARY)
    assert tokenizer.decode([97, EOS_TOKEN_ID, PAD_TOKEN_ID], skip_special_tokens=True) == "a"


def test_the_model_loads_and_knows_its_special_tokens(tiny, model):
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert (model.config.pad_token_id, model.config.eos_token_id) == (PAD_TOKEN_ID, EOS_TOKEN_ID)
    assert GenerationConfig.from_pretrained(tiny).eos_token_id == EOS_TOKEN_ID
    assert model.config.head_dim in (32, 64)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 120_000
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_embedded_engine_can_run_it(model):
    assert unsupported_reason(model) is None


def test_a_second_call_finds_what_the_first_one_built(tmp_path):
    calls = []
    first = build_tiny(tmp_path, recipe=FASTEST, progress=lambda *step: calls.append(step))
    assert calls == [(0, 2, "two steps"), (1, 2, "two steps"), (2, 2, "two steps")]
    again = build_tiny(tmp_path, recipe=FASTEST, progress=lambda *step: pytest.fail("built again"))
    assert again == first


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", SUMS])
def test_a_folder_that_was_damaged_is_built_anew_and_says_so(tmp_path, caplog, name):
    folder = build_tiny(tmp_path, recipe=FASTEST)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / name).write_bytes(before[name][:-1])
    assert build_tiny(tmp_path, recipe=FASTEST) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder] and "is damaged; rebuilding it" in caplog.text


def test_a_file_that_is_gone_is_damage_and_a_folder_without_sums_is_taken_as_it_is(tmp_path, caplog):
    folder = build_tiny(tmp_path, recipe=FASTEST)
    (folder / "tokenizer.json").unlink()
    build_tiny(tmp_path, recipe=FASTEST)
    assert (folder / "tokenizer.json").exists() and "rebuilding it" in caplog.text
    (folder / SUMS).unlink()
    build_tiny(tmp_path, recipe=FASTEST, progress=lambda *step: pytest.fail("built again"))


def test_another_recipe_or_seed_is_another_folder(tmp_path):
    folders = {
        build_tiny(tmp_path, recipe=FASTEST),
        build_tiny(tmp_path, recipe=FASTEST, seed=1),
        build_tiny(tmp_path, recipe=replace(FASTEST, rope_theta=1000.0)),
    }
    assert len(folders) == 3


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_randomness_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = weights(build_tiny(tmp_path / "a", recipe=FASTEST))
    assert torch.equal(torch.rand(3), expected)
    again = weights(build_tiny(tmp_path / "b", recipe=FASTEST))
    other = weights(build_tiny(tmp_path / "b", recipe=FASTEST, seed=1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path, interruption):
    def interrupt(done, total, what):
        if done == 1:
            raise interruption

    with pytest.raises(interruption):
        build_tiny(tmp_path, recipe=FASTEST, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_storage_error_with_nothing_half_written(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow beyond 64 KB: writing the weights fails as it does on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StorageError, match="cannot write the tiny policy"):
            build_tiny(tmp_path, recipe=FASTEST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        build_tiny(tmp_path / "file" / "models", progress=lambda *step: pytest.fail("worked in vain"))


def test_two_builders_at_once_agree_on_one_whole_folder(tmp_path):
    meeting, results = Barrier(2), SimpleQueue()

    def publish_together(done, total, what):
        if done == total:
            meeting.wait(60)

    def build():
        results.put(build_tiny(tmp_path, recipe=FASTEST, progress=publish_together))

    builders = [Thread(target=build) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(120)
    assert results.get(timeout=1) == results.get(timeout=1)
    assert [folder.name for folder in tmp_path.iterdir()] == [build_tiny(tmp_path, recipe=FASTEST).name]
    assert weights(build_tiny(tmp_path, recipe=FASTEST))


def test_even_the_quick_recipe_learns_something_about_questions_it_never_saw(tmp_path, model):
    untrained = AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path, recipe=FASTEST))
    before, after = (fmean(chance for chance, _ in answers(m, examples=8)) for m in (untrained, model))
    assert after > 2 * before


@pytest.mark.slow
def test_the_real_recipe_makes_a_policy_that_knows_more_than_it_says(tiny_model):
    judged = answers(AutoModelForCausalLM.from_pretrained(tiny_model), examples=64)
    assert 0.15 < fmean(chance for chance, _ in judged) < 0.30
    assert fmean(is_likeliest for _, is_likeliest in judged) > 0.4


def test_a_phase_ramps_up_stays_and_comes_down():
    phase = TrainingPhase("p", 100, muon_lr=1.0, adamw_lr=1.0, ramp_steps=10)
    rates = [phase.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:60] == [1.0] * 51
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[-1] == 0.05
