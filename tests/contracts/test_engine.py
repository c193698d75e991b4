"""What every rollout engine promises, checked against plain forward passes of the model it runs."""

import copy
import random
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarmnode.errors import EngineError
from swarmnode.rollout.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Engine, Output, PolicyUpdate, Request, SamplingParams
from swarmnode.rollout.fake import FakeEngine
from swarmnode.rollout.fallback import GenerateEngine

VOCAB = 61
EOS = 0
MAX_LENGTH = 128
BASE = PolicyUpdate(0, {}, 1.0)


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Random everywhere, biases and norms too: a zero or a one would hide that it is left out."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.ndim == 2 else noise * 0.2 + ("norm" in name))
    return model.eval()


def qwen2() -> PreTrainedModel:
    return randomized(Qwen2ForCausalLM(Qwen2Config(**sizes(), tie_word_embeddings=True)))


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
    return randomized(Qwen3ForCausalLM(Qwen3Config(**sizes(num_key_value_heads=2), head_dim=24)))


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


def sliding() -> PreTrainedModel:
    return randomized(MistralForCausalLM(MistralConfig(**sizes(), sliding_window=8)))


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


MODELS = {"qwen2": qwen2, "llama": llama, "qwen3": qwen3, "gpt2": gpt2, "sliding": sliding}
EMBEDDED = ("qwen2", "llama", "qwen3")
ENGINES = (
    *(("embedded", name) for name in EMBEDDED),
    *(("generate", name) for name in ("qwen2", "gpt2", "sliding")),
)


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel]:
    kind, name = request.param
    return kind, MODELS[name]()


@pytest.fixture
def model(case: tuple[str, PreTrainedModel]) -> PreTrainedModel:
    return case[1]


@pytest.fixture
def make(case: tuple[str, PreTrainedModel]) -> Callable[..., Engine]:
    """Makes an engine for the model of this case."""

    def build(slots: int = 8, eos: Sequence[int] = (EOS,)) -> Engine:
        kind = EmbeddedEngine if case[0] == "embedded" else GenerateEngine
        return kind(case[1], eos, max_slots=slots)

    return build


@pytest.fixture(params=["embedded", "generate", "fake"])
def bookkeeper(request: pytest.FixtureRequest) -> Engine:
    """An engine with two slots and no EOS, for everything that is not arithmetic."""
    if request.param == "fake":
        return FakeEngine(lambda request: range(1, 100), max_slots=2, max_length=MAX_LENGTH, vocab=VOCAB)
    kind = EmbeddedEngine if request.param == "embedded" else GenerateEngine
    return kind(qwen2(), (), max_slots=2)


def prompts(count: int, seed: int = 0, longest: int = 20) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))) for _ in range(count)]


def ask(
    prompt: tuple[int, ...],
    name: object = "a",
    max_tokens: int = 16,
    seed: int | None = 0,
    **sampling: object,
) -> Request:
    return Request(str(name), prompt, SamplingParams(max_tokens, seed=seed, **sampling))  # type: ignore[arg-type]


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Output]:
    engine.submit(requests)
    outputs: list[Output] = []
    for _ in range(10_000):
        if engine.stats().running + engine.stats().waiting == 0:
            break
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits before each of `tokens`, from one forward pass without any cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def assert_logprobs_of(output: Output, logits: torch.Tensor, tolerance: float = 1e-4) -> None:
    tokens = torch.tensor(output.token_ids)
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=tolerance, rtol=0)


# Arithmetic


def test_greedy_is_what_transformers_generates(model: PreTrainedModel, make: Callable[..., Engine]) -> None:
    questions = prompts(6)
    outputs = run(make(slots=4), [ask(p, i, temperature=0) for i, p in enumerate(questions)])
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
    model: PreTrainedModel, make: Callable[..., Engine]
) -> None:
    questions = prompts(3)
    outputs = run(make(), [ask(p, i, temperature=0, top_k=1) for i, p in enumerate(questions)])
    for i, prompt in enumerate(questions):
        output = outputs[str(i)]
        assert_logprobs_of(output, reference_logits(model, prompt, output.token_ids))


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 12, "top_p": 0.6}],
    ids=["plain", "temperature", "top-k", "top-p", "all"],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(
    model: PreTrainedModel, make: Callable[..., Engine], sampling: dict[str, float]
) -> None:
    questions = prompts(6)
    outputs = run(make(slots=4), [ask(p, i, seed=i, **sampling) for i, p in enumerate(questions)])
    for i, prompt in enumerate(questions):
        output = outputs[str(i)]
        logits = reference_logits(model, prompt, output.token_ids)
        if "temperature" in sampling:
            logits = TemperatureLogitsWarper(sampling["temperature"])(None, logits)
        if "top_k" in sampling:
            logits = TopKLogitsWarper(int(sampling["top_k"]))(None, logits)
        if "top_p" in sampling:
            logits = TopPLogitsWarper(sampling["top_p"])(None, logits)
        assert_logprobs_of(output, logits)


def test_one_batch_serves_greedy_and_sampled_requests(make: Callable[..., Engine]) -> None:
    kinds = [{"temperature": 0.0}, {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}]
    requests = [ask(p, i, seed=i, **kinds[i]) for i, p in enumerate(prompts(5))]
    together = run(make(), requests)
    for request in requests:
        alone = run(make(), [request])[request.request_id]
        assert together[request.request_id].token_ids == alone.token_ids


# Seeds


def test_a_seed_reproduces_and_another_seed_differs(make: Callable[..., Engine]) -> None:
    prompt = prompts(1)[0]
    requests = [ask(prompt, "a", seed=1), ask(prompt, "again", seed=1), ask(prompt, "other", seed=2)]
    outputs = run(make(eos=()), requests)
    assert outputs["a"].token_ids == outputs["again"].token_ids
    assert outputs["a"].token_ids != outputs["other"].token_ids


def test_without_a_seed_two_answers_differ(make: Callable[..., Engine]) -> None:
    prompt = prompts(1)[0]
    outputs = run(make(eos=()), [ask(prompt, "a", seed=None), ask(prompt, "b", seed=None)])
    assert outputs["a"].token_ids != outputs["b"].token_ids


def test_results_do_not_depend_on_the_number_of_slots(make: Callable[..., Engine]) -> None:
    requests = [ask(p, i, seed=i, max_tokens=1 + 3 * i) for i, p in enumerate(prompts(10))]
    one, many = run(make(slots=1), requests), run(make(slots=64), requests)
    assert {k: o.token_ids for k, o in one.items()} == {k: o.token_ids for k, o in many.items()}
    for name, output in one.items():
        assert output.logprobs == pytest.approx(many[name].logprobs, abs=1e-4)


def test_an_aborted_answer_can_be_continued_as_if_nothing_had_happened(make: Callable[..., Engine]) -> None:
    prompt = prompts(1)[0]
    whole = run(make(eos=()), [ask(prompt, max_tokens=12, seed=9)])["a"]
    engine = make(eos=())
    engine.submit([ask(prompt, max_tokens=12, seed=9)])
    for _ in range(5):
        engine.step()
    (part,) = engine.abort()
    rest = run(engine, [ask(prompt + part.token_ids, max_tokens=7, seed=9)])["a"]
    assert part.token_ids + rest.token_ids == whole.token_ids


# Ends


def test_eos_ends_an_answer_and_stays_in_it(make: Callable[..., Engine]) -> None:
    outputs = run(make(), [ask(p, i, seed=i, max_tokens=60) for i, p in enumerate(prompts(8))])
    stopped = [output for output in outputs.values() if output.finish == "stop"]
    assert stopped
    for output in stopped:
        assert output.token_ids.index(EOS) == len(output.token_ids) - 1
    for output in outputs.values():
        if output.finish == "length":
            assert len(output.token_ids) == 60
            assert EOS not in output.token_ids


def test_a_requests_own_stop_tokens_end_only_that_request(make: Callable[..., Engine]) -> None:
    prompt = prompts(1)[0]
    free = run(make(eos=()), [ask(prompt, seed=3)])["a"]
    stop = free.token_ids[4]
    outputs = run(
        make(eos=()), [ask(prompt, "stops", seed=3, stop_token_ids=(stop, 1)), ask(prompt, "runs", seed=3)]
    )
    assert outputs["stops"].token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert outputs["stops"].finish == "stop"
    assert outputs["runs"].token_ids == free.token_ids


def test_a_stop_token_at_the_very_end_counts_as_a_stop(make: Callable[..., Engine]) -> None:
    prompt = prompts(1)[0]
    free = run(make(eos=()), [ask(prompt, seed=3)])["a"]
    length = free.token_ids.index(free.token_ids[4]) + 1
    cut = ask(prompt, max_tokens=length, seed=3, stop_token_ids=(free.token_ids[4],))
    output = run(make(eos=()), [cut])["a"]
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
    assert stats.prompt_tokens == sum(len(request.prompt_ids) for request in requests)


# Abort


def test_abort_returns_a_prefix_of_what_would_have_come(make: Callable[..., Engine]) -> None:
    requests = [ask(p, i, seed=i, max_tokens=20) for i, p in enumerate(prompts(3))]
    whole = run(make(eos=()), requests)
    engine = make(eos=())
    engine.submit(requests)
    for _ in range(6):
        assert not engine.step()
    (middle,) = engine.abort(["1"])
    assert (middle.finish, len(middle.token_ids), len(middle.logprobs)) == ("abort", 6, 6)
    assert middle.token_ids == whole["1"].token_ids[:6]
    rest = run(engine, [])
    assert {name: o.token_ids for name, o in rest.items()} == {n: whole[n].token_ids for n in ("0", "2")}


def test_abort_returns_those_that_never_started_with_nothing(bookkeeper: Engine) -> None:
    bookkeeper.submit([ask((5,), i) for i in range(4)])
    bookkeeper.step()
    outputs = {output.request_id: len(output.token_ids) for output in bookkeeper.abort()}
    assert outputs == {"0": 1, "1": 1, "2": 0, "3": 0}
    assert bookkeeper.step() == ()


def test_an_unknown_id_is_not_an_error_to_abort(bookkeeper: Engine) -> None:
    bookkeeper.submit([ask((5,))])
    assert list(bookkeeper.abort(["gone already"])) == []
    assert len(run(bookkeeper, [])) == 1


def test_an_id_may_be_used_again_once_it_has_left(bookkeeper: Engine) -> None:
    for _ in range(2):
        assert set(run(bookkeeper, [ask((5,), max_tokens=2)])) == {"a"}
    bookkeeper.submit([ask((5,))])
    bookkeeper.abort()
    assert set(run(bookkeeper, [ask((5,), max_tokens=2)])) == {"a"}


# Refusals


@pytest.mark.parametrize(
    "request_",
    [
        ask(()),
        ask((5,), "twice"),
        ask((5,) * 120),
        ask((VOCAB,)),
        ask((-1,)),
        ask((5,), max_tokens=0),
        ask((5,), temperature=float("nan")),
        ask((5,), temperature=-1.0),
        ask((5,), temperature=1e-9),
        ask((5,), top_p=0.0),
        ask((5,), top_k=-1),
        ask((5,), seed=2**64),
    ],
    ids=[
        "empty",
        "twice",
        "too long",
        "vocab",
        "negative",
        "no tokens",
        "nan",
        "cold",
        "near 0",
        "top-p",
        "top-k",
        "seed",
    ],
)
def test_a_request_that_cannot_work_is_refused_with_all_that_came_with_it(
    bookkeeper: Engine, request_: Request
) -> None:
    with pytest.raises(EngineError):
        bookkeeper.submit([ask((5,), "twice"), request_])
    assert bookkeeper.stats().waiting == 0
    assert bookkeeper.step() == ()


def test_an_id_in_flight_is_refused(bookkeeper: Engine) -> None:
    bookkeeper.submit([ask((5,))])
    bookkeeper.step()
    with pytest.raises(EngineError, match="already in flight"):
        bookkeeper.submit([ask((5,))])


# Policies


def lora(model: PreTrainedModel, seed: int = 0) -> tuple[PreTrainedModel, PolicyUpdate]:
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
    return wrapped.eval(), PolicyUpdate(7, get_peft_model_state_dict(wrapped), 6 / 4)


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_a_policy_is_the_model_with_its_lora(model: PreTrainedModel, make: Callable[..., Engine]) -> None:
    wrapped, update = lora(model)
    engine = make()
    before = run(engine, [ask(prompts(1)[0], temperature=0)])["a"]
    engine.set_policy(update)
    assert engine.policy_version == 7
    questions = prompts(4)
    outputs = run(engine, [ask(p, i, seed=i) for i, p in enumerate(questions)])
    for i, prompt in enumerate(questions):
        output = outputs[str(i)]
        assert output.policy_version == 7
        assert_logprobs_of(output, reference_logits(wrapped, prompt, output.token_ids))
    assert before.policy_version == 0


def test_policies_do_not_pile_up(model: PreTrainedModel, make: Callable[..., Engine]) -> None:
    requests = [ask(p, i, seed=i) for i, p in enumerate(prompts(3))]
    engine = make()
    before = run(engine, requests)
    for seed in range(3):
        engine.set_policy(lora(model, seed)[1])
    engine.set_policy(BASE)
    assert run(engine, requests) == before


def test_the_model_itself_is_never_changed(model: PreTrainedModel, make: Callable[..., Engine]) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    engine = make()
    engine.set_policy(lora(model)[1])
    run(engine, [ask((5,))])
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_lora_layers_inside_the_model_do_not_disturb(
    case: tuple[str, PreTrainedModel], model: PreTrainedModel, make: Callable[..., Engine]
) -> None:
    """A node's trainer puts its LoRA layers into the very model that the engine was made from."""
    wrapped, _ = lora(model)
    kind = EmbeddedEngine if case[0] == "embedded" else GenerateEngine
    requests = [ask(p, i, seed=i) for i, p in enumerate(prompts(3))]
    assert run(kind(wrapped.get_base_model(), (EOS,), max_slots=8), requests) == run(make(), requests)


def test_a_policy_in_flight_is_refused(bookkeeper: Engine) -> None:
    bookkeeper.submit([ask((5,))])
    with pytest.raises(EngineError, match="in flight"):
        bookkeeper.set_policy(BASE)
    bookkeeper.step()
    with pytest.raises(EngineError, match="in flight"):
        bookkeeper.set_policy(BASE)
    bookkeeper.abort()
    bookkeeper.set_policy(PolicyUpdate(3, {}, 1.0))
    assert bookkeeper.policy_version == 3


@pytest.mark.parametrize("damage", ["unknown module", "half a pair", "wrong shape", "nan", "no lora"])
def test_a_damaged_policy_is_refused_and_the_old_one_stays(
    model: PreTrainedModel, make: Callable[..., Engine], damage: str
) -> None:
    engine = make()
    before = run(engine, [ask((5,))])["a"]
    tensors = dict(lora(model)[1].tensors)
    name = next(reversed(tensors))
    if damage == "unknown module":
        tensors[name.replace("layers.1", "layers.9").replace("h.1", "h.9")] = tensors.pop(name)
    elif damage == "half a pair":
        del tensors[name]
    elif damage == "wrong shape":
        tensors[name] = tensors[name][:-1]
    elif damage == "nan":
        tensors[name] = tensors[name] * float("nan")
    else:
        tensors["base_model.model.lm_head.bias"] = torch.zeros(3)
    with pytest.raises(EngineError):
        engine.set_policy(PolicyUpdate(7, tensors, 1.5))
    assert run(engine, [ask((5,))])["a"] == before


def test_a_policy_that_diverged_is_an_error_and_the_engine_survives(
    model: PreTrainedModel, make: Callable[..., Engine]
) -> None:
    requests = [ask(p, i, seed=i) for i, p in enumerate(prompts(12))]
    engine = make()
    before = run(engine, requests)
    update = lora(model)[1]
    engine.set_policy(PolicyUpdate(8, {n: t * 1e19 for n, t in update.tensors.items()}, 1.5))
    with pytest.raises(EngineError, match="NaN"):
        run(engine, requests)
    engine.set_policy(BASE)
    # The longest first and alone: the others then join beside what the bad policy left in their rows.
    first, *others = sorted(requests, key=lambda request: -len(request.prompt_ids))
    engine.submit([first])
    started = [output for _ in range(4) for output in engine.step()]
    outputs = {output.request_id: output for output in started} | run(engine, others)
    assert {name: o.token_ids for name, o in outputs.items()} == {n: o.token_ids for n, o in before.items()}
