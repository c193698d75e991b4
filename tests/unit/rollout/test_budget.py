import random
from itertools import product
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.rollout.schedule.budget import (
    Budget,
    PassRate,
    Probe,
    deal,
    hull,
    probe_of,
    probe_size,
)

rewards_of_probes = st.lists(
    st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=8
)
ROUND = [[1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]


def probes(*rewards: list[float | None], rate: PassRate = PassRate()) -> list[Probe]:  # noqa: B008
    return [probe_of(one, rate) for one in rewards]


def worth_of(probe: Probe, members: int) -> float:
    return list(probe.worth(members))[-1]


# ---- what a probe says ----


def test_what_is_all_right_stops_at_its_probe():
    often = PassRate(passes=90.0, answers=100.0)
    more = deal(probes(*ROUND, rate=often), 16, most=32)
    assert sum(more) == 16
    assert more[0] == 0


def test_an_example_that_was_never_right_gets_the_more_the_oftener_its_task_is():
    hopeless, hopeful = probe_of([0.0] * 4, PassRate(1.0, 100.0)), probe_of([0.0] * 4, PassRate(50.0, 100.0))
    assert worth_of(hopeful, 12) > 5 * worth_of(hopeless, 12)


def test_the_chance_of_a_gradient_is_that_of_the_posterior():
    """Of answers drawn as the Beta distribution says."""
    probe = probe_of([0.0] * 4, PassRate(3.0, 10.0))
    rng = random.Random(0)
    drawn = [rng.betavariate(probe.right, probe.wrong) for _ in range(20_000)]
    chance = sum(1 - (1 - rate) ** 6 for rate in drawn) / len(drawn)
    progress = sum(rate * (1 - rate) ** 2 for rate in drawn) / len(drawn)
    assert probe.progress == pytest.approx(progress, rel=0.03)
    assert worth_of(probe, 10) == pytest.approx(progress * chance * sqrt(10), rel=0.05)


def test_more_answers_are_never_worth_less():
    for probe in probes(*ROUND):
        worth = list(probe.worth(64))
        assert worth == sorted(worth)
        assert len(worth) == 61


def test_an_answer_without_a_reward_says_nothing():
    assert probe_of([None, 1.0, None, 0.0], PassRate()).right == 2.0
    assert deal(probes([None] * 4), 8, most=32) == [8]


# ---- the deal ----


@given(rewards_of_probes, st.integers(0, 64), st.integers(4, 32))
def test_no_more_is_dealt_than_there_is_and_nobody_gets_more_than_the_most(rewards, answers: int, most: int):
    more = deal(probes(*rewards), answers, most)
    assert sum(more) <= answers
    assert all(0 <= one <= most - 4 for one in more)


@given(st.lists(st.sampled_from(ROUND), min_size=2, max_size=3), st.integers(1, 8))
@settings(max_examples=50)
def test_no_other_deal_is_worth_more_but_for_a_part_of_the_last_slope(rewards, answers: int):
    found = probes(*rewards)
    worths = [list(probe.worth(12)) for probe in found]
    more = deal(found, answers, most=12)

    def total(given_out) -> float:
        return sum(worth[one] for worth, one in zip(worths, given_out, strict=True))

    best = max(total(one) for one in product(range(9), repeat=len(found)) if sum(one) <= answers)
    longest = max(slope * length for worth in worths for slope, length in hull(worth))
    assert total(more) >= best - longest - 1e-9


def test_the_hull_is_concave_and_ends_where_the_sequence_ends():
    worth = [0.0, 0.1, 0.5, 1.5, 1.6, 2.4, 2.5]
    slopes = hull(worth)
    assert [slope for slope, _ in slopes] == sorted((slope for slope, _ in slopes), reverse=True)
    assert sum(slope * length for slope, length in slopes) == pytest.approx(worth[-1])
    assert sum(length for _, length in slopes) == len(worth) - 1


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
