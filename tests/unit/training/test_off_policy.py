import math
from dataclasses import replace

import pytest
import torch

from swarmnode.training.off_policy import (
    MeasuredTokens,
    effective_sample_size,
    kl_estimate,
    with_off_policy,
)
from swarmnode.training.records import TrainReport


def test_the_estimate_is_the_divergence_when_tokens_come_as_often_as_they_should() -> None:
    """Four tokens drawn from mu = (1/2, 1/4, 1/4) in exactly those shares."""
    mu, prox = (0.5, 0.25, 0.25), (0.2, 0.3, 0.5)
    drawn = [0, 0, 1, 2]
    log_ratio = torch.tensor([math.log(prox[i] / mu[i]) for i in drawn], dtype=torch.float64)
    from_mu_to_prox = sum(m * math.log(m / p) for m, p in zip(mu, prox, strict=True))
    from_prox_to_mu = sum(p * math.log(p / m) for m, p in zip(mu, prox, strict=True))
    assert kl_estimate(log_ratio) == pytest.approx(from_mu_to_prox, abs=1e-12)
    assert kl_estimate(log_ratio) != pytest.approx(from_prox_to_mu, abs=1e-3)


@pytest.mark.parametrize("log_ratio", [-3.0, -0.1, 0.1, 3.0])
def test_no_single_token_pulls_the_divergence_below_zero(log_ratio: float) -> None:
    estimate = kl_estimate(torch.tensor([log_ratio]))
    assert estimate is not None and estimate > 0


def test_equal_weights_are_worth_all_their_tokens() -> None:
    assert effective_sample_size(torch.full((8,), -0.7)) == pytest.approx(1.0)


def test_one_weight_above_all_others_is_worth_one_token() -> None:
    log_ratio = torch.tensor([2000.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert effective_sample_size(log_ratio) == pytest.approx(1 / 4)


def test_weights_one_and_three_are_worth_four_fifths() -> None:
    assert effective_sample_size(torch.tensor([1.0, 3.0]).log()) == pytest.approx(16 / 20)


def tokens(*log_ratios: float, age: int = 0, stale: bool = False) -> MeasuredTokens:
    count = len(log_ratios)
    return MeasuredTokens(
        torch.tensor(log_ratios, dtype=torch.float64),
        torch.full((count,), age),
        torch.full((count,), stale),
        torch.zeros(count, dtype=torch.bool),
    )


def test_without_own_tokens_nothing_is_known() -> None:
    for parts in ([], [tokens()], [tokens(), tokens()]):
        assert with_off_policy(TrainReport(tokens=5), parts) == TrainReport(tokens=5)


def test_on_policy_tokens_measure_zero() -> None:
    report = with_off_policy(TrainReport(), [tokens(), tokens(0.0, 0.0)])
    assert (report.off_policy_share, report.mean_age, report.max_age, report.stale_kv_share) == (0, 0, 0, 0)
    assert (report.behaviour_kl, report.engine_kl, report.engine_gap, report.corrected_share) == (0, 0, 0, 0)
    assert report.effective_sample_size == 1


def test_a_broken_engine_shows_through_stale_tokens() -> None:
    old, stale = tokens(1.5, -1.5, age=3), tokens(0.9, stale=True)
    sound = with_off_policy(TrainReport(), [old, stale, tokens(0.0)])
    broken = with_off_policy(TrainReport(), [old, stale, tokens(0.5)])
    assert (sound.engine_gap, sound.engine_kl) == (0.0, 0.0)
    assert broken.engine_gap == pytest.approx(0.5)
    assert broken.engine_kl == pytest.approx(math.exp(0.5) - 1.5)


def test_without_a_token_of_the_newest_version_the_engine_is_not_measured() -> None:
    report = with_off_policy(TrainReport(), [tokens(0.3, age=1), tokens(0.1, stale=True)])
    assert (report.engine_gap, report.engine_kl) == (None, None)
    assert report.behaviour_kl is not None and report.behaviour_kl > 0


def test_each_figure_is_of_the_tokens_it_names() -> None:
    newest = replace(tokens(0.2, -0.4), corrected_M=torch.tensor([True, False]))
    older = replace(tokens(1.0, 0.0, age=1), corrected_M=torch.tensor([True, True]))
    oldest, stale = tokens(-1.0, age=4), tokens(0.5, stale=True)
    parts = [oldest, newest, stale, older]
    report = with_off_policy(TrainReport(), parts)
    assert report.off_policy_share == pytest.approx(3 / 6)
    assert (report.mean_age, report.max_age) == (pytest.approx((2 * 1 + 4) / 6), 4)
    assert report.stale_kv_share == pytest.approx(1 / 6)
    assert report.corrected_share == pytest.approx(3 / 6)
    assert report.engine_gap == pytest.approx((0.2 + 0.4) / 2), "in either direction it is a gap"
    together = torch.cat([part.log_ratio_M for part in parts])
    assert report.effective_sample_size == pytest.approx(effective_sample_size(together))
    assert report.effective_sample_size is not None and report.effective_sample_size < 1
