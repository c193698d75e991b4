from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from swarmnode.model.packable import prepare_for_packing
from swarmnode.model.policy import Policy
from swarmnode.training.forward import TokenLogprobs, completion_logprobs, head_of
from swarmnode.training.packing import MicroBatch, TrainingSample, micro_batches

CPU = torch.device("cpu")


def sample(prompt: list[int], completion: list[int]) -> TrainingSample:
    return TrainingSample(tuple(prompt), tuple(completion), 1.0, None, ())


MIXED = [sample([5, 6], [7, 1]), sample([9], [3, 4, 5, 6, 7, 8, 1]), sample([2, 3, 4, 5, 6, 7], [8])]


def together(samples: list[TrainingSample]) -> MicroBatch:
    """Right-padded, which every model takes; packed batches are compared with these in test_packing.py."""
    (batch,) = micro_batches(samples, 10_000, CPU, packed=False)
    return batch


def measured(policy: Policy, batch: MicroBatch, temperature: float = 1.0) -> TokenLogprobs:
    return completion_logprobs(policy.model, batch, temperature, head=head_of(policy.model))


def by_prompt(policy: Policy, samples: list[TrainingSample]) -> dict[tuple[int, ...], Tensor]:
    batch = together(samples)
    rows = measured(policy, batch).logprobs_N.split(batch.completion_lengths)
    return {s.prompt_ids: row for s, row in zip(batch.samples, rows, strict=True)}


def whole_forward(model: torch.nn.Module, one: TrainingSample, temperature: float = 1.0) -> TokenLogprobs:
    """From the full logits of one sample on its own."""
    logits = model(input_ids=torch.tensor([one.prompt_ids + one.completion_ids])).logits[0]
    start = len(one.prompt_ids) - 1
    rows = (logits[start : start + len(one.completion_ids)] / temperature).log_softmax(-1)
    logprobs = rows[range(len(rows)), list(one.completion_ids)]
    return TokenLogprobs(logprobs, -(rows.exp() * rows).sum(-1))


SIZES: dict[str, int] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def capped(cap: float) -> torch.nn.Module:
    """A model that squeezes its logits after the head; they reach about 5."""
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=cap)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)
    return model.requires_grad_(False)


def scaled() -> torch.nn.Module:
    """A model that divides its logits."""
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)).eval().requires_grad_(False)


def test_log_probabilities_in_a_batch_equal_those_of_single_samples(nudged: Policy) -> None:
    in_batch = by_prompt(nudged, MIXED)
    for one in MIXED:
        alone = by_prompt(nudged, [one])[one.prompt_ids]
        torch.testing.assert_close(in_batch[one.prompt_ids], alone, atol=1e-5, rtol=0)


def test_log_probabilities_and_entropies_equal_a_plain_forward_pass(nudged: Policy) -> None:
    for one in MIXED:
        found, expected = measured(nudged, together([one])), whole_forward(nudged.model, one)
        torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.entropy_N, expected.entropy_N, atol=1e-5, rtol=0)


def test_temperature_is_the_one_of_sampling(nudged: Policy) -> None:
    found, expected = measured(nudged, together(MIXED[:1]), 0.5), whole_forward(nudged.model, MIXED[0], 0.5)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy_N, expected.entropy_N, atol=1e-5, rtol=0)


def test_the_adapter_gets_the_gradient_of_a_plain_forward_pass(nudged: Policy) -> None:
    parameters = list(nudged.trainable().values())

    def gradient(found: TokenLogprobs) -> tuple[Tensor, ...]:
        return torch.autograd.grad(found.logprobs_N.sum(), parameters)

    head = nudged.model.get_output_embeddings()
    found = completion_logprobs(nudged.model, together(MIXED[1:2]), 0.8, head=head)
    assert not found.entropy_N.requires_grad
    expected = whole_forward(nudged.model, MIXED[1], 0.8)
    torch.testing.assert_close(gradient(found), gradient(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", [capped(0.5), capped(30.0), scaled()], ids=["cap", "wide cap", "scale"])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_logits_that_are_capped_or_scaled_after_the_head_are_measured_as_the_model_makes_them(
    model: torch.nn.Module, in_chunks: bool
) -> None:
    head = head_of(model)
    assert head is not None and head is not model.get_output_embeddings()
    found = completion_logprobs(model, together(MIXED[1:2]), 0.7, head=head if in_chunks else None)
    expected = whole_forward(model, MIXED[1], 0.7)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy_N, expected.entropy_N, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cap", [None, 20.0])
def test_a_head_that_is_not_what_the_config_says_is_left_to_the_model(cap: float | None) -> None:
    """A cap of 30 changes logits of 5 by one part in a hundred."""
    model = capped(30.0)
    model.config.final_logit_softcapping = 30.0
    told = SimpleNamespace(to_dict=lambda: {"final_logit_softcapping": cap})
    lying = SimpleNamespace(
        get_output_embeddings=model.get_output_embeddings,
        config=SimpleNamespace(get_text_config=lambda: told),
        device=model.device,
        dtype=model.dtype,
        base_model=model.base_model,
    )

    class Lying:
        def __getattr__(self, name: str) -> object:
            return getattr(lying, name)

        def __call__(self, **arguments: object) -> object:
            return model(**arguments)

    assert head_of(Lying()) is None


@pytest.mark.parametrize("in_chunks", [True, False])
def test_a_bf16_model_is_measured_in_float32(nudged: Policy, in_chunks: bool) -> None:
    model = nudged.model.to(torch.bfloat16)
    head = model.get_output_embeddings() if in_chunks else None
    found = completion_logprobs(model, together(MIXED), head=head)
    assert found.logprobs_N.dtype == found.entropy_N.dtype == torch.float32


def test_an_ordinary_head_is_recognised_with_and_without_an_adapter(nudged: Policy) -> None:
    assert head_of(nudged.model) is nudged.model.get_output_embeddings()
    with nudged.peft_model.disable_adapter():
        assert head_of(nudged.model) is nudged.model.get_output_embeddings()


def test_a_packed_batch_gives_the_values_of_a_padded_one(nudged: Policy) -> None:
    assert prepare_for_packing(nudged.model) is None
    (packed,) = micro_batches(MIXED, 10_000, CPU, packed=True)
    rows = measured(nudged, packed).logprobs_N.split(packed.completion_lengths)
    padded = by_prompt(nudged, MIXED)
    for one, row in zip(packed.samples, rows, strict=True):
        torch.testing.assert_close(row, padded[one.prompt_ids], atol=1e-5, rtol=0)
