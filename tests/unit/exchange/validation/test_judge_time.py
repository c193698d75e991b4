"""The time of our judge, among strangers."""

import pytest

from swarmnode.exchange.limits import (
    AUTHOR_JUDGE_BURST_S,
    AUTHOR_JUDGE_S_PER_S,
    JUDGE_BURST_S,
    JUDGE_S_PER_S,
)
from swarmnode.exchange.peers.reputation import (
    FULL_SCORE,
    Reputation,
    Trust,
)
from swarmnode.exchange.validation.judge_time import JudgeTime


def judged(time: JudgeTime, author: str, trust: Trust, takes_s: float, until_s: float) -> float:
    """Seconds that the judge worked for an author who always has a group waiting."""
    now = spent_s = 0.0
    while now < until_s:
        if time.is_left(trust, now) and time.reputation.has_judge_time(author, now):
            time.charge(author, trust, takes_s, now)
            spent_s += takes_s
        now += 0.05
    return spent_s


def test_an_author_has_a_tenth_of_the_judge_however_long_its_groups_take():
    for takes_s in (0.01, 1.0, 3.0):
        spent_s = judged(JudgeTime(Reputation()), "a", "proven", takes_s, 600.0)
        assert spent_s == pytest.approx(600 * AUTHOR_JUDGE_S_PER_S + AUTHOR_JUDGE_BURST_S, abs=takes_s + 0.1)


def test_names_without_end_have_a_bounded_part_of_the_judge_and_nothing_of_that_of_proven_authors():
    time, now, spent_s = JudgeTime(Reputation()), 0.0, 0.0
    for name in range(6000):
        now += 0.1
        if time.is_left("newcomer", now):
            time.charge(f"name {name}", "newcomer", 3.0, now)
            spent_s += 3.0
    assert spent_s <= now * JUDGE_S_PER_S + JUDGE_BURST_S + 3.0
    assert not time.is_left("newcomer", now) and not time.is_left("slow", now)
    assert time.is_left("proven", now) and time.is_left("neighbour", now)


def test_idle_time_before_a_long_judgement_does_not_pay_for_it_twice():
    time = JudgeTime(Reputation())
    time.charge("a", "proven", 0.1, 0.0)
    time.charge("a", "proven", AUTHOR_JUDGE_BURST_S + 1.0, 1000.0)
    assert not time.reputation.has_judge_time("a", 1000.0)
    assert time.reputation.has_judge_time("a", 1000.1 + 1.0 / AUTHOR_JUDGE_S_PER_S)
    time.charge("b", "proven", JUDGE_BURST_S + 0.5, 2000.0)
    assert not time.is_left("proven", 2000.0)
    assert time.is_left("proven", 2000.1 + 0.5 / JUDGE_S_PER_S)
    assert time.reputation.score("a", 1000.0) == FULL_SCORE
