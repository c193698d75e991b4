"""What every rollout engine promises, checked against plain forward passes of the model it runs.

One suite for all of them. What a test may demand is said by `engine.capabilities`, never by its class.
Engines of vLLM live as long as the session, so a test begins with an engine that is empty and on its base,
wherever the last one left it.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from swarmnode.errors import EngineError
from swarmnode.extensions.generate.generate_engine import GenerateEngine
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings, build_stage
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import (
    BASE_VERSION,
    Engine,
    InFlight,
    Output,
    PolicyUpdate,
    Request,
    Sampled,
    SamplingParams,
)
from swarmnode.rollout.shared_engine import SharedEngine, versions_needed
from swarmnode.settings.config import PolicyConfig
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.types import Span
from tests.conversations import Talk
from tests.families import DENSE, dense
from tests.local_chain import LocalChain, LocalPipelineEngine

VOCAB = 61
EOS = 0
MAX_LENGTH = 128
BASE = PolicyUpdate(0, {}, 1.0)
TOLERANCE = 1e-5
"""Of a log-probability, against a plain float32 forward pass."""

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Random everywhere, biases and norms too: a zero or a one would hide that it is left out."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # A norm begins with ones, or with zeros where what is stored is its scale - 1.
            start = parameter.mean() if "norm" in name else 0.0
            parameter.copy_(noise * 0.15 if parameter.ndim == 2 else noise * 0.2 + start)
    return model.eval()


def qwen2() -> PreTrainedModel:
    # Heads of 32 and not of 16, here and in qwen3: vLLM has no smaller ones on a CPU.
    heads = sizes(num_attention_heads=2, num_key_value_heads=2)
    return randomized(Qwen2ForCausalLM(Qwen2Config(**heads, tie_word_embeddings=True)))


def llama() -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = LlamaConfig(
        **sizes(num_key_value_heads=1), rope_parameters=rope, attention_bias=True, mlp_bias=True
    )
    return randomized(LlamaForCausalLM(config))


def qwen3() -> PreTrainedModel:
    return randomized(Qwen3ForCausalLM(Qwen3Config(**sizes(num_key_value_heads=2), head_dim=32)))


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=MAX_LENGTH,
        bos_token_id=1,
        eos_token_id=1,
    )
    return randomized(GPT2LMHeadModel(config))


def small(family: str) -> Callable[[], PreTrainedModel]:
    """How to make a model of a family in tests/families.py, of this file's sizes."""
    own = {name: size for name, size in sizes().items() if name not in DENSE[family]}
    return lambda: randomized(dense(family, **own))


def sizes(**changes: int) -> dict[str, int]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
    } | changes


ADDED = ("gemma2", "gemma3_text", "mistral", "phi3")
"""Families that differ from Llama in more than biases and norms of heads."""

MODELS = {"qwen2": qwen2, "llama": llama, "qwen3": qwen3, "gpt2": gpt2} | {
    family: small(family) for family in ADDED
}


def shared(model: PreTrainedModel, eos: Sequence[int], max_slots: int) -> Engine:
    """One policy's part of an engine that another policy has a part in too."""
    below = EmbeddedEngine(model, eos, max_slots, max_versions=versions_needed(2) + 2)
    both = SharedEngine(below, members=2)
    neighbour, member = both.member("neighbour"), both.member("member")
    neighbour.set_policy(PolicyUpdate(7, {}, 1.0))
    return member


def leading(model: PreTrainedModel, eos: Sequence[int], max_slots: int) -> Engine:
    """The only policy of an engine, beside a guest of it."""
    front = SharedEngine(EmbeddedEngine(model, eos, max_slots), members=1)
    member = front.member("policy-0")
    front.guest("people", of="policy-0")
    return member


CUTS: dict[str, bool] = {}
"""By family, as a pipeline's members find them once."""


def pipeline(model: PreTrainedModel, eos: Sequence[int], max_slots: int) -> Engine:
    """The model cut into two stages, within this process."""
    kind = model.config.model_type
    if kind not in CUTS:
        CUTS[kind] = try_cut(model.config)
    base = {name.replace(".base_layer", ""): p for name, p in model.state_dict().items()}
    settings = StageSettings(adapter=PolicyConfig(lora_rank=4, lora_alpha=6))
    parts = StagePart(0, 1, has_ends=True), StagePart(1, 2)
    stages = [
        build_stage(
            model.config, part, lambda names: {n: base[n].clone() for n in names}, settings, CUTS[kind]
        )
        for part in parts
    ]
    chain = LocalChain(stages, max_cache_bytes=1 << 26)
    return LocalPipelineEngine(
        chain, eos, choose_path=lambda prompt: (0, 1), max_running=max_slots, max_length=MAX_LENGTH
    )


LOCAL = {
    "embedded": EmbeddedEngine,
    "generate": GenerateEngine,
    "shared": shared,
    "leading": leading,
    "pipeline": pipeline,
}
CASES = (
    *(("embedded", name) for name in ("qwen2", "llama", "qwen3", *ADDED)),
    *(("shared", name) for name in ("qwen2", "qwen3")),
    ("leading", "qwen2"),
    *(("generate", name) for name in ("qwen2", "gpt2", "mistral")),
    ("pipeline", "qwen3"),
    ("vllm-lora", "qwen2"),
    ("vllm-lora", "qwen3"),
    ("vllm-merged", "qwen2"),
)


@dataclass(frozen=True)
class Backend:
    """A kind of engine and a model to run on it."""

    model: PreTrainedModel
    start: Callable[[PreTrainedModel, int], Engine]
    shared: bool
    """Whether there is only one engine, which outlives the test."""

    def engine(self, slots: int = 8) -> Engine:
        """An engine on version 0, the base, with nothing in flight; its own EOS token is EOS."""
        engine = self.start(self.model, slots)
        engine.abort()
        if self.shared:
            engine.set_policy(BASE)
        return engine


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-models")


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def backend(request: pytest.FixtureRequest, folders: Path) -> Backend:
    kind, name = request.param
    model = MODELS[name]()
    if kind in LOCAL:
        return Backend(model, lambda model, slots: LOCAL[kind](model, (EOS,), max_slots=slots), shared=False)
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    make_vllm_engine = request.getfixturevalue("make_vllm_engine")
    folder = folders / name
    model.save_pretrained(folder)

    def start(model: PreTrainedModel, slots: int) -> Engine:
        # Starting one takes seconds, so all tests share one, of one size.
        return make_vllm_engine(folder, model, slots=8, eos=(EOS,), weights=kind.removeprefix("vllm-"))

    return Backend(model, start, shared=True)


@pytest.fixture
def model(backend: Backend) -> PreTrainedModel:
    return backend.model


@pytest.fixture
def engine(backend: Backend) -> Engine:
    return backend.engine()


@pytest.fixture(params=["embedded", "generate", "shared", "leading", "pipeline", "fake"])
def bookkeeper(request: pytest.FixtureRequest) -> Engine:
    """An engine with two slots and no EOS, for everything that is not arithmetic."""
    if request.param == "fake":
        return FakeEngine(lambda request: range(1, 100), max_slots=2, max_length=MAX_LENGTH, vocab=VOCAB)
    return LOCAL[request.param](qwen2(), (), max_slots=2)


def prompts(count: int, seed: int = 0, longest: int = 20) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))) for _ in range(count)]


def ask(
    prompt: tuple[int, ...],
    name: object = "a",
    max_tokens: int = 16,
    seed: int | None = 0,
    version: int | None = None,
    **sampling: object,
) -> Request:
    params = SamplingParams(max_tokens, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(str(name), prompt, params, version=version)


def free(*args: object, **named: object) -> Request:
    """A request that EOS does not end."""
    return ask(*args, ignore_eos=True, **named)  # type: ignore[arg-type]


def run(engine: Engine, requests: Iterable[Request] = ()) -> dict[str, Output]:
    """Submit, and step until nothing is in flight."""
    engine.submit(requests)
    outputs: list[Output] = []
    for _ in range(10_000):
        if engine.stats().running + engine.stats().waiting == 0:
            break
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


def walk(engine: Engine, requests: Iterable[Request], tokens: int) -> None:
    """Submit, and step until each has `tokens` tokens, none of them being done by then."""
    engine.submit(requests)
    for _ in range(tokens):
        assert list(engine.step()) == []


def can(engine: Engine, mode: InFlight) -> None:
    """Skip where the engine does not take this mode of an update."""
    if mode not in engine.capabilities.inflight:
        pytest.skip(f"{engine.capabilities.name} does not {mode} requests in flight")


def serves_several_versions(engine: Engine) -> None:
    if engine.capabilities.max_versions == 1:
        pytest.skip(f"{engine.capabilities.name} holds one policy at a time")


def tokens_of(outputs: dict[str, Output]) -> dict[str, tuple[int, ...]]:
    return {name: output.token_ids for name, output in outputs.items()}


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits before each of `tokens`, from one forward pass without any cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


@torch.no_grad()
def mixed_logits(
    old: PreTrainedModel, new: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], kept: int
) -> torch.Tensor:
    """Logits before `tokens[kept:]`, where `old` computed the keys and values of all that was read before."""
    read = len(prompt) + kept - 1
    ids = torch.tensor([[*prompt, *tokens]])
    cache = old(input_ids=ids[:, :read], use_cache=True).past_key_values
    logits = [
        new(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0]
        for i in range(read, ids.shape[1] - 1)
    ]
    return torch.cat(logits).float()


def assert_logprobs(found: Sequence[float], tokens: Sequence[int], logits: torch.Tensor) -> None:
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)


def assert_segments(output: Output, prompt: Sequence[int], policies: dict[int, PreTrainedModel]) -> None:
    """Every fresh segment has the log-probabilities of a forward pass under its own policy."""
    for span in output.spans:
        assert span.kv == "fresh"
        own = slice(span.start, span.end)
        logits = reference_logits(policies[span.version], prompt, output.token_ids)[own]
        assert_logprobs(output.logprobs[own], output.token_ids[own], logits)


def lora(model: PreTrainedModel, seed: int = 0, version: int = 7) -> tuple[PreTrainedModel, PolicyUpdate]:
    """The model with a random LoRA by PEFT, and the same as an update."""
    is_gpt2 = model.config.model_type == "gpt2"
    targets = ["c_attn", "c_proj", "c_fc"] if is_gpt2 else "all-linear"
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=is_gpt2, task_type="CAUSAL_LM"
    )
    wrapped = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped.eval(), PolicyUpdate(version, get_peft_model_state_dict(wrapped), 6 / 4)


# Arithmetic


def test_greedy_is_what_transformers_generates(model: PreTrainedModel, engine: Engine) -> None:
    questions = prompts(6)
    outputs = run(engine, [ask(p, i, temperature=0) for i, p in enumerate(questions)])
    for i, prompt in enumerate(questions):
        ids = torch.tensor([prompt])
        expected = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )[0, len(prompt) :]
        assert list(outputs[str(i)].token_ids) == expected.tolist()


def test_a_greedy_token_has_its_probability_under_the_plain_softmax(
    model: PreTrainedModel, engine: Engine
) -> None:
    questions = prompts(3)
    outputs = run(engine, [ask(p, i, temperature=0, top_p=0.5) for i, p in enumerate(questions)])
    for i, prompt in enumerate(questions):
        assert_segments(outputs[str(i)], prompt, {0: model})


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 1.3, "top_p": 0.6}],
    ids=["plain", "temperature", "top-p", "both"],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(
    model: PreTrainedModel, engine: Engine, sampling: dict[str, float]
) -> None:
    questions = prompts(6)
    outputs = run(engine, [ask(p, i, seed=i, **sampling) for i, p in enumerate(questions)])
    for i, prompt in enumerate(questions):
        output = outputs[str(i)]
        logits = reference_logits(model, prompt, output.token_ids)
        if "temperature" in sampling:
            logits = TemperatureLogitsWarper(sampling["temperature"])(None, logits)
        if "top_p" in sampling:
            logits = TopPLogitsWarper(sampling["top_p"])(None, logits)
        assert_logprobs(output.logprobs, output.token_ids, logits)


def test_one_batch_serves_greedy_and_sampled_requests(engine: Engine) -> None:
    kinds = [{"temperature": 0.0}, {}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_p": 0.5}]
    requests = [ask(p, i, seed=i, **kinds[i]) for i, p in enumerate(prompts(5))]
    together = run(engine, requests)
    for request in requests:
        assert run(engine, [request])[request.request_id].token_ids == together[request.request_id].token_ids


# Seeds


def test_a_seed_reproduces_and_another_seed_differs(engine: Engine) -> None:
    prompt = prompts(1)[0]
    outputs = run(engine, [free(prompt, "a", seed=1), free(prompt, "b", seed=1), free(prompt, "c", seed=2)])
    assert outputs["a"].token_ids == outputs["b"].token_ids
    assert outputs["a"].token_ids != outputs["c"].token_ids


def test_without_a_seed_two_answers_differ(engine: Engine) -> None:
    prompt = prompts(1)[0]
    outputs = run(engine, [free(prompt, "a", seed=None), free(prompt, "b", seed=None)])
    assert outputs["a"].token_ids != outputs["b"].token_ids


def test_results_do_not_depend_on_the_number_of_slots(backend: Backend) -> None:
    if backend.shared:
        pytest.skip("its only engine has one size")
    requests = [ask(p, i, seed=i, max_tokens=1 + 3 * i) for i, p in enumerate(prompts(10))]
    one, many = (run(backend.engine(slots), requests) for slots in (1, 64))
    assert tokens_of(one) == tokens_of(many)
    for name, output in one.items():
        assert output.logprobs == pytest.approx(many[name].logprobs, abs=TOLERANCE)


# Ends


def test_eos_ends_an_answer_and_stays_in_it(engine: Engine) -> None:
    outputs = run(engine, [ask(p, i, seed=i, max_tokens=60) for i, p in enumerate(prompts(8))])
    stopped = [output for output in outputs.values() if output.finish == "stop"]
    assert stopped
    for output in stopped:
        assert output.token_ids.index(EOS) == len(output.token_ids) - 1
    for output in outputs.values():
        if output.finish == "length":
            assert len(output.token_ids) == 60
            assert EOS not in output.token_ids


def test_a_request_may_ignore_eos(engine: Engine) -> None:
    requests = [ask(p, i, seed=i, max_tokens=60) for i, p in enumerate(prompts(8))]
    ended = run(engine, requests)
    unended = [replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in requests]
    outputs = run(engine, unended)
    assert {len(output.token_ids) for output in outputs.values()} == {60}
    assert {output.finish for output in outputs.values()} == {"length"}
    assert all(outputs[name].token_ids[: len(o.token_ids)] == o.token_ids for name, o in ended.items())


def test_a_requests_own_stop_tokens_end_only_that_request(engine: Engine) -> None:
    prompt = prompts(1)[0]
    whole = run(engine, [free(prompt, seed=3)])["a"]
    stop = whole.token_ids[4]
    requests = [free(prompt, "stops", seed=3, stop_token_ids=(stop, 1)), free(prompt, "runs", seed=3)]
    outputs = run(engine, requests)
    ends = [whole.token_ids.index(token) for token in (stop, 1) if token in whole.token_ids]
    assert outputs["stops"].token_ids == whole.token_ids[: min(ends) + 1]
    assert outputs["stops"].finish == "stop"
    assert outputs["runs"].token_ids == whole.token_ids


def test_a_stop_token_at_the_very_end_counts_as_a_stop(engine: Engine) -> None:
    prompt = prompts(1)[0]
    whole = run(engine, [free(prompt, seed=3)])["a"]
    stop = whole.token_ids[4]
    length = whole.token_ids.index(stop) + 1
    output = run(engine, [free(prompt, max_tokens=length, seed=3, stop_token_ids=(stop,))])["a"]
    assert (output.finish, len(output.token_ids)) == ("stop", length)


def test_lengths_are_kept_to_the_token(bookkeeper: Engine) -> None:
    outputs = run(bookkeeper, [ask((5,), n, max_tokens=n) for n in (1, 2, 7, 40)])
    assert {name: len(o.token_ids) for name, o in outputs.items()} == {"1": 1, "2": 2, "7": 7, "40": 40}
    assert {output.finish for output in outputs.values()} == {"length"}
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs.values())


def test_more_requests_than_slots_all_finish(bookkeeper: Engine) -> None:
    requests = [ask(p, i, max_tokens=1 + i % 5) for i, p in enumerate(prompts(11))]
    assert set(run(bookkeeper, requests)) == {request.request_id for request in requests}
    stats = bookkeeper.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.generated_tokens == sum(request.sampling.max_tokens for request in requests)
    assert stats.reprefilled_tokens == 0


def test_the_lowest_priority_number_starts_first(bookkeeper: Engine) -> None:
    requests = [replace(ask((5,), name, max_tokens=2), priority=-name) for name in range(6)]
    bookkeeper.submit(requests)
    finished: list[str] = []
    for _ in range(6):
        finished += sorted(output.request_id for output in bookkeeper.step())
    assert finished == ["4", "5", "2", "3", "0", "1"]


# Abort and resume


def test_abort_returns_a_prefix_of_what_would_have_come(engine: Engine) -> None:
    requests = [free(p, i, seed=i, max_tokens=20) for i, p in enumerate(prompts(3))]
    whole = run(engine, requests)
    walk(engine, requests, 6)
    (middle,) = engine.abort(["1"])
    assert (middle.finish, len(middle.token_ids), len(middle.logprobs)) == ("abort", 6, 6)
    assert middle.token_ids == whole["1"].token_ids[:6]
    assert tokens_of(run(engine)) == {name: whole[name].token_ids for name in ("0", "2")}


def test_an_aborted_answer_goes_on_where_it_stopped(model: PreTrainedModel, engine: Engine) -> None:
    request = free(prompts(1)[0], max_tokens=12, seed=9)
    whole = run(engine, [request])["a"]
    walk(engine, [request], 5)
    (part,) = engine.abort()
    before = engine.stats()
    output = run(engine, [request.resumed(part.sampled)])["a"]
    assert output.token_ids[:5] == part.token_ids
    assert (output.finish, len(output.token_ids)) == ("length", 12)
    assert output.spans == (Span(0, 0, 12),)
    assert_segments(output, request.prompt_ids, {0: model})
    if engine.capabilities.exact_resume:
        assert output.token_ids == whole.token_ids
        again = len(request.prompt_ids) + 5 - 1
        assert engine.stats().reprefilled_tokens == before.reprefilled_tokens + again


def test_turns_of_conversations_are_sampled_behind_all_that_was_said_before(
    model: PreTrainedModel, engine: Engine
) -> None:
    """Whether or not the engine keeps what it computed for the turns before."""
    update = lora(model, 1, version=1)
    engine.set_policy(update[1])
    before = engine.stats()
    talks = [Talk(str(i), prompt, seed=i) for i, prompt in enumerate(prompts(10))]
    again = 0
    for turn in range(4):
        again += sum(len(talk.prompt) + len(talk.said) - 1 for talk in talks if turn)
        if turn:
            talks = [talk.told(prompts(1, seed=7 * turn + i)[0]) for i, talk in enumerate(talks)]
        outputs = run(engine, [talk.request(goes_on=True) for talk in talks])
        talks = [talk.with_said(outputs[talk.name].sampled) for talk in talks]
    for talk in talks:
        assert len(talk.said.given) == 3
        logits = reference_logits(update[0], talk.prompt, talk.said.token_ids)
        own = talk.sampled_places
        assert_logprobs(
            [talk.said.logprobs[i] for i in own], [talk.said.token_ids[i] for i in own], logits[own]
        )
        assert {span.kv for span in talk.said.spans} == {"fresh"}
    after = engine.stats()
    kept = after.kept_tokens - before.kept_tokens
    assert kept + after.reprefilled_tokens - before.reprefilled_tokens == again


def test_each_segment_of_a_resumed_answer_has_its_own_policy(model: PreTrainedModel, engine: Engine) -> None:
    first, second = lora(model, 1, version=1), lora(model, 2, version=2)
    requests = [free(p, i, seed=i, max_tokens=5 + 2 * i) for i, p in enumerate(prompts(4))]
    engine.set_policy(first[1])
    walk(engine, requests, 4)
    parts = {part.request_id: part for part in engine.abort()}
    engine.set_policy(second[1])
    outputs = run(engine, [request.resumed(parts[request.request_id].sampled) for request in requests])
    for request in requests:
        output = outputs[request.request_id]
        assert output.spans == (Span(1, 0, 4), Span(2, 4, request.sampling.max_tokens))
        assert output.token_ids[:4] == parts[request.request_id].token_ids
        assert_segments(output, request.prompt_ids, {1: first[0], 2: second[0]})


def test_abort_returns_those_that_never_started_with_what_they_came_with(bookkeeper: Engine) -> None:
    had = Sampled((1, 2), (-0.5, -0.5), (Span(3, 0, 2),))
    bookkeeper.submit([*(ask((5,), i) for i in range(3)), ask((5,), 3).resumed(had)])
    bookkeeper.step()
    outputs = {output.request_id: output for output in bookkeeper.abort()}
    assert {name: len(output.token_ids) for name, output in outputs.items()} == {
        "0": 1,
        "1": 1,
        "2": 0,
        "3": 2,
    }
    assert outputs["3"].sampled == had
    assert bookkeeper.step() == ()


def test_an_unknown_id_is_not_an_error_to_abort(bookkeeper: Engine) -> None:
    bookkeeper.submit([ask((5,))])
    assert list(bookkeeper.abort(["gone already"])) == []
    assert len(run(bookkeeper)) == 1


def test_an_id_may_be_used_again_once_it_has_left(bookkeeper: Engine) -> None:
    for _ in range(2):
        assert set(run(bookkeeper, [ask((5,), max_tokens=2)])) == {"a"}
    bookkeeper.submit([ask((5,))])
    bookkeeper.abort()
    assert set(run(bookkeeper, [ask((5,), max_tokens=2)])) == {"a"}


# Refusals


TWO_DONE = Sampled((1, 2), (-0.5, -0.5), (Span(0, 0, 2),))
REFUSED = {
    "empty": ask(()),
    "twice": ask((5,), "twice"),
    "too long": ask((5,) * 120),
    "vocab": ask((VOCAB,)),
    "negative": ask((-1,)),
    "no tokens": ask((5,), max_tokens=0),
    "done": ask((5,), max_tokens=2).resumed(TWO_DONE),
    "nan": ask((5,), temperature=float("nan")),
    "below 0": ask((5,), temperature=-1.0),
    "near 0": ask((5,), temperature=1e-9),
    "top-p": ask((5,), top_p=0.0),
    "seed": ask((5,), seed=2**64),
    "version": ask((5,), version=5),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_request_that_cannot_work_is_refused_with_all_that_came_with_it(
    bookkeeper: Engine, why: str
) -> None:
    with pytest.raises(EngineError):
        bookkeeper.submit([ask((5,), "twice"), REFUSED[why]])
    assert bookkeeper.stats().waiting == 0
    assert bookkeeper.step() == ()


@pytest.mark.parametrize("why", [why for why in REFUSED if why != "twice"])
def test_a_check_refuses_what_submitting_would(bookkeeper: Engine, why: str) -> None:
    with pytest.raises(EngineError):
        bookkeeper.check(REFUSED[why])


def test_a_check_lets_through_what_can_be_submitted_and_changes_nothing(bookkeeper: Engine) -> None:
    bookkeeper.check(ask((5,)))
    assert bookkeeper.stats().waiting == 0
    bookkeeper.submit([ask((5,))])
    bookkeeper.check(ask((5,)))  # Whether the id is in flight is not its question.
    assert bookkeeper.stats().waiting == 1


def test_an_id_in_flight_is_refused(bookkeeper: Engine) -> None:
    bookkeeper.submit([ask((5,))])
    bookkeeper.step()
    with pytest.raises(EngineError, match="already in flight"):
        bookkeeper.submit([ask((5,))])


# Policies


def test_a_policy_is_the_model_with_its_lora(model: PreTrainedModel, engine: Engine) -> None:
    wrapped, update = lora(model)
    questions = prompts(4)
    before = run(engine, [ask(questions[0], temperature=0)])["a"]
    engine.set_policy(update)
    assert engine.policy_version == 7
    outputs = run(engine, [ask(p, i, seed=i) for i, p in enumerate(questions)])
    for i, prompt in enumerate(questions):
        assert_segments(outputs[str(i)], prompt, {7: wrapped})
        assert {span.version for span in outputs[str(i)].spans} == {7}
    assert {span.version for span in before.spans} == {0}


def test_policies_do_not_pile_up(model: PreTrainedModel, engine: Engine) -> None:
    requests = [ask(p, i, seed=i) for i, p in enumerate(prompts(3))]
    before = run(engine, requests)
    for seed in range(3):
        engine.set_policy(lora(model, seed)[1])
    engine.set_policy(BASE)
    assert run(engine, requests) == before


def test_the_model_itself_is_never_changed(model: PreTrainedModel, engine: Engine) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    engine.set_policy(lora(model)[1])
    run(engine, [ask((5,))])
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_lora_layers_inside_the_model_do_not_disturb(backend: Backend) -> None:
    """A node's trainer puts its LoRA layers into the very model that the engine was made from."""
    if backend.shared:
        pytest.skip("its only engine was made from a model without them")
    wrapped = cast(PreTrainedModel, lora(backend.model)[0].get_base_model())
    requests = [ask(p, i, seed=i) for i, p in enumerate(prompts(3))]
    assert run(backend.start(wrapped, 8), requests) == run(backend.engine(), requests)


@pytest.mark.parametrize("damage", ["unknown module", "half a pair", "wrong shape", "nan", "no lora"])
def test_a_damaged_policy_is_refused_and_everything_stays(
    model: PreTrainedModel, engine: Engine, damage: str
) -> None:
    request = free((5,), max_tokens=8)
    before = run(engine, [request])["a"]
    tensors = dict(lora(model)[1].tensors)
    name = next(reversed(tensors))
    if damage == "unknown module":
        tensors[name.replace("layers.", "layers.9").replace(".h.", ".h.9")] = tensors.pop(name)
    elif damage == "half a pair":
        del tensors[name]
    elif damage == "wrong shape":
        tensors[name] = tensors[name][:-1]
    elif damage == "nan":
        tensors[name] = tensors[name] * float("nan")
    else:
        tensors["base_model.model.lm_head.bias"] = torch.zeros(3)
    walk(engine, [request], 3)
    with pytest.raises(EngineError):
        engine.set_policy(PolicyUpdate(7, tensors, 1.5))
    assert engine.policy_version == 0
    assert run(engine)["a"] == before


def test_a_policy_that_diverged_is_an_error_and_the_engine_survives(
    model: PreTrainedModel, engine: Engine
) -> None:
    requests = [ask(p, i, seed=i) for i, p in enumerate(prompts(12))]
    before = run(engine, requests)
    update = lora(model)[1]
    engine.set_policy(PolicyUpdate(8, {n: t * 1e19 for n, t in update.tensors.items()}, 1.5))
    with pytest.raises(EngineError, match="NaN"):
        run(engine, requests)
    engine.set_policy(BASE)
    # The longest first and alone: the others then join beside what the bad policy left in their rows.
    first, *others = sorted(requests, key=lambda request: -len(request.prompt_ids))
    engine.submit([first])
    started = {output.request_id: output for _ in range(4) for output in engine.step()}
    assert tokens_of(started | run(engine, others)) == tokens_of(before)


def test_one_version_number_with_other_tensors_is_another_policy(
    model: PreTrainedModel, engine: Engine
) -> None:
    """Nothing computed under the first may be used under the second: prompts in the line neither."""
    first, second = lora(model, 1), lora(model, 2)
    prompt = prompts(1, longest=1)[0] * 40
    requests = [free(prompt, i, seed=i, max_tokens=4) for i in range(3 * engine.capabilities.max_running)]
    engine.set_policy(first[1])
    run(engine, [free(prompt, "before")])
    engine.submit(requests)
    engine.step()
    engine.abort([str(i) for i in range(engine.capabilities.max_running)])
    engine.set_policy(second[1])
    for output in run(engine).values():
        assert_segments(output, prompt, {7: second[0]})


# Updates while requests are in flight


def test_recomputed_requests_go_on_as_if_the_new_policy_had_read_everything(
    model: PreTrainedModel, engine: Engine
) -> None:
    can(engine, "recompute")
    first, second = lora(model, 1, version=1), lora(model, 2, version=2)
    questions = prompts(4)
    engine.set_policy(first[1])
    walk(engine, [free(p, i, seed=i) for i, p in enumerate(questions)], 5)
    before = engine.stats().reprefilled_tokens
    engine.set_policy(second[1], "recompute")
    outputs = run(engine)
    for i, prompt in enumerate(questions):
        assert outputs[str(i)].spans == (Span(1, 0, 5), Span(2, 5, 16))
        assert_segments(outputs[str(i)], prompt, {1: first[0], 2: second[0]})
    assert engine.stats().reprefilled_tokens > before


def test_kept_requests_go_on_with_the_keys_and_values_they_have(
    model: PreTrainedModel, engine: Engine
) -> None:
    can(engine, "keep")
    first, second = lora(model, 1, version=1), lora(model, 2, version=2)
    questions = prompts(4)
    engine.set_policy(first[1])
    walk(engine, [free(p, i, seed=i) for i, p in enumerate(questions)], 5)
    before = engine.stats().reprefilled_tokens
    engine.set_policy(second[1], "keep")
    outputs = run(engine)
    for i, prompt in enumerate(questions):
        output = outputs[str(i)]
        assert output.spans == (Span(1, 0, 5), Span(2, 5, 16, "stale"))
        logits = reference_logits(first[0], prompt, output.token_ids)[:5]
        assert_logprobs(output.logprobs[:5], output.token_ids[:5], logits)
        logits = mixed_logits(first[0], second[0], prompt, output.token_ids, 5)
        assert_logprobs(output.logprobs[5:], output.token_ids[5:], logits)
    assert engine.stats().reprefilled_tokens == before


def test_a_kept_request_is_fresh_again_once_it_was_resumed(model: PreTrainedModel, engine: Engine) -> None:
    can(engine, "keep")
    _, update = lora(model, 1, version=1)
    request = free(prompts(1)[0])
    walk(engine, [request], 4)
    engine.set_policy(update, "keep")
    walk(engine, [], 3)
    (part,) = engine.abort()
    output = run(engine, [request.resumed(part.sampled)])["a"]
    assert output.spans == (Span(0, 0, 4), Span(1, 4, 7, "stale"), Span(1, 7, 16))


def test_waiting_requests_start_on_the_new_policy_in_every_mode(bookkeeper: Engine) -> None:
    modes = sorted(bookkeeper.capabilities.inflight)
    for version, mode in enumerate(modes, start=1):
        bookkeeper.submit([ask((5,), i, max_tokens=6) for i in range(4)])
        bookkeeper.step()
        bookkeeper.set_policy(PolicyUpdate(version, {}, 1.0), mode)
        outputs = run(bookkeeper)
        assert outputs["2"].spans == outputs["3"].spans == (Span(version, 0, 6),), mode


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_request_with_a_version_stays_on_it(model: PreTrainedModel, engine: Engine, mode: InFlight) -> None:
    serves_several_versions(engine)
    can(engine, mode)
    first, second = lora(model, 1, version=1), lora(model, 2, version=2)
    prompt, other = prompts(2)
    engine.set_policy(first[1])
    slots = engine.capabilities.max_running
    walk(engine, [free(prompt, "running", version=1), free(other, "follower")], 3)
    engine.submit([free(prompt, i, max_tokens=4, version=1) for i in range(slots)])
    engine.set_policy(second[1], mode)
    assert engine.stats().live_versions == (1, 2)
    outputs = run(engine)
    assert outputs["running"].spans == (Span(1, 0, 16),)
    for i in range(slots):
        assert outputs[str(i)].spans == (Span(1, 0, 4),)
        assert_segments(outputs[str(i)], prompt, {1: first[0]})
    assert_segments(outputs["running"], prompt, {1: first[0]})
    assert engine.stats().live_versions == (2,)


def test_one_batch_serves_the_base_and_policies(model: PreTrainedModel, engine: Engine) -> None:
    serves_several_versions(engine)
    wrapped, update = lora(model)
    engine.set_policy(update)
    questions = prompts(6)
    requests = [free(p, i, seed=i, version=(None, BASE_VERSION, 7)[i % 3]) for i, p in enumerate(questions)]
    walk(engine, requests, 3)
    outputs = run(engine)
    for i, prompt in enumerate(questions):
        assert_segments(outputs[str(i)], prompt, {7: wrapped, BASE_VERSION: model})
    assert {span.version for span in outputs["1"].spans} == {BASE_VERSION}


def test_an_engine_of_one_policy_has_the_base_only_while_it_is_the_newest(
    model: PreTrainedModel, engine: Engine
) -> None:
    if engine.capabilities.max_versions > 1:
        pytest.skip("the base is always there")
    prompt, _ = prompts(2)
    engine.submit([free(prompt, version=BASE_VERSION)])
    for _ in range(2):  # while it waits, and while it runs
        with pytest.raises(EngineError):
            engine.set_policy(lora(model)[1])
        engine.step()
    output = run(engine)["a"]
    assert output.spans == (Span(BASE_VERSION, 0, 16),)
    assert_segments(output, prompt, {BASE_VERSION: model})
    engine.set_policy(lora(model)[1])
    with pytest.raises(EngineError):
        engine.submit([free(prompt, version=BASE_VERSION)])
    assert engine.stats().waiting == 0


def test_more_versions_than_fit_are_refused_and_everything_stays(
    model: PreTrainedModel, engine: Engine
) -> None:
    serves_several_versions(engine)
    most = engine.capabilities.max_versions
    prompt = prompts(1)[0]
    policies = {0: model}
    for version in range(1, most):
        walk(engine, [free(prompt, version - 1, version=version - 1)], 1)
        policies[version], update = lora(model, version, version)
        engine.set_policy(update)
    walk(engine, [free(prompt, most - 1, version=most - 1)], 1)
    with pytest.raises(EngineError):
        engine.set_policy(lora(model, most, most)[1])
    assert engine.policy_version == most - 1
    assert engine.stats().live_versions == tuple(range(most))
    for name, output in run(engine).items():
        assert output.spans == (Span(int(name), 0, 16),)
        assert_segments(output, prompt, policies)


def test_a_mode_that_cannot_be_had_is_refused_and_everything_stays(bookkeeper: Engine) -> None:
    refused = {"keep", "recompute"} - bookkeeper.capabilities.inflight
    walk(bookkeeper, [ask((5,))], 2)
    for mode in refused:
        with pytest.raises(EngineError):
            bookkeeper.set_policy(PolicyUpdate(3, {}, 1.0), cast(InFlight, mode))
    assert bookkeeper.policy_version == 0
    assert run(bookkeeper)["a"].spans == (Span(0, 0, 16),)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_whatever_happens(bookkeeper: Engine, seed: int) -> None:
    rng = random.Random(seed)
    limits = bookkeeper.capabilities
    submitted: dict[str, Request] = {}
    ended: list[Output] = []
    for turn in range(120):
        match rng.choice(("submit", "step", "step", "step", "abort", "update")):
            case "submit":
                request = ask((5,) * rng.randint(1, 4), turn, rng.randint(1, 9), seed=turn)
                if limits.max_versions > 1 and rng.random() < 0.3:
                    version = rng.choice((BASE_VERSION, *bookkeeper.stats().live_versions))
                    request = replace(request, version=version, priority=rng.randint(-1, 1))
                bookkeeper.submit([request])
                submitted[request.request_id] = request
            case "step":
                ended += bookkeeper.step()
            case "abort":
                ended += bookkeeper.abort(rng.sample(sorted(submitted), k=len(submitted) // 5))
            case _:
                before = bookkeeper.stats()
                try:
                    mode = rng.choice(sorted(limits.inflight))
                    bookkeeper.set_policy(PolicyUpdate(turn, {}, 1.0), mode)
                except EngineError:
                    assert bookkeeper.stats() == before
        assert len(bookkeeper.stats().live_versions) <= limits.max_versions
    ended += run(bookkeeper).values()
    assert Counter(output.request_id for output in ended) == Counter(list(submitted))
    for output in ended:
        request = submitted[output.request_id]
        assert sum(span.end - span.start for span in output.spans) == len(output.token_ids)
        assert output.finish == "abort" or len(output.token_ids) == request.sampling.max_tokens
        if request.version is not None:
            assert {span.version for span in output.spans} <= {request.version}


# Standing still


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_a_snapshot_goes_on_in_a_new_engine(backend: Backend, temperature: float) -> None:
    engine = backend.engine()
    if temperature and not engine.capabilities.exact_resume:
        pytest.skip("a resumed request draws other tokens here")
    requests = [free(p, i, seed=i, temperature=temperature) for i, p in enumerate(prompts(12))]
    whole = run(engine, requests)
    walk(engine, requests, 6)
    snapshot = engine.snapshot()
    assert {request.request_id for request in snapshot} == set(whole)
    assert tokens_of(run(engine)) == tokens_of(whole)
    restored = backend.engine()
    restored.submit(snapshot)
    outputs = run(restored)
    assert tokens_of(outputs) == tokens_of(whole)
    for name, output in outputs.items():
        assert output.logprobs == pytest.approx(whole[name].logprobs, abs=TOLERANCE)


def test_sleep_aborts_and_the_next_request_wakes(model: PreTrainedModel, engine: Engine) -> None:
    wrapped, update = lora(model)
    requests = [free(p, i, seed=i) for i, p in enumerate(prompts(12))]
    engine.set_policy(update)
    before = run(engine, requests)
    walk(engine, requests, 3)
    assert {output.request_id for output in engine.sleep()} == set(before)
    assert list(engine.sleep()) == []
    assert engine.policy_version == 7
    after = run(engine, requests)
    assert tokens_of(after) == tokens_of(before)
    for request in requests:
        assert_segments(after[request.request_id], request.prompt_ids, {7: wrapped})


def test_updates_are_counted(bookkeeper: Engine) -> None:
    before = bookkeeper.stats()
    for version in (1, 2, 3):
        bookkeeper.set_policy(PolicyUpdate(version, {}, 1.0))
    after = bookkeeper.stats()
    assert after.swaps == before.swaps + 3
    assert after.live_versions == (3,)


def test_closing_twice_is_fine(bookkeeper: Engine) -> None:
    bookkeeper.submit([ask((5,))])
    bookkeeper.step()
    bookkeeper.close()
    bookkeeper.close()
