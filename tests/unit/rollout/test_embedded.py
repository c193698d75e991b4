"""The embedded engine beyond the contract: continuity, shared prompts, moving tables, other number types."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from swarmnode.errors import ModelError
from swarmnode.rollout import prefill
from swarmnode.rollout.decoder import Decoder
from swarmnode.rollout.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Output, Request

Ask = Callable[..., Request]
Run = Callable[..., dict[str, Output]]


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
    requests = [ask(i, 10, 20) for i in range(16)]
    first = run(engine, requests)
    size = engine._slots._cache.shape
    assert all(run(engine, requests) == first for _ in range(5))
    assert engine._slots._cache.shape == size


def test_a_group_computes_its_prompt_once(
    tiny: PreTrainedModel, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    forward = Decoder.forward

    def counting(self: Decoder, tokens: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        if named:
            counted.append(len(tokens))
        return forward(self, tokens, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", counting)
    engine = EmbeddedEngine(tiny, (), max_slots=3)
    engine.submit([ask(99, 30, 4)])
    engine.abort()
    groups = [ask(8 * group + k, 10, 4, prompt_seed=group) for group in range(4) for k in range(8)]
    outputs = run(engine, groups)
    assert counted == [40]
    assert len({output.token_ids for output in outputs.values()}) == 32


def test_prompts_of_similar_length_share_a_batch_within_the_token_budget() -> None:
    prompts = [prefill.Prompt((1,) * n) for n in (3, 4, 700, 12, 600, 700, 40, 30)]
    lengths = [[len(p.ids) for p in batch] for batch in prefill._batches(prompts)]
    assert lengths == [[700, 700], [600], [40, 30], [12, 4, 3]]
    many = [prefill.Prompt((1,) * 100)] * 50
    assert [len(batch) for batch in prefill._batches(many)] == [20, 20, 10]


def test_bfloat16_agrees_with_transformers_in_bfloat16(tiny: PreTrainedModel, ask: Ask, run: Run) -> None:
    import copy

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
