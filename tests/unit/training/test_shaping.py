import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import TrainingConfig
from swarmnode.training.shaping import overlong_share, shaped_rewards
from swarmnode.types import FinishReason

SHAPED = TrainingConfig(overlong_tokens=40)


def reward_of(length: int, finish: FinishReason = "stop", config: TrainingConfig = SHAPED) -> float | None:
    return shaped_rewards([1.0], [length], [finish], 100, config)[0]


def test_dapo_equation_13_in_its_three_pieces() -> None:
    assert [reward_of(length) for length in (1, 60)] == [1.0, 1.0]
    assert [reward_of(length) for length in (70, 80, 90)] == pytest.approx([0.75, 0.5, 0.25])
    assert [reward_of(length) for length in (100, 140)] == [0.0, 0.0]


def test_an_answer_cut_off_by_the_limit_loses_everything() -> None:
    assert reward_of(100, "length") == 0.0


def test_a_strangers_answer_cut_off_by_a_shorter_limit_than_ours_is_not_overlong_here() -> None:
    assert reward_of(50, "length") == 1.0


def test_an_answer_that_we_aborted_keeps_its_reward() -> None:
    assert reward_of(100, "abort") == 1.0


def test_an_unscored_answer_stays_unscored() -> None:
    assert shaped_rewards([None, 0.0], [100, 100], ["length", "stop"], 100, SHAPED) == (None, -1.0)


def test_without_the_setting_rewards_are_those_of_the_task() -> None:
    rewards = (1.0, None, 0.25)
    assert shaped_rewards(rewards, [100, 99, 1], ["length", "stop", "stop"], 100, TrainingConfig()) == rewards


def test_a_zone_longer_than_the_limit_is_the_whole_limit() -> None:
    assert [overlong_share(length, 10, 99) for length in (0, 5, 10)] == [0.0, 0.5, 1.0]


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 300))
def test_the_share_lies_between_nothing_and_everything_and_grows_with_length(
    length: int, max_tokens: int, zone: int
) -> None:
    share = overlong_share(length, max_tokens, zone)
    assert 0.0 <= share <= overlong_share(length + 1, max_tokens, zone) <= 1.0
