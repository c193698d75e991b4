"""The embedded engine beyond the contract: continuity, shared prompts, moving tables, other number types."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from swarmnode.errors import ModelError
from swarmnode.extensions.native import compiler
from swarmnode.rollout.decode.adapters.policy_mix import PolicyMix
from swarmnode.rollout.decode.decoder import Decoder
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.decode.matrix import PackedMatrix, PlainMatrix, matrix, native_on_cpu
from swarmnode.rollout.decode.prompts.pass_batches import BATCH_TOKENS, alike
from swarmnode.rollout.decode.prompts.prompt_store import PromptStore, StoredPrompt
from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import BASE_VERSION, Output, PolicyUpdate, Request

Ask = Callable[..., Request]
Run = Callable[..., dict[str, Output]]


def random_policy(model: PreTrainedModel, version: int) -> PolicyUpdate:
    generator = torch.Generator().manual_seed(version)
    shapes = {"q_proj": (64, 64), "down_proj": (64, 96)}
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model.config.num_hidden_layers):
        for name, (rows, columns) in shapes.items():
            block = "self_attn" if name == "q_proj" else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.2
    return PolicyUpdate(version, tensors, 1.0)


def test_a_freed_row_is_taken_in_the_same_step(tiny: PreTrainedModel, ask: Ask) -> None:
    """Two slots and 24 tokens in all take 12 steps: nobody idles while anybody waits."""
    engine = EmbeddedEngine(tiny, (), max_slots=2)
    engine.submit([ask(i, 5, n) for i, n in enumerate((1, 7, 3, 2, 6, 5))])
    finished: list[str] = []
    for _ in range(12):
        finished += [output.request_id for output in engine.step()]
    assert len(finished) == 6
    assert engine.step() == ()


def test_nobody_notices_how_the_tables_move(tiny: PreTrainedModel, ask: Ask, run: Run) -> None:
    """Requests of all sizes come and go while rows are added, closed up, shifted and made longer."""
    rng = random.Random(0)
    requests = [ask(i, rng.choice((1, 3, 20, 90)), rng.choice((1, 2, 9, 70))) for i in range(40)]
    engine = EmbeddedEngine(tiny, (), max_slots=7)
    outputs: list[Output] = []
    for start in range(0, 40, 8):
        engine.submit(requests[start : start + 8])
        for _ in range(rng.randrange(60)):
            outputs += engine.step()
        if start == 16:
            outputs += engine.abort(["17", "23"])
    outputs += run(engine, []).values()
    assert len(outputs) == 40
    alone = EmbeddedEngine(tiny, (), max_slots=1)
    for output in outputs:
        expected = run(alone, [requests[int(output.request_id)]])[output.request_id]
        count = len(output.token_ids)
        assert output.token_ids == expected.token_ids[:count]
        assert output.logprobs == pytest.approx(expected.logprobs[:count], abs=1e-4)
        assert output.finish == "abort" or count == len(expected.token_ids)


def test_a_long_prompt_joins_short_ones(tiny: PreTrainedModel, ask: Ask, run: Run) -> None:
    """It ends where the short ones are now, so they have to make room before their own beginning."""
    requests = [ask(0, 4, 40), ask(1, 100, 30), ask(2, 200, 5)]
    engine = EmbeddedEngine(tiny, (), max_slots=3)
    for request in requests:
        engine.submit([request])
        for _ in range(4):
            assert not engine.step()
    together = run(engine, [])
    for request in requests:
        alone = run(EmbeddedEngine(tiny, (), max_slots=1), [request])[request.request_id]
        assert together[request.request_id].token_ids == alone.token_ids
        assert together[request.request_id].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_one_engine_serves_round_after_round_in_the_same_memory(
    tiny: PreTrainedModel, ask: Ask, run: Run
) -> None:
    engine = EmbeddedEngine(tiny, (), max_slots=8)
    requests = [ask(i, 10, 20 + 10 * i) for i in range(16)]
    first = run(engine, requests)
    tables = [table.data_ptr() for band in engine._slots._bands for table in band.lines]
    assert all(run(engine, requests) == first for _ in range(3))
    assert [table.data_ptr() for band in engine._slots._bands for table in band.lines] == tables
    engine.sleep()
    assert all(table.numel() == 0 for band in engine._slots._bands for table in band.lines)


def test_a_group_computes_its_prompt_once(
    tiny: PreTrainedModel, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    forward = Decoder.forward

    def counting(self: Decoder, layers: Layers, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        if len(rest) == 2:  # the wanted tokens as well: whole sequences, not one token each
            counted.append(len(tokens))
        return forward(self, layers, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", counting)
    engine = EmbeddedEngine(tiny, (), max_slots=3)
    engine.submit([ask(99, 30, 4)])
    engine.abort()
    groups = [ask(8 * group + k, 10, 4, prompt_seed=group) for group in range(4) for k in range(8)]
    outputs = run(engine, groups)
    assert counted == [40]
    assert len({output.token_ids for output in outputs.values()}) == 32


def test_a_group_that_comes_in_two_parts_computes_its_prompt_once(
    tiny: PreTrainedModel, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = PromptStore._compute_batch

    def counting(self: PromptStore, prompts: list[StoredPrompt], layers: Layers) -> None:
        computed.append(len(prompts))
        compute(self, prompts, layers)

    monkeypatch.setattr(PromptStore, "_compute_batch", counting)
    engine = EmbeddedEngine(tiny, (), max_slots=3)
    for part in range(3):
        run(engine, [ask(2 * part + k, 10, 4, prompt_seed=0) for k in range(2)])
    assert computed == [1]
    engine.set_policy(random_policy(tiny, version=1))
    run(engine, [ask(9, 10, 4, prompt_seed=0)])
    assert computed == [1, 1]


def test_prompts_that_nobody_waits_with_are_not_kept_for_ever(
    tiny: PreTrainedModel, ask: Ask, run: Run
) -> None:
    engine = EmbeddedEngine(tiny, (), max_slots=8)
    run(engine, [ask(i, 100, 1) for i in range(40)])
    kept = engine._prompts._left.values()
    assert 0 < sum(len(prompt.ids) for prompt in kept) <= BATCH_TOKENS
    engine.sleep()
    assert not kept


def test_prompts_of_similar_length_share_a_batch_within_the_token_budget() -> None:
    lengths = (3, 4, 700, 12, 600, 700, 40, 30)
    batches = [[lengths[index] for index in batch] for batch in alike(lengths)]
    assert batches == [[700, 700], [600], [40, 30], [12, 4, 3]]
    assert [len(batch) for batch in alike([100] * 50)] == [20, 20, 10]


def test_what_was_computed_ahead_is_forgotten_at_an_update(tiny: PreTrainedModel, ask: Ask, run: Run) -> None:
    """Two prompts of one batch: the second waits, computed, while the policy changes under it."""
    update = random_policy(tiny, version=1)
    requests = [ask(i, 10, 4) for i in range(2)]
    engine = EmbeddedEngine(tiny, (), max_slots=1)
    engine.submit(requests)
    engine.step()
    engine.set_policy(update)
    changed = EmbeddedEngine(tiny, (), max_slots=1)
    changed.set_policy(update)
    waited, fresh = run(engine, [])["1"], run(changed, requests)["1"]
    assert waited.token_ids == fresh.token_ids
    assert waited.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_one_live_policy_costs_no_reordering(
    tiny: PreTrainedModel, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixes: list[int] = []
    of = PolicyMix.of

    def counting(layers_of_rows: list[Layers], device: torch.device) -> PolicyMix:
        mixes.append(len(layers_of_rows))
        return of(layers_of_rows, device)

    monkeypatch.setattr(PolicyMix, "of", counting)
    engine = EmbeddedEngine(tiny, (), max_slots=4)
    engine.submit([ask(0, 5, 8), replace(ask(1, 5, 8), version=BASE_VERSION)])
    engine.step()
    engine.set_policy(random_policy(tiny, version=1), "keep")
    run(engine, [])
    assert mixes == [2] * 7
    engine.set_policy(random_policy(tiny, version=2), "keep")
    run(engine, [ask(i, 5, 8) for i in range(4)])
    assert mixes == [2] * 7


def test_an_update_reuses_layers_unless_somebody_stays_on_them(
    tiny: PreTrainedModel, ask: Ask, run: Run
) -> None:
    engine = EmbeddedEngine(tiny, (), max_slots=4)
    layers = engine._newest.layers
    engine.set_policy(random_policy(tiny, version=1))
    assert engine._newest.layers is layers
    engine.submit([replace(ask(0, 5, 8), version=1)])
    engine.step()
    engine.set_policy(random_policy(tiny, version=2))
    assert engine._newest.layers is not layers
    run(engine, [])
    assert engine.stats().live_versions == (2,)


def test_a_number_given_twice_names_the_policy_that_is_still_sampled_from(
    tiny: PreTrainedModel, ask: Ask, run: Run
) -> None:
    first, again = (replace(random_policy(tiny, seed), version=1) for seed in (1, 2))
    request = replace(ask(0, 5, 12), version=1)
    alone = EmbeddedEngine(tiny, ())
    alone.set_policy(first)
    expected = run(alone, [request])["0"]
    engine = EmbeddedEngine(tiny, ())
    engine.set_policy(first)
    engine.submit([request])
    engine.step()
    for update in (again, random_policy(tiny, version=2)):
        engine.set_policy(update)
    assert engine.stats().live_versions == (1, 2)
    late = replace(request, request_id="late")
    outputs = run(engine, [late])
    assert outputs["0"].token_ids == outputs["late"].token_ids == expected.token_ids


@pytest.mark.parametrize(("dtype", "out", "width"), [(torch.float32, 300, 256), (torch.bfloat16, 24, 16)])
def test_a_packed_matrix_is_the_plain_one(dtype: torch.dtype, out: int, width: int) -> None:
    if not native_on_cpu(dtype):
        pytest.skip(f"this CPU does not multiply {dtype}, so nothing is packed for it")
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(size, generator=generator).to(dtype) for size in ((out, width), (out,), (5, width))
    )
    plain, packed = PlainMatrix(weight / 4, bias), matrix(weight / 4, bias)
    assert isinstance(packed, PackedMatrix)
    torch.testing.assert_close(packed(x), plain(x))
    sums = [torch.ones(5, out, dtype=dtype) for _ in range(2)]
    plain.add_(sums[0], x)
    packed.add_(sums[1], x)
    # In bfloat16 the product is rounded before it is added, as `transformers` does it.
    rounding = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(sums[1], sums[0], atol=rounding, rtol=rounding)


def test_bfloat16_agrees_with_transformers_in_bfloat16(tiny: PreTrainedModel, ask: Ask, run: Run) -> None:
    model = copy.deepcopy(tiny).bfloat16()
    requests = [ask(i, 5 + 7 * i, 12) for i in range(4)]
    outputs = run(EmbeddedEngine(model, (), max_slots=3), requests)
    for request in requests:
        output = outputs[request.request_id]
        with torch.no_grad():
            ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
            logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        # Both round at every layer, at different places: about three significant digits.
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=0.15, rtol=0.02)


def test_yarn_rotations_are_scaled(ask: Ask, run: Run) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    request = ask(0, 40, 20)
    output = run(EmbeddedEngine(model, ()), [request])["0"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*request.prompt_ids, *output.token_ids]])).logits[0, 39:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_a_model_it_cannot_run_is_refused_with_the_reason() -> None:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_act="gelu",
    )
    with pytest.raises(ModelError, match="gelu"):
        EmbeddedEngine(LlamaForCausalLM(config), ())


def test_an_engine_samples_the_same_with_and_without_kernels(
    tiny: PreTrainedModel, ask: Ask, run: Run
) -> None:
    requests = [ask(i, 3 + 9 * i, 70 - 5 * i) for i in range(8)]
    found = run(EmbeddedEngine(tiny, (), max_slots=5), requests)
    with compiler.turned_off():
        expected = run(EmbeddedEngine(tiny, (), max_slots=5), requests)
    for name, output in found.items():
        assert output.token_ids == expected[name].token_ids
        assert output.logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
