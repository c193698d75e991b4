"""With top-p below 1, engine and trainer mean the same distribution: the renormalised nucleus."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from transformers import TopPLogitsWarper

from swarmnode.extensions.generate.generate_engine import GenerateEngine
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.head import TokenLogprobs, head_logprobs, logits_logprobs
from swarmnode.model.nucleus import outside_nucleus
from swarmnode.model.policy import Policy
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Engine, Output, Request, SamplingParams
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample
from swarmnode.training.trainer import Trainer
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup

N, D, V = 17, 6, 29
PROMPT = (3, 5, 7, 11)
ANSWERS = 8
TOP_PS = pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(D, V, bias=False, dtype=dtype)
    hidden_ND = (2 * torch.randn(N, D, dtype=torch.float64)).to(dtype).requires_grad_()
    return head, hidden_ND, head(hidden_ND).argmax(-1)


def naive(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor, top_p: float) -> TokenLogprobs:
    """Of targets inside the nucleus, in the words of transformers and autograd."""
    logits_NV = head(hidden_ND) / 0.7
    all_NV = TopPLogitsWarper(top_p)(None, logits_NV).log_softmax(-1)
    finite_NV = all_NV.masked_fill(all_NV.isneginf(), 0.0)
    entropy_N = -(all_NV.exp() * finite_NV).sum(-1)
    return TokenLogprobs(all_NV[torch.arange(len(targets_N)), targets_N], entropy_N)


@TOP_PS
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_values_and_gradients_are_those_of_the_renormalised_nucleus(top_p: float, trained: bool) -> None:
    head, hidden_ND, targets_N = make_inputs()
    head.requires_grad_(trained)

    def gradient(found: TokenLogprobs) -> Tensor:
        return torch.autograd.grad((found.logprobs_N * torch.linspace(-1, 2, N)).sum(), hidden_ND)[0]

    expected = naive(head, hidden_ND, targets_N, top_p)
    expected_gradient = gradient(expected)
    for found in (
        head_logprobs(head, hidden_ND, targets_N, 0.7, top_p=top_p, chunk_rows=5),
        logits_logprobs(head(hidden_ND), targets_N, 0.7, top_p=top_p),
    ):
        torch.testing.assert_close(found.logprobs_N, expected.logprobs_N)
        torch.testing.assert_close(found.entropy_N, expected.entropy_N)
        torch.testing.assert_close(gradient(found), expected_gradient)


def test_a_token_outside_is_taken_in_as_the_least_likely() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    found = logits_logprobs(logits, torch.tensor([3]), top_p=0.6)
    assert found.logprobs_N.item() == pytest.approx(math.log(0.05 / 0.85))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_still_shows(bad: float) -> None:
    head, hidden_ND, targets_N = make_inputs()
    logits_NV = head(hidden_ND).detach()
    logits_NV[4, 7] = bad
    found = logits_logprobs(logits_NV, targets_N, top_p=0.8)
    assert found.logprobs_N.isnan().tolist() == [row == 4 for row in range(N)]
    assert not outside_nucleus(logits_NV, targets_N, 0.8)[4, 7]


def test_top_p_1_computes_what_it_did() -> None:
    head, hidden_ND, targets_N = make_inputs(torch.float32)
    plain = head_logprobs(head, hidden_ND, targets_N, 0.7)
    assert torch.equal(head_logprobs(head, hidden_ND, targets_N, 0.7, top_p=1.0).logprobs_N, plain.logprobs_N)


def sampled(engine: Engine, temperature: float, top_p: float) -> list[Output]:
    engine.submit(
        Request(str(i), PROMPT, SamplingParams(24, temperature, top_p, seed=i)) for i in range(ANSWERS)
    )
    outputs: list[Output] = []
    while len(outputs) < ANSWERS:
        outputs += engine.step()
    return outputs


def sharpened(base: LoadedModel) -> LoadedModel:
    """Whose next tokens are far from uniform: its nuclei are of all sizes."""
    with torch.no_grad():
        base.model.get_input_embeddings().weight.mul_(8)
    return base


@TOP_PS
@pytest.mark.parametrize("kind", [EmbeddedEngine, GenerateEngine])
@pytest.mark.parametrize("temperature", [0.8, 1.3])
def test_on_policy_tokens_have_an_importance_weight_of_one(
    base: LoadedModel, top_p: float, kind: type[EmbeddedEngine | GenerateEngine], temperature: float
) -> None:
    engine = kind(copy.deepcopy(sharpened(base).model), (), max_slots=8, max_length=64)
    outputs = sampled(engine, temperature, top_p)
    forward = Forward(
        Policy(base, PolicyConfig(lora_rank=4), seed=0),
        TrainingConfig(),
        temperature=temperature,
        top_p=top_p,
    )
    samples = [TrainingSample(PROMPT, o.token_ids, 1.0, o.logprobs, o.spans) for o in outputs]
    for batch in forward.batches(samples):
        found = forward.logprobs(batch).logprobs_N.detach()
        assert ((found - batch.own.logprobs_M).exp() - 1).abs().max() < 1e-4


def test_a_round_on_policy_reports_no_divergence_from_its_engine(base: LoadedModel) -> None:
    """The node's own path: groups in, a report out, with a second optimizer step against prox."""
    engine = EmbeddedEngine(copy.deepcopy(sharpened(base).model), (), max_slots=8, max_length=64)
    outputs = sampled(engine, 0.8, 0.7)
    group = RolloutGroup(
        Example(ExampleKey("fake", "1", 0, 0), "prompt"),
        tuple(Completion("", o.token_ids, o.logprobs, o.spans, "length") for o in outputs),
        tuple({"correct": float(i % 2)} for i in range(8)),
        "me",
        0,
    )
    trainer = Trainer(
        Policy(base, PolicyConfig(lora_rank=4), seed=0),
        TrainingConfig(sequences_per_step=4),
        temperature=0.8,
        top_p=0.7,
        max_tokens=24,
        seed=0,
        render=lambda prompt: PROMPT,
    )
    report = trainer.train([group], [])
    assert report.engine_gap is not None and report.engine_gap < 1e-4
    assert report.effective_sample_size == pytest.approx(1.0, abs=1e-4)
