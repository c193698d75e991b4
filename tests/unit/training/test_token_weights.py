import math

import torch

from swarmnode.settings.config import TrainingConfig
from swarmnode.training.losses import StepSize, TokenBatch, policy_loss
from swarmnode.training.token_weights import LARGEST_WEIGHT, own_weights, token_weights

RATIOS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0, math.inf)


def test_weights_are_the_ratios_up_to_the_cap() -> None:
    weights, corrected = own_weights(torch.tensor(RATIOS, dtype=torch.float64).log())
    assert weights.tolist() == [0, 0.25, 0.5, 1, 2, 2, 2, 2]
    assert corrected.tolist() == [False] * 5 + [True] * 3


def test_tokens_of_the_very_policy_that_trains_are_left_alone() -> None:
    weights, corrected = own_weights(torch.zeros(5))
    assert torch.equal(weights, torch.ones(5))
    assert not corrected.any()


def test_no_gradient_flows_through_a_weight() -> None:
    assert not own_weights(torch.tensor([0.1, -0.1], requires_grad=True))[0].requires_grad


def test_no_tokens_have_no_weights() -> None:
    assert [found.shape for found in own_weights(torch.tensor([]))] == [(0,), (0,)]


def test_tokens_that_others_sampled_count_in_full() -> None:
    own = torch.tensor([False, True, True, False])
    found = token_weights(torch.zeros(4), own, torch.tensor([0.5, 2.0]), None)
    assert found.tolist() == [1.0, 0.5, 2.0, 1.0]


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
    assert ratio.max() > LARGEST_WEIGHT, "there is something to truncate"
    on_policy = expected_gradient(prox, torch.ones_like(ratio))
    corrected = expected_gradient(BEHAVIOUR, ratio)
    torch.testing.assert_close(corrected, on_policy, atol=1e-14, rtol=0)

    bias_of_none = (expected_gradient(BEHAVIOUR, torch.ones_like(ratio)) - on_policy).norm()
    bias_of_tis = (expected_gradient(BEHAVIOUR, own_weights(ratio.log())[0]) - on_policy).norm()
    assert 0.01 < bias_of_tis < bias_of_none
