import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import TrainingConfig
from swarmnode.training.advantage import LossName, group_advantages

LOSSES: tuple[LossName, ...] = get_args(LossName)
STANDARDISED: tuple[LossName, ...] = ("grpo", "dapo", "gspo", "cispo")
rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=2, max_size=16)


def test_the_names_are_those_of_the_setting() -> None:
    assert get_args(TrainingConfig.model_fields["loss"].annotation) == LOSSES


@pytest.mark.parametrize("loss", LOSSES)
def test_a_group_of_equal_rewards_teaches_nothing(loss: LossName) -> None:
    assert group_advantages([1.0, 1.0, 1.0], loss) is None


@pytest.mark.parametrize("loss", LOSSES)
def test_a_group_with_one_scored_completion_teaches_nothing(loss: LossName) -> None:
    assert group_advantages([1.0, None, None], loss) is None


@pytest.mark.parametrize("loss", LOSSES)
def test_an_unscored_completion_is_not_a_zero(loss: LossName) -> None:
    with_none = group_advantages([None, 1.0, 0.0], loss)
    assert with_none == [None, *(group_advantages([1.0, 0.0], loss) or [])]


@pytest.mark.parametrize("loss", STANDARDISED)
def test_one_right_answer_among_eight_gets_the_closed_form(loss: LossName) -> None:
    advantages = group_advantages([1.0] + [0.0] * 7, loss)
    spread = math.sqrt(7) / 8
    assert advantages is not None
    assert advantages[0] == pytest.approx((7 / 8) / (spread + 1e-4))
    assert advantages[1] == pytest.approx((-1 / 8) / (spread + 1e-4))


def test_without_a_name_they_are_those_of_the_default_loss() -> None:
    assert group_advantages([1.0, 0.0, 0.5]) == group_advantages([1.0, 0.0, 0.5], TrainingConfig().loss)


def test_dr_grpo_does_not_divide_by_the_spread() -> None:
    assert group_advantages([1.0] + [0.0] * 7, "dr_grpo") == pytest.approx([7 / 8] + [-1 / 8] * 7)


def test_rloo_compares_each_answer_with_the_mean_of_the_others() -> None:
    assert group_advantages([1.0] + [0.0] * 7, "rloo") == pytest.approx([1.0] + [-1 / 7] * 7)
    assert group_advantages([3.0, None, 1.0], "rloo") == [2.0, None, -2.0]


@given(rewards, st.sampled_from(LOSSES))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(
    rewards: list[float | None], loss: LossName
) -> None:
    advantages = group_advantages(rewards, loss)
    if advantages is None:
        return
    pairs = [(r, a) for r, a in zip(rewards, advantages, strict=True) if r is not None and a is not None]
    assert sum(a for _, a in pairs) == pytest.approx(0, abs=1e-6)
    ordered = [a for _, a in sorted(pairs)]
    assert ordered == sorted(ordered)


@given(rewards, st.floats(-5, 5), st.sampled_from(LOSSES))
def test_a_constant_added_to_all_rewards_changes_nothing(
    rewards: list[float | None], shift: float, loss: LossName
) -> None:
    before = group_advantages(rewards, loss)
    after = group_advantages([None if r is None else r + shift for r in rewards], loss)
    if before is None or after is None:
        return
    assert [a for a in after if a is not None] == pytest.approx(
        [a for a in before if a is not None], abs=1e-3
    )
