import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.rollout.schedule.group import (
    Budget,
    PassRate,
    Probe,
    deal,
    probe_of,
    probe_size,
)

rewards_of_probes = st.lists(
    st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=8
)
ROUND = [[1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]


def probes(*rewards: list[float | None], rate: PassRate = PassRate()) -> list[Probe]:  # noqa: B008
    return [probe_of(one, rate) for one in rewards]


def chance_of(probe: Probe, members: int) -> float:
    return sum(probe.gains(members))


# ---- what a probe says ----


def test_a_probe_whose_rewards_differ_has_nothing_more_to_gain():
    assert set(probe_of([1.0, 0.0, 0.0, 0.0], PassRate()).gains(32)) == {0.0}


def test_an_example_that_was_never_right_gets_the_more_the_oftener_its_task_is():
    hopeless, hopeful = probe_of([0.0] * 4, PassRate(1.0, 100.0)), probe_of([0.0] * 4, PassRate(50.0, 100.0))
    assert chance_of(hopeful, 12) > 5 * chance_of(hopeless, 12)
    assert deal([hopeless, hopeful], 8, most=32) == [0, 8]


def test_what_is_sure_to_be_right_stops_at_its_probe():
    sure, unsure = probe_of([1.0] * 4, PassRate(99.0, 100.0)), probe_of([0.0] * 4, PassRate(30.0, 100.0))
    assert deal([sure, unsure], 12, most=32) == [0, 12]


def test_the_chance_of_a_gradient_is_that_of_the_posterior():
    """Of answers drawn as the Beta distribution says."""
    rng = random.Random(0)
    for rewards, sign in (([0.0] * 4, 0), ([1.0] * 4, 1)):
        probe = probe_of(rewards, PassRate(3.0, 10.0))
        rates = [abs(sign - rng.betavariate(probe.right, probe.wrong)) for _ in range(20_000)]
        drawn = sum(1 - (1 - rate) ** 6 for rate in rates) / len(rates)
        assert chance_of(probe, 10) == pytest.approx(drawn, rel=0.03)


def test_each_answer_gains_less_than_the_one_before():
    for probe in probes([0.0] * 4, [1.0] * 4, [0.5] * 4):
        gains = list(probe.gains(64))
        assert gains == sorted(gains, reverse=True)
        assert len(gains) == 60 and sum(gains) < 1


def test_an_answer_without_a_reward_says_nothing():
    assert probe_of([None, 1.0, None, 0.0], PassRate()).right == 2.0
    assert deal(probes([None] * 4), 8, most=32) == [8]


# ---- the deal ----


@given(rewards_of_probes, st.integers(0, 256), st.integers(4, 32))
def test_all_is_dealt_that_fits_and_nobody_gets_more_than_the_most(rewards, answers: int, most: int):
    more = deal(probes(*rewards), answers, most)
    assert sum(more) == min(answers, len(rewards) * (most - 4))
    assert all(0 <= one <= most - 4 for one in more)


@given(
    st.lists(st.sampled_from([*ROUND, [0.5] * 4]), min_size=2, max_size=3),
    st.integers(1, 8),
    st.floats(1.0, 9.0),
)
@settings(max_examples=50)
def test_no_other_deal_of_as_many_answers_has_a_higher_chance(rewards, answers: int, passes: float):
    found = probes(*rewards, rate=PassRate(passes, 10.0))
    gains = [list(probe.gains(12)) for probe in found]

    def total(dealt: Sequence[int]) -> float:
        return sum(sum(one[:count]) for one, count in zip(gains, dealt, strict=True))

    best = max(total(one) for one in product(range(9), repeat=len(found)) if sum(one) <= answers)
    assert total(deal(found, answers, most=12)) == pytest.approx(best)


def test_where_all_rewards_differ_the_groups_are_filled_up_evenly():
    mixed = probes([1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0])
    assert deal(mixed, 5, most=32) == [3, 0, 2]


# ---- the pass rate of a task ----


def test_the_pass_rate_of_a_task_is_that_of_its_latest_answers():
    rate = PassRate()
    for _ in range(200):
        rate = rate.after([0.0] * 16)
    for _ in range(100):
        rate = rate.after([1.0, 0.0] * 8)
    assert rate.mean == pytest.approx(0.5, abs=0.05)
    assert rate.answers <= 512


def test_rewards_of_any_size_are_put_on_one_scale():
    rate = PassRate().after([0.0, 1.0]).after([-10.0, 10.0])
    assert (rate.low, rate.high) == (-10.0, 10.0)
    assert rate.scaled([-10.0, 0.0, 10.0]) == 1.5
    assert 0.4 < rate.mean < 0.6


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), max_size=8))
def test_a_pass_rate_is_always_between_none_and_all(rewards):
    rate = PassRate()
    for some in rewards:
        rate = rate.after(some)
        assert -1e-9 <= rate.mean <= 1 + 1e-9


# ---- the budget of a policy ----


def test_a_round_has_as_many_answers_as_with_one_size_for_all():
    budget = Budget(8, most=512)
    assert budget.probe_size == 4
    wanted = budget.deal(["a", "b", "a", "b"], ROUND)
    assert sum(wanted) == 32 and max(wanted) <= 32
    assert min(wanted) == 4


def test_who_deals_again_after_some_were_widened_deals_the_same():
    first, again = Budget(8, most=512), Budget(8, most=512)
    wanted = first.deal(["a"] * 4, ROUND)
    widened = [of_one + [1.0] * (members - 4) for of_one, members in zip(ROUND, wanted, strict=True)]
    assert again.deal(["a"] * 4, widened) == wanted
    assert again.rates == first.rates


def test_pass_rates_count_probes_alone():
    """What is asked more of is harder than what is not: their answers would make a task look harder."""
    budget = Budget(8, most=512)
    budget.deal(["a"], [[1.0, 0.0, 0.0, 0.0, *[0.0] * 28]])
    assert budget.rates["a"] == PassRate().after([1.0, 0.0, 0.0, 0.0])


def test_rates_that_were_handed_out_stay_as_they_were():
    budget = Budget(8, most=512)
    before = budget.rates
    budget.deal(["a"], [[1.0] * 4])
    assert before == {} and budget.rates != before


def test_a_probe_is_half_of_a_group_and_never_of_one_answer():
    assert [probe_size(size) for size in (4, 5, 8, 512)] == [2, 2, 4, 256]
