import math
from typing import Any

import pytest
import torch

from swarmnode.settings.config import TrainingConfig
from swarmnode.training.losses import StepSize, TokenBatch, policy_loss
from swarmnode.training.objective import TokenWeights, decoupled, icepop, token_weights, truncated

NAMES = ("none", "tis", "icepop", "decoupled")
RATIOS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0, math.inf)


def named(name: str, **settings: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"correction": name, **settings})


def of(name: str, *ratios: float) -> TokenWeights:
    return token_weights(torch.tensor(ratios, dtype=torch.float64).log(), named(name))


@pytest.mark.parametrize(
    ("name", "weights", "corrected"),
    [
        ("none", (1, 1, 1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 0, 0, 0, 0)),
        ("tis", (0, 0.25, 0.5, 1, 2, 2, 2, 2), (0, 0, 0, 0, 0, 1, 1, 1)),
        ("icepop", (0, 0, 0.5, 1, 2, 4, 0, 0), (1, 1, 0, 0, 0, 0, 1, 1)),
        ("decoupled", (0, 0.25, 0.5, 1, 2, 4, 0, 0), (0, 0, 0, 0, 0, 0, 1, 1)),
    ],
)
def test_each_name_is_its_closed_form(
    name: str, weights: tuple[float, ...], corrected: tuple[int, ...]
) -> None:
    found = of(name, *RATIOS)
    assert tuple(found.values_M.tolist()) == weights
    assert tuple(found.corrected_M.int().tolist()) == corrected


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_the_very_policy_that_trains_are_left_alone(name: str) -> None:
    found = token_weights(torch.zeros(5), named(name))
    assert torch.equal(found.values_M, torch.ones(5))
    assert not found.corrected_M.any()


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_flows_through_a_weight(name: str) -> None:
    log_ratio = torch.tensor([0.1, -0.1], requires_grad=True)
    assert not token_weights(log_ratio, named(name)).values_M.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_have_no_weights(name: str) -> None:
    assert of(name).values_M.shape == of(name).corrected_M.shape == (0,)


def test_corrected_tokens_are_counted() -> None:
    assert of("tis", 1.0, 3.0, 9.0).corrected == 2


def test_within_their_bounds_all_importance_weights_agree() -> None:
    ratio = torch.linspace(0.5, 2.0, 7)
    for found in (truncated(ratio, 2.0), icepop(ratio, 0.5, 2.0), decoupled(ratio, 2.0)):
        assert torch.equal(found.values_M, ratio)
        assert not found.corrected_M.any()


LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0, -0.4], dtype=torch.float64)
BEHAVIOUR = torch.tensor([-0.7, 0.9, 0.1, -1.5, 0.6], dtype=torch.float64).log_softmax(0)
REWARDS = torch.tensor([1.0, -0.5, 0.25, 2.0, 0.0], dtype=torch.float64)


def expected_gradient(sampled_by: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gradient of the loss by the logits, over every one-token answer as often as it is sampled."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    prox = logprobs.detach()
    for token, chance in enumerate(sampled_by.exp()):
        one = slice(token, token + 1)
        batch = TokenBatch(logprobs[one], prox[one], REWARDS[one], weights[one], None, None, lengths=[1])
        result = policy_loss(batch, StepSize(1, 1, 1), TrainingConfig())
        (chance * result.loss).backward(retain_graph=True)
    assert logits.grad is not None
    return logits.grad


def test_importance_weights_turn_off_policy_samples_into_the_on_policy_gradient() -> None:
    """E_mu[k grad] = E_prox[grad], exactly, by enumeration; and no weights, or truncated ones, are biased."""
    prox = LOGITS.log_softmax(0)
    ratio = (prox - BEHAVIOUR).exp()
    assert ratio.max() > 2.0, "there is something to truncate"
    on_policy = expected_gradient(prox, torch.ones_like(ratio))
    corrected = expected_gradient(BEHAVIOUR, decoupled(ratio, math.inf).values_M)
    torch.testing.assert_close(corrected, on_policy, atol=1e-14, rtol=0)

    bias_of_none = (expected_gradient(BEHAVIOUR, torch.ones_like(ratio)) - on_policy).norm()
    bias_of_tis = (expected_gradient(BEHAVIOUR, truncated(ratio, 2.0).values_M) - on_policy).norm()
    assert 0.01 < bias_of_tis < bias_of_none
