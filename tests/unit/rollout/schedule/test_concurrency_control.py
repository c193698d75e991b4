"""What a step costs, and how many requests that makes worth while."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.rollout.schedule.concurrency_control import (
    SMALL_OVERHEAD,
    ConcurrencyControl,
    choose_concurrency,
)
from swarmnode.rollout.schedule.step_times import StepCost, StepTimes, TimedStep, fit

COST = StepCost(base_s=0.035, per_request_s=0.001)


def test_the_cost_of_a_step_is_found_in_noise_and_hiccups() -> None:
    rng = random.Random(0)
    times = StepTimes()
    for _ in range(40):
        for running in (8, 16, 32, 64):
            hiccup = 20.0 if rng.random() < 0.1 else 1.0
            times.observe(running, hiccup * rng.gauss(1, 0.05) * (0.035 + 0.001 * running))
    cost = times.cost()
    assert cost is not None
    assert cost.alpha == pytest.approx(35, rel=0.2)
    assert cost.per_request_s == pytest.approx(0.001, rel=0.1)


def test_steps_of_one_size_say_nothing_about_the_cost() -> None:
    times = StepTimes()
    for running in (60, 64, 70) * 20:
        times.observe(running, 0.1)
    assert times.cost() is None


def test_the_cost_is_that_of_steps_with_many_requests() -> None:
    times = StepTimes()
    for running in (1, 2, 4) * 5:
        times.observe(running, 0.002)
    for running in (32, 64, 128) * 5:
        times.observe(running, 0.035 + 0.001 * running)
    cost = times.cost()
    assert cost is not None
    assert cost.alpha == pytest.approx(35)


def test_a_single_odd_step_says_nothing_either() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(64, 0.1)
    times.observe(2, 5.0)
    assert times.cost() is None


def test_steps_that_do_not_grow_with_the_requests_have_no_cost_of_a_request() -> None:
    times = StepTimes()
    for running in (8, 16, 32) * 5:
        times.observe(running, 0.1)
    assert times.cost() is None


def test_the_cost_follows_an_engine_that_becomes_slower() -> None:
    times = StepTimes()
    for scale in (1, 3):
        for running in (8, 16, 32, 64) * 31:
            times.observe(running, scale * (0.035 + 0.001 * running))
    cost = times.cost()
    assert cost is not None
    assert cost.per_request_s == pytest.approx(0.003)


@given(
    base=st.floats(0, 10),
    tail=st.floats(1, 50),
    requests=st.integers(1, 512),
    slots=st.integers(1, 1024),
    lag=st.integers(0, 64),
)
def test_as_many_requests_as_pay_off_and_stay_young(
    base: float, tail: float, requests: int, slots: int, lag: int
) -> None:
    cost = StepCost(base, 0.001)
    chosen = choose_concurrency(cost, tail, round_requests=requests, max_running=slots, max_lag=lag)
    assert min(requests, slots) <= chosen <= slots
    if chosen > requests:
        assert tail * chosen / requests <= lag - 2 + 1e-6
        assert cost.alpha / (chosen - 1) >= SMALL_OVERHEAD - 1e-9


def test_without_a_measurement_a_round_worth_of_requests_runs() -> None:
    for cost, tail in ((None, 5.0), (COST, None)):
        assert choose_concurrency(cost, tail, round_requests=64, max_running=999, max_lag=99) == 64


def test_the_first_steps_are_of_different_sizes_and_teach_the_cost() -> None:
    control = ConcurrencyControl(round_requests=64, max_running=1024, max_lag=20)
    control.observe_completion(10)
    control.observe_completion(30)
    running, seen = 0, set[int]()
    for _ in range(30):
        running = max(running, control.limit)
        seen.add(running)
        control.observe_step(running, 0.035 + 0.001 * running)
    assert seen == {8, 16, 32, 64}
    assert control.cost == COST
    control.choose()
    assert control.concurrency == 350


def test_steps_that_did_more_than_decode_are_not_measured() -> None:
    control = ConcurrencyControl(round_requests=64, max_running=1024, max_lag=20)
    for _ in range(60):
        control.observe_step(control.limit, None)
    assert control.cost is None
    assert control.limit == 64


def test_requests_start_in_batches_and_never_leave_the_engine_empty() -> None:
    many = ConcurrencyControl(round_requests=64, max_running=64, max_lag=8, fixed=64)
    assert [many.free_slots(there) for there in (64, 61, 60, 10, 0)] == [0, 0, 4, 54, 64]
    few = ConcurrencyControl(round_requests=4, max_running=64, max_lag=8, fixed=4)
    assert [few.free_slots(there) for there in (4, 3, 0)] == [0, 1, 4]
    starting = ConcurrencyControl(round_requests=64, max_running=64, max_lag=8)
    starting.observe_step(8, None)
    assert [starting.free_slots(there) for there in (8, 1, 0)] == [0, 0, 1]


def test_a_fixed_number_has_no_ramp_and_is_bounded_by_the_engine() -> None:
    control = ConcurrencyControl(round_requests=64, max_running=32, max_lag=20, fixed=40)
    assert control.limit == control.concurrency == 32


def step_s(running: int, each: int) -> float:
    """Of requests that look back on `each` tokens: 4 ms, 0.1 ms a request, 1 us a token."""
    return 4e-3 + 1e-4 * running + 1e-6 * running * each


def test_long_answers_in_small_batches_do_not_raise_the_base() -> None:
    """As where all wait for the longest."""
    times = StepTimes()
    for _ in range(5):
        for running, each in ((256, 30), (192, 50), (128, 80), (96, 110), (64, 160), (32, 300)):
            times.observe(running, step_s(running, each), running * each)
    cost = times.cost()
    assert cost is not None
    assert cost.base_s == pytest.approx(4e-3)
    looked_back = (256 * 30 + 192 * 50 + 128 * 80 + 96 * 110 + 64 * 160 + 32 * 300) / 768
    assert cost.per_request_s == pytest.approx(1e-4 + 1e-6 * looked_back, rel=1e-2)


def test_short_answers_in_the_first_small_batches_do_not_lower_it() -> None:
    """As where the engine is kept full from the seventh step on."""
    times = StepTimes()
    for running in (32, 64, 128) * 5:
        times.observe(running, step_s(running, 26), running * 26)
    for each in range(30, 110):
        times.observe(256, step_s(256, each), 256 * each)
    cost = times.cost()
    assert cost is not None
    assert cost.base_s == pytest.approx(4e-3, rel=1e-3)


def test_noise_in_the_lengths_makes_no_request_cheaper_than_nothing() -> None:
    steps = [TimedStep(n, n * each, 0.03 + 0.001 * n) for n, each in ((8, 90), (16, 91), (32, 90), (64, 89))]
    odd = [
        step._replace(seconds=step.seconds * factor)
        for step, factor in zip(steps, (0.9, 1.1, 0.9, 1.1), strict=True)
    ]
    for context in (0.0, 90.0):
        cost = fit(odd, context)
        assert cost is not None
        assert cost.base_s >= 0 and cost.per_request_s > 0
