import math

import pytest
import torch

from swarmnode.training.loss import clipped_policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "normaliser": 1.0}


def loss(ratio: float, advantage: float, weight: float = 1.0) -> tuple[float, float, int]:
    """Loss, gradient by log-probability, and number of clipped tokens of a single token."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = clipped_policy_loss(
        logprob, torch.zeros(1), torch.tensor([advantage]), torch.tensor([weight]), **CLIP
    )
    result.loss.backward()
    assert logprob.grad is not None
    return result.loss.item(), logprob.grad.item(), int(result.clipped)


def test_on_policy_the_gradient_is_the_advantage() -> None:
    assert loss(1.0, 2.0) == pytest.approx((-2.0, -2.0, 0))


def test_a_good_token_is_pushed_up_to_the_upper_clip_and_no_further() -> None:
    assert loss(1.27, 1.0) == pytest.approx((-1.27, -1.27, 0))
    assert loss(1.5, 1.0) == pytest.approx((-1.28, 0.0, 1))


def test_a_bad_token_is_pushed_down_to_the_lower_clip_and_no_further() -> None:
    assert loss(0.85, -1.0) == pytest.approx((0.85, 0.85, 0))
    assert loss(0.5, -1.0) == pytest.approx((0.8, 0.0, 1))


def test_a_bad_token_that_became_likelier_is_never_clipped() -> None:
    assert loss(2.0, -1.0) == pytest.approx((2.0, 2.0, 0))


def test_a_weight_scales_loss_and_gradient_and_leaves_the_clip_where_it_is() -> None:
    assert loss(1.1, 2.0, weight=0.5) == pytest.approx((-1.1, -1.1, 0))
    assert loss(1.5, 1.0, weight=0.5) == pytest.approx((-0.64, 0.0, 1))
    assert loss(1.1, 2.0, weight=0.0) == pytest.approx((0.0, 0.0, 0))


def test_the_normaliser_makes_the_split_into_micro_batches_irrelevant() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(4, 10, dtype=torch.float64)
    clip = {**CLIP, "normaliser": 10.0}
    whole = clipped_policy_loss(*tokens, **clip).loss
    parts = [clipped_policy_loss(*tokens[:, a:b], **clip).loss for a, b in ((0, 3), (3, 4), (4, 10))]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-12)
