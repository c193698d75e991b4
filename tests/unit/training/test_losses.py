import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.errors import ConfigError
from swarmnode.registry import SEAMS
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.losses import (
    MAX_LOG_RATIO,
    Advantage,
    Loss,
    LossOutput,
    StepSize,
    TokenBatch,
    against_the_others,
    centred,
    group_advantages,
    kl_to_reference,
    loss_of,
    policy_loss,
    standardised,
)
from tests.own_losses import OWN_LOSSES

LOSSES = tuple(SEAMS["loss"].ours)
TOKEN_CLIPPED: tuple[str, ...] = ("grpo", "dr_grpo", "dapo")
LOW, HIGH = 0.2, 0.28
WIDE_GSPO = "tests.own_losses:wide_gspo"
ONE_TOKEN = StepSize(sequences=1, tokens=1, max_tokens=1)


def test_the_config_knows_our_losses_and_no_others() -> None:
    with pytest.raises(ValueError, match=r"no such loss; available: grpo, .* as mymodule:name"):
        TrainingConfig(loss="gpro")
    with pytest.raises(ValueError, match="no such loss"):
        TrainingConfig(loss="my module:loss")


@pytest.mark.parametrize("loss", OWN_LOSSES)
def test_a_loss_of_ones_own_is_named_by_its_import_path(loss: str) -> None:
    assert isinstance(loss_of(TrainingConfig(loss=loss).loss), Loss)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("no_such_module:loss", "cannot be imported: No module named 'no_such_module'. install"),
        (
            "tests.own_losses:missing",
            "module 'tests.own_losses' has no attribute 'missing'. tests.own_losses has:",
        ),
        ("tests.own_losses:no_loss", "is a function, not a Loss. write no_loss = Loss"),
    ],
)
def test_a_loss_that_cannot_be_had_says_why_and_what_to_do(loss: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        loss_of(loss)


def test_each_loss_is_a_record_of_what_it_averages_and_which_advantage_belongs_to_it() -> None:
    assert {name: (loss_of(name).advantage, loss_of(name).mean_over) for name in LOSSES} == {
        "grpo": (standardised, "answers"),
        "dr_grpo": (centred, "answers_at_full_length"),
        "dapo": (standardised, "tokens"),
        "gspo": (standardised, "answers"),
        "cispo": (standardised, "tokens"),
        "rloo": (against_the_others, "answer_sums"),
    }


def test_each_loss_has_the_clip_of_its_paper() -> None:
    assert {name: (loss_of(name).clip.low, loss_of(name).clip.high) for name in LOSSES} == {
        "grpo": (0.2, 0.2),
        "dr_grpo": (0.2, 0.2),
        "dapo": (LOW, HIGH),
        "gspo": (3e-4, 4e-4),
        "cispo": (LOW, HIGH),
        "rloo": (LOW, HIGH),
    }


def named(loss: str, **settings: Any) -> TrainingConfig:
    """A loss with the usual clip, which gspo has not."""
    return TrainingConfig(loss=WIDE_GSPO if loss == "gspo" else loss, **settings)


def batch_of(
    log_ratios: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    logprob: float = -1.0,
    weights: Sequence[float] | None = None,
) -> TokenBatch:
    """Answers whose tokens are exp(log ratio) times as likely as before the round. float64."""
    lengths = [len(row) for row in log_ratios]
    log_ratio_N = torch.tensor([value for row in log_ratios for value in row], dtype=torch.float64)
    prox_N = torch.full_like(log_ratio_N, logprob) - log_ratio_N
    return TokenBatch(
        logprobs_N=torch.full_like(log_ratio_N, logprob).requires_grad_(),
        prox_N=prox_N,
        advantages_N=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(torch.tensor(lengths)),
        weights_N=torch.ones_like(prox_N) if weights is None else torch.tensor(weights, dtype=torch.float64),
        entropy_N=None,
        reference_N=None,
        lengths=lengths,
    )


def gradient(batch: TokenBatch, step: StepSize, config: TrainingConfig) -> tuple[LossOutput, list[float]]:
    found = policy_loss(batch, step, config)
    found.loss.backward()
    assert batch.logprobs_N.grad is not None
    return found, batch.logprobs_N.grad.tolist()


def one_token(loss: str, ratio: float, advantage: float) -> tuple[float, float, int]:
    """Loss, gradient by log-probability, and number of clipped tokens of a single token."""
    found, by_token = gradient(batch_of([[math.log(ratio)]], [advantage]), ONE_TOKEN, named(loss))
    return found.loss.item(), by_token[0], int(found.clipped)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "cispo"])
def test_a_token_alone_is_clipped_as_ppo_clips_it(loss: str) -> None:
    assert one_token(loss, 1.0, 2.0) == pytest.approx((-2.0, -2.0, 0)), "on policy"
    highest = 1.2 if loss in ("grpo", "dr_grpo") else 1.28
    assert one_token(loss, 1.19, 1.0) == pytest.approx((-1.19, -1.19, 0)), "a good token, pushed up"
    assert one_token(loss, 1.5, 1.0) == pytest.approx((-highest, 0.0, 1)), "and no further"
    assert one_token(loss, 0.85, -1.0) == pytest.approx((0.85, 0.85, 0)), "a bad token, pushed down"
    assert one_token(loss, 0.5, -1.0) == pytest.approx((0.8, 0.0, 1)), "and no further"
    assert one_token(loss, 2.0, -1.0) == pytest.approx((2.0, 2.0, 0)), "a bad token that became likelier"
    assert one_token(loss, 0.5, 1.0) == pytest.approx((-0.5, -0.5, 0)), "a good one that became unlikelier"


@pytest.mark.parametrize(
    "advantage",
    [
        lambda rewards: [1.0],
        lambda rewards: [1.0, 0.0] * 9,
        lambda rewards: [math.nan] * len(rewards),
        lambda rewards: None,
        lambda rewards: [None] * len(rewards),
        lambda rewards: ["good"] * len(rewards),
    ],
    ids=["too few", "too many", "not a number", "nothing", "several nothings", "words"],
)
def test_an_advantage_that_is_none_is_refused(advantage: Advantage) -> None:
    with pytest.raises(ConfigError, match=r"advantage of training\.loss returned .* for 2 rewards"):
        group_advantages([1.0, None, 0.0], advantage)


def test_cispo_bounds_the_weight_of_a_token_and_never_removes_its_gradient() -> None:
    assert one_token("cispo", 1.0, 2.0) == pytest.approx((2.0, -2.0, 0)), "advantage times log-probability"
    assert one_token("cispo", 1.5, 1.0) == pytest.approx((1.28, -1.28, 1))
    assert one_token("cispo", 1.5, -1.0) == pytest.approx((-1.28, 1.28, 1))
    assert one_token("cispo", 0.5, -1.0) == pytest.approx((-0.5, 0.5, 0)), "no lower clip"


THREE_AND_ONE = [[0.0, 0.1, -0.1], [0.05]]
STEP = StepSize(sequences=2, tokens=4, max_tokens=10)
R = [math.exp(x) for x in (0.0, 0.1, -0.1, 0.05)]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", [-2 * R[0] / 6, -2 * R[1] / 6, -2 * R[2] / 6, R[3] / 2]),
        ("dr_grpo", [-2 * R[0] / 20, -2 * R[1] / 20, -2 * R[2] / 20, R[3] / 20]),
        ("dapo", [-2 * R[0] / 4, -2 * R[1] / 4, -2 * R[2] / 4, R[3] / 4]),
        ("cispo", [-2 * R[0] / 4, -2 * R[1] / 4, -2 * R[2] / 4, R[3] / 4]),
        # The ratios of the first answer multiply to 1, so their geometric mean is 1 too.
        ("gspo", [-2 / 6, -2 / 6, -2 / 6, R[3] / 2]),
        ("rloo", [-2 / 2, -2 / 2, -2 / 2, R[3] / 2]),
    ],
)
def test_each_loss_is_its_closed_form(loss: str, expected: list[float]) -> None:
    """Two answers, of three tokens and of one, with advantages 2 and -1: gradient by log-probability."""
    _, by_token = gradient(batch_of(THREE_AND_ONE, [2.0, -1.0]), STEP, named(loss))
    assert by_token == pytest.approx(expected, abs=1e-12)


def test_grpo_averages_an_answer_before_the_step_and_dapo_does_not() -> None:
    batch = batch_of([[0.0] * 9, [0.0]], [1.0, -1.0])
    step = StepSize(sequences=2, tokens=10, max_tokens=16)
    assert policy_loss(batch, step, named("grpo")).loss.item() == pytest.approx(0.0)
    assert policy_loss(batch, step, named("dapo")).loss.item() == pytest.approx(-8 / 10)
    assert policy_loss(batch, step, named("dr_grpo")).loss.item() == pytest.approx(-8 / 32)


def test_dr_grpo_gives_a_token_the_same_push_however_long_its_answer_is() -> None:
    _, by_token = gradient(batch_of([[0.0] * 5, [0.0]], [1.0, 1.0]), STEP, named("dr_grpo"))
    assert by_token == pytest.approx([by_token[0]] * 6)


def test_gspo_clips_a_whole_answer_by_the_geometric_mean_of_its_ratios() -> None:
    # A token far outside the clip passes in an answer whose mean is inside, and the other way round.
    inside, outside = [0.5, -0.1, 0.2], [0.0, 0.9, 0.3]
    found, by_token = gradient(batch_of([inside, outside], [1.0, 1.0]), STEP, named("gspo"))
    mean = math.exp(0.2)
    assert by_token == pytest.approx([-mean / 6] * 3 + [0.0] * 3)
    assert found.loss.item() == pytest.approx(-(mean + 1 + HIGH) / 2)
    assert int(found.clipped) == 3


def test_gspo_has_the_gradient_of_its_definition() -> None:
    """Equation 5 of the paper, written down as it stands there and left to autograd."""
    batch = batch_of([[0.05, -0.1, 0.12], [0.4, -0.2], [-0.3, -0.4]], [0.7, -1.1, -0.5])
    step = StepSize(sequences=3, tokens=7, max_tokens=8)
    found, by_token = gradient(batch, step, named("gspo"))
    logprobs_N = batch.logprobs_N.detach().requires_grad_()
    terms: list[Tensor] = []
    for new, old, advantage in zip(
        logprobs_N.split([3, 2, 2]), batch.prox_N.split([3, 2, 2]), (0.7, -1.1, -0.5), strict=True
    ):
        ratio = (new - old).mean().exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage))
    expected = -torch.stack(terms).mean()
    expected.backward()
    assert logprobs_N.grad is not None
    assert found.loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert by_token == pytest.approx(logprobs_N.grad.tolist(), abs=1e-12)


def test_rloo_has_the_gradient_of_the_ratio_of_whole_answers() -> None:
    batch = batch_of([[0.05, -0.1, 0.12], [0.4, -0.2], [-0.3, -0.4]], [0.7, -1.1, -0.5])
    found, by_token = gradient(batch, StepSize(3, 7, 8), named("rloo"))
    logprobs_N = batch.logprobs_N.detach().requires_grad_()
    terms: list[Tensor] = []
    for new, old, advantage in zip(
        logprobs_N.split([3, 2, 2]), batch.prox_N.split([3, 2, 2]), (0.7, -1.1, -0.5), strict=True
    ):
        ratio = (new - old).sum().exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage))
    (-torch.stack(terms).mean()).backward()
    assert logprobs_N.grad is not None
    assert by_token == pytest.approx(logprobs_N.grad.tolist(), abs=1e-12)
    assert int(found.clipped) == 2, "the answer that already lost half of its probability"


def test_rloo_on_policy_is_reinforce_on_the_log_probability_of_the_answer() -> None:
    _, by_token = gradient(batch_of([[0.0] * 3, [0.0]], [2.0, -1.0]), STEP, named("rloo"))
    assert by_token == pytest.approx([-1.0, -1.0, -1.0, 0.5])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_scales_the_gradient_of_its_token_and_leaves_the_clip_where_it_is(loss: str) -> None:
    plain = batch_of([[0.1, 0.05], [0.1]], [1.0, -1.0])
    weighted = batch_of([[0.1, 0.05], [0.1]], [1.0, -1.0], weights=[0.5, 0.0, 2.0])
    _, ones = gradient(plain, STEP, named(loss))
    found, scaled = gradient(weighted, STEP, named(loss))
    assert scaled == pytest.approx([0.5 * ones[0], 0.0, 2.0 * ones[2]])
    assert int(found.clipped) == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_a_token_of_weight_zero_is_left_out_of_the_penalty_too(loss: str) -> None:
    config = named(loss, kl_coef=0.5)
    plain = batch_of([[0.0, 0.0]], [1.0], weights=[1.0, 0.0])
    batch = TokenBatch(
        plain.logprobs_N,
        plain.prox_N,
        plain.advantages_N,
        plain.weights_N,
        entropy_N=-plain.logprobs_N,
        reference_N=torch.tensor([-2.0, -3.0], dtype=torch.float64),
        lengths=[2],
    )
    _, by_token = gradient(batch, STEP, config)
    assert by_token[0] != 0.0
    assert by_token[1] == 0.0


def random_step(seed: int, lengths: Sequence[int]) -> TokenBatch:
    torch.manual_seed(seed)
    N = sum(lengths)
    logprobs_N = -torch.rand(N, dtype=torch.float64) * 3
    return TokenBatch(
        logprobs_N=logprobs_N.requires_grad_(),
        prox_N=(logprobs_N + 0.2 * torch.randn(N, dtype=torch.float64)).detach(),
        advantages_N=torch.randn(len(lengths), dtype=torch.float64).repeat_interleave(torch.tensor(lengths)),
        weights_N=2 * torch.rand(N, dtype=torch.float64),
        entropy_N=-2 * logprobs_N.exp() * logprobs_N,
        reference_N=(logprobs_N + 0.3 * torch.randn(N, dtype=torch.float64)).detach(),
        lengths=lengths,
    )


def part(batch: TokenBatch, answers: Sequence[int]) -> TokenBatch:
    """Some answers of a batch, in any order."""
    starts = [sum(batch.lengths[:answer]) for answer in range(len(batch.lengths))]
    places = [place for a in answers for place in range(starts[a], starts[a] + batch.lengths[a])]
    at = torch.tensor(places)
    assert batch.entropy_N is not None
    assert batch.reference_N is not None
    return TokenBatch(
        batch.logprobs_N[at],
        batch.prox_N[at],
        batch.advantages_N[at],
        batch.weights_N[at],
        batch.entropy_N[at],
        batch.reference_N[at],
        [batch.lengths[answer] for answer in answers],
    )


def totals(
    batch: TokenBatch, parts: Sequence[Sequence[int]], config: TrainingConfig
) -> tuple[Tensor, list[float]]:
    """Gradient, and loss with measurements, summed over the micro-batches of a step."""
    step = StepSize(len(batch.lengths), sum(batch.lengths), max_tokens=12)
    batch.logprobs_N.grad = None
    sums = [0.0] * 4
    for answers in parts:
        found = policy_loss(part(batch, answers), step, config)
        found.loss.backward(retain_graph=True)
        assert found.kl is not None
        assert found.entropy is not None
        measured = (found.loss, found.clipped, found.kl, found.entropy)
        sums = [total + float(value.detach()) for total, value in zip(sums, measured, strict=True)]
    assert batch.logprobs_N.grad is not None
    return batch.logprobs_N.grad.clone(), sums


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_split_of_a_step_into_micro_batches_has_the_same_gradient(loss: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=8))
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1))))
    bounds = [0, *cuts, len(lengths)]
    parts = [order[a:b] for a, b in pairwise(bounds)]
    batch = random_step(data.draw(st.integers(0, 1000)), lengths)
    config = named(loss, kl_coef=0.1)
    whole, whole_sums = totals(batch, [range(len(lengths))], config)
    split, split_sums = totals(batch, parts, config)
    torch.testing.assert_close(split, whole, atol=1e-12, rtol=0)
    assert split_sums == pytest.approx(whole_sums, abs=1e-11)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("new", "old"), [(-1e4, -0.1), (-0.1, -1e4), (-1e4, -1e4)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite_in_single_precision(
    loss: str, new: float, old: float, advantage: float
) -> None:
    logprobs_N = torch.tensor([new, -0.5, new], requires_grad=True)
    batch = TokenBatch(
        logprobs_N,
        prox_N=torch.tensor([old, -0.5, old]),
        advantages_N=torch.full((3,), advantage),
        weights_N=torch.tensor([1.0, 1.0, 0.0]),
        entropy_N=-logprobs_N,
        reference_N=torch.tensor([old, -0.5, old]),
        lengths=[2, 1],
    )
    found = policy_loss(batch, StepSize(2, 3, 4), named(loss, kl_coef=0.1))
    found.loss.backward()
    assert logprobs_N.grad is not None
    assert torch.isfinite(found.loss)
    assert torch.isfinite(logprobs_N.grad).all()
    assert torch.isfinite(logprobs_N.grad.norm())


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "cispo"])
def test_a_bad_token_beyond_the_bound_is_still_pushed_down(loss: str) -> None:
    _, by_token = gradient(batch_of([[MAX_LOG_RATIO + 5]], [-1.0]), ONE_TOKEN, named(loss))
    assert by_token[0] == pytest.approx(math.exp(MAX_LOG_RATIO))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_good_token_that_became_far_too_unlikely_is_still_pulled_up(loss: str) -> None:
    _, by_token = gradient(batch_of([[-(MAX_LOG_RATIO + 5)]], [1.0]), ONE_TOKEN, named(loss))
    bound = -MAX_LOG_RATIO - (5 if loss == "cispo" else 0)
    assert by_token[0] == pytest.approx(-math.exp(bound), rel=1e-6)


def test_a_token_that_the_base_would_never_say_is_still_pushed_down() -> None:
    logprobs_N = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    distance = MAX_LOG_RATIO + 5
    kl_N = kl_to_reference(logprobs_N, logprobs_N.detach() - distance)
    (pull,) = torch.autograd.grad(kl_N.sum(), logprobs_N)
    assert kl_N.item() == pytest.approx(distance - 1)
    assert pull.item() == pytest.approx(1.0)


def test_without_a_distance_there_is_no_divergence_and_no_pull() -> None:
    batch = batch_of([[0.0]], [0.0])
    same = TokenBatch(
        batch.logprobs_N,
        batch.prox_N,
        batch.advantages_N,
        batch.weights_N,
        entropy_N=None,
        reference_N=batch.logprobs_N.detach(),
        lengths=[1],
    )
    found, by_token = gradient(same, ONE_TOKEN, named("dapo", kl_coef=1.0))
    assert (found.loss.item(), by_token) == (0.0, [0.0])
    assert found.kl is not None
    assert found.kl.item() == 0.0


THETA = torch.tensor([0.3, -1.0, 0.8, 0.0, -0.4], dtype=torch.float64)
BASE = torch.tensor([-0.7, 0.9, 0.1, -1.5, 0.6], dtype=torch.float64).log_softmax(0)


def test_the_mean_of_k3_is_the_divergence_and_its_gradient_that_of_the_other_one() -> None:
    """By enumeration of every token: E[k3] = KL(theta || base), E[grad k3] = grad KL(base || theta)."""
    logits = THETA.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    chances = logprobs.detach().exp()
    mean = (chances * kl_to_reference(logprobs, BASE)).sum()
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    assert mean.item() == pytest.approx((chances * (logprobs - BASE)).sum().item(), abs=1e-12)
    other = (BASE.exp() * (BASE - logprobs)).sum()
    (expected,) = torch.autograd.grad(other, logits)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def with_reference(batch: TokenBatch) -> TokenBatch:
    """The batch with an entropy, and a base under which every token is half as likely."""
    return replace(
        batch,
        entropy_N=-batch.logprobs_N,
        reference_N=batch.logprobs_N.detach() - math.log(2.0),
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_penalty_is_shared_out_as_the_objective_is(loss: str) -> None:
    """With advantage 0 it alone is left. k3's gradient is 1 - q."""
    batch = with_reference(batch_of(THREE_AND_ONE, [0.0, 0.0]))
    share = {"grpo": 1 / 6, "gspo": 1 / 6, "dr_grpo": 1 / 20, "rloo": 1 / 2}.get(loss, 1 / 4)
    last = {"grpo": 1 / 2, "gspo": 1 / 2}.get(loss, share)
    found, by_token = gradient(batch, STEP, named(loss, kl_coef=0.3))
    pull = 0.3 * (1 - 0.5)
    assert by_token == pytest.approx([pull * share] * 3 + [pull * last])
    assert found.kl is not None
    assert found.entropy is not None
    assert found.kl.item() == pytest.approx(4 * (0.5 - 1 + math.log(2.0)))
    assert found.entropy.item() == pytest.approx(4.0)
    assert not found.kl.requires_grad
    assert not found.entropy.requires_grad


def test_what_is_only_measured_moves_nothing() -> None:
    batch = random_step(0, [3, 2])
    found = policy_loss(batch, StepSize(2, 5, 4), named("dapo"))
    found.loss.backward()
    assert batch.logprobs_N.grad is not None
    alone = TokenBatch(
        batch.logprobs_N.detach().requires_grad_(),
        batch.prox_N,
        batch.advantages_N,
        batch.weights_N,
        entropy_N=None,
        reference_N=None,
        lengths=[3, 2],
    )
    other, by_token = gradient(alone, StepSize(2, 5, 4), named("dapo"))
    assert by_token == batch.logprobs_N.grad.tolist()
    assert (other.kl, other.entropy) == (None, None)


def test_what_is_measured_counts_every_token_whatever_its_weight() -> None:
    batch = with_reference(batch_of([[math.log(1.5)] * 3], [1.0], weights=[1.0, 0.0, 0.5]))
    found = policy_loss(batch, StepSize(sequences=1, tokens=3, max_tokens=3), named("dapo", kl_coef=0.0))
    assert found.kl is not None and found.entropy is not None
    assert int(found.clipped) == 3
    assert found.kl.item() == pytest.approx(3 * (0.5 - 1 + math.log(2.0)))
    assert found.entropy.item() == pytest.approx(3.0)
    assert found.loss.item() == pytest.approx(-1.28 * 1.5 / 3), "without a coefficient it is only measured"


def test_a_coefficient_without_its_values_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="kl_coef needs reference_N"):
        policy_loss(batch_of([[0.0]], [1.0]), ONE_TOKEN, named("dapo", kl_coef=0.1))


@pytest.mark.parametrize("loss", TOKEN_CLIPPED)
def test_decoupled_ppo_and_truncated_importance_sampling_come_in_as_weights(loss: str) -> None:
    """min(r A, clip(r) A) times prox / mu: equation 2 of AReaL, whatever is averaged."""
    k = [1.5, 0.7, 3.0, 0.0]
    batch = batch_of(THREE_AND_ONE, [2.0, -1.0], weights=k)
    _, by_token = gradient(batch, STEP, named(loss))
    _, plain = gradient(batch_of(THREE_AND_ONE, [2.0, -1.0]), STEP, named(loss))
    assert by_token == pytest.approx([a * b for a, b in zip(k, plain, strict=True)])
