import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training.advantage import group_advantages

rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=2, max_size=16)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert group_advantages([1.0, 1.0, 1.0]) is None


def test_a_group_with_one_scored_completion_teaches_nothing() -> None:
    assert group_advantages([1.0, None, None]) is None


def test_an_unscored_completion_is_not_a_zero() -> None:
    with_none = group_advantages([1.0, 0.0, None])
    assert with_none == [*(group_advantages([1.0, 0.0]) or []), None]


def test_one_right_answer_among_eight_gets_the_closed_form() -> None:
    advantages = group_advantages([1.0] + [0.0] * 7)
    spread = math.sqrt(7) / 8
    assert advantages is not None
    assert advantages[0] == pytest.approx((7 / 8) / (spread + 1e-4))
    assert advantages[1] == pytest.approx((-1 / 8) / (spread + 1e-4))


@given(rewards)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards)
    if advantages is None:
        return
    pairs = [(r, a) for r, a in zip(rewards, advantages, strict=True) if r is not None and a is not None]
    assert sum(a for _, a in pairs) == pytest.approx(0, abs=1e-6)
    ordered = [a for _, a in sorted(pairs)]
    assert ordered == sorted(ordered)


@given(rewards, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: list[float | None], shift: float) -> None:
    before = group_advantages(rewards)
    after = group_advantages([None if r is None else r + shift for r in rewards])
    if before is None or after is None:
        return
    assert [a for a in after if a is not None] == pytest.approx(
        [a for a in before if a is not None], abs=1e-3
    )
