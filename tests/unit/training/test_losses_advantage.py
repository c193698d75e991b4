import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training.losses import (
    Advantage,
    against_the_others,
    centred,
    group_advantages,
    standardised,
)

ADVANTAGES = (standardised, centred, against_the_others)
rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=2, max_size=16)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_group_of_equal_rewards_teaches_nothing(advantage: Advantage) -> None:
    assert group_advantages([1.0, 1.0, 1.0], advantage) is None


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_group_with_one_scored_completion_teaches_nothing(advantage: Advantage) -> None:
    assert group_advantages([1.0, None, None], advantage) is None


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_an_unscored_completion_is_not_a_zero(advantage: Advantage) -> None:
    with_none = group_advantages([None, 1.0, 0.0], advantage)
    assert with_none == [None, *(group_advantages([1.0, 0.0], advantage) or [])]


def test_one_right_answer_among_eight_gets_the_closed_form() -> None:
    advantages = group_advantages([1.0] + [0.0] * 7, standardised)
    spread = math.sqrt(7) / 8
    assert advantages is not None
    assert advantages[0] == pytest.approx((7 / 8) / (spread + 1e-4))
    assert advantages[1] == pytest.approx((-1 / 8) / (spread + 1e-4))


def test_centred_rewards_are_not_divided_by_their_spread() -> None:
    assert group_advantages([1.0] + [0.0] * 7, centred) == pytest.approx([7 / 8] + [-1 / 8] * 7)


def test_each_answer_is_compared_with_the_mean_of_the_others() -> None:
    assert group_advantages([1.0] + [0.0] * 7, against_the_others) == pytest.approx([1.0] + [-1 / 7] * 7)
    assert group_advantages([3.0, None, 1.0], against_the_others) == [2.0, None, -2.0]


@given(rewards, st.sampled_from(ADVANTAGES))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(
    rewards: list[float | None], advantage: Advantage
) -> None:
    advantages = group_advantages(rewards, advantage)
    if advantages is None:
        return
    pairs = [(r, a) for r, a in zip(rewards, advantages, strict=True) if r is not None and a is not None]
    assert sum(a for _, a in pairs) == pytest.approx(0, abs=1e-6)
    ordered = [a for _, a in sorted(pairs)]
    assert ordered == sorted(ordered)


@given(rewards, st.floats(-5, 5), st.sampled_from(ADVANTAGES))
def test_a_constant_added_to_all_rewards_changes_nothing(
    rewards: list[float | None], shift: float, advantage: Advantage
) -> None:
    before = group_advantages(rewards, advantage)
    after = group_advantages([None if r is None else r + shift for r in rewards], advantage)
    if before is None or after is None:
        return
    assert [a for a in after if a is not None] == pytest.approx(
        [a for a in before if a is not None], abs=1e-3
    )
