import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from swarmnode.training.logprob import completion_logprobs, head_is_plain
from swarmnode.training.packing import TrainingSample, micro_batches
from swarmnode.training.policy import Policy


def sample(prompt: list[int], completion: list[int]) -> TrainingSample:
    return TrainingSample(tuple(prompt), tuple(completion), 1.0, None, ())


MIXED = [sample([5, 6], [7, 1]), sample([9], [3, 4, 5, 6, 7, 8, 1]), sample([2, 3, 4, 5, 6, 7], [8])]


def rows(
    policy: Policy, samples: list[TrainingSample], max_tokens: int = 10_000
) -> dict[tuple[int, ...], torch.Tensor]:
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for batch in micro_batches(samples, max_tokens, torch.device("cpu")):
        values = completion_logprobs(policy.model, batch).split(
            [len(s.completion_ids) for s in batch.samples]
        )
        found.update({s.prompt_ids: v for s, v in zip(batch.samples, values, strict=True)})
    return found


def test_log_probabilities_in_a_batch_equal_those_of_single_samples(nudged: Policy) -> None:
    together = rows(nudged, MIXED)
    for one in MIXED:
        alone = rows(nudged, [one])[one.prompt_ids]
        torch.testing.assert_close(together[one.prompt_ids], alone, atol=1e-5, rtol=0)


def test_log_probabilities_equal_a_plain_forward_pass(nudged: Policy) -> None:
    for one in MIXED:
        ids = torch.tensor([one.prompt_ids + one.completion_ids])
        logprobs = nudged.model(input_ids=ids).logits.log_softmax(-1)[0]
        start = len(one.prompt_ids)
        expected = torch.stack([logprobs[start + i - 1, token] for i, token in enumerate(one.completion_ids)])
        torch.testing.assert_close(rows(nudged, [one])[one.prompt_ids], expected, atol=1e-5, rtol=0)


def test_temperature_is_the_one_of_sampling(nudged: Policy) -> None:
    one = MIXED[0]
    (batch,) = micro_batches([one], 100, torch.device("cpu"))
    logits = nudged.model(input_ids=batch.input_ids_BT).logits[0, 1:3] / 0.5
    expected = logits.log_softmax(-1)[range(2), list(one.completion_ids)]
    torch.testing.assert_close(completion_logprobs(nudged.model, batch, 0.5), expected, atol=1e-5, rtol=0)


def test_a_model_that_caps_its_logits_is_measured_with_the_cap() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    (batch,) = micro_batches([MIXED[1]], 100, torch.device("cpu"))
    logprobs = model(input_ids=batch.input_ids_BT).logits.log_softmax(-1)[0]
    expected = torch.stack([logprobs[i, token] for i, token in enumerate(MIXED[1].completion_ids)])
    assert not head_is_plain(model)
    found = completion_logprobs(model, batch, plain_head=False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_an_ordinary_head_is_recognised_with_and_without_an_adapter(nudged: Policy) -> None:
    assert head_is_plain(nudged.model)
