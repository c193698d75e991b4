import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.exchange.limits import (
    AUTHOR_JUDGE_BURST_S,
    AUTHOR_JUDGE_S_PER_S,
    HEADERS_BURST,
    JUDGE_BURST_S,
    JUDGE_S_PER_S,
    PACE,
    PENALTIES,
    PROVEN_AFTER,
    REQUESTS_BURST,
    REQUESTS_PER_S,
    SLOW_S,
    UNFIT_S,
    UNFIT_TRIAL_S,
    ExchangeSettings,
    Reason,
)
from swarmnode.exchange.reputation import (
    FORGIVE_AT,
    FULL_SCORE,
    GIVER_PAUSE_S,
    LONGEST_PAUSE_S,
    JudgeTime,
    Reputation,
    TokenBucket,
    Unfit,
)
from swarmnode.exchange.selection import Trust

HOUR = 3600.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), max_size=60))
def test_a_bucket_never_gives_more_than_burst_and_rate_allow(steps: list[tuple[float, float]]):
    bucket, now, taken = TokenBucket(rate_per_s=2.0, burst=10.0), 0.0, 0.0
    for wait_s, amount in steps:
        now += wait_s
        if bucket.take(amount, now=now):
            taken += amount
    assert taken <= 10.0 + 2.0 * now + 1e-6


def test_a_clock_that_is_set_back_gives_and_takes_nothing():
    bucket = TokenBucket(rate_per_s=1.0, burst=2.0)
    assert bucket.take(2.0, now=100.0)
    assert not bucket.take(now=50.0)
    assert bucket.take(now=51.0)


def test_a_peer_may_announce_a_burst_and_then_at_its_rate():
    reputation = Reputation()
    allowed = 0
    while reputation.may_announce("a", 0.0):
        reputation.announced("a", 0.0)
        allowed += 1
    assert allowed == HEADERS_BURST
    assert reputation.may_announce("a", 1.0)
    assert reputation.may_announce("b", 0.0)


def test_a_peer_may_ask_for_a_burst_of_bodies():
    reputation = Reputation()
    assert sum(reputation.may_request("a", 0.0) for _ in range(1000)) == REQUESTS_BURST


def test_offences_lower_the_score_and_time_restores_it():
    reputation = Reputation()
    reputation.punish("a", 30.0, 0.0)
    assert reputation.score("a", 0.0) == 70.0
    assert reputation.score("a", 600.0) == 80.0
    assert reputation.score("a", HOUR) == FULL_SCORE


def test_a_peer_is_banned_once_and_forgiven_slowly():
    reputation = Reputation()
    assert [reputation.punish("a", 30.0, 0.0) for _ in range(4)] == [False, False, True, False]
    assert reputation.is_banned("a", 0.0)
    assert reputation.banned_peers() == ("a",)
    assert reputation.is_banned("a", 60.0 * (FORGIVE_AT - 1))
    assert not reputation.is_banned("a", 60.0 * (FORGIVE_AT + 1))
    assert reputation.banned_peers() == ()


def test_one_offence_never_bans():
    assert all(penalty <= FULL_SCORE - 20.0 for penalty in PENALTIES.values())


def test_a_judge_of_ours_that_is_slow_for_everybody_bans_nobody():
    """Each group overruns the deadline, and the next is asked for as soon as there is judge time."""
    reputation, now = Reputation(), 0.0
    judge_time, deadline_s = JudgeTime(reputation), ExchangeSettings().score_timeout_s
    while now < 24 * 3600:
        if reputation.has_judge_time("a", now):
            now += deadline_s
            judge_time.took("a", "proven", deadline_s, now)
            assert not reputation.punish("a", PENALTIES[Reason.SCORE_TIMEOUT], now)
        now += 1.0


def test_a_fetch_in_vain_is_no_offence_but_makes_us_wait_longer_each_time():
    reputation = Reputation()
    now, pauses = 0.0, []
    for _ in range(10):
        reputation.did_not_deliver("a", now)
        pause = next(s for s in range(1, 1000) if reputation.may_be_asked("a", now + s))
        pauses.append(pause)
        now += pause
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert reputation.score("a", now) == FULL_SCORE
    reputation.did_deliver("a", 0.1)
    assert reputation.may_be_asked("a", now)


def test_a_mishap_of_a_proven_author_costs_a_second_and_what_is_of_no_use_costs_more():
    reputation = Reputation()
    for _ in range(PROVEN_AFTER):
        reputation.was_accepted("a")
    for _ in range(2):  # of what was asked for at once
        reputation.did_not_deliver("a", 0.0, mishap=True)
    assert not reputation.may_be_asked("a", GIVER_PAUSE_S - 0.1)
    assert reputation.may_be_asked("a", GIVER_PAUSE_S)
    reputation.did_not_deliver("a", GIVER_PAUSE_S, mishap=True)
    assert not reputation.may_be_asked("a", 2.5 * GIVER_PAUSE_S)
    reputation.did_deliver("a", 0.1)
    reputation.did_not_deliver("a", 0.0)
    assert not reputation.may_be_asked("a", GIVER_PAUSE_S)


def test_failures_for_days_do_not_overflow():
    reputation = Reputation()
    for _ in range(5000):
        reputation.did_not_deliver("a", 0.0)
    assert reputation.may_be_asked("a", LONGEST_PAUSE_S)


def test_an_author_is_proven_by_what_was_accepted_from_it_and_slow_while_it_lets_us_wait():
    reputation = Reputation()
    trusts = []
    for _ in range(PROVEN_AFTER):
        trusts.append(reputation.trust_of("a"))
        reputation.was_accepted("a")
    assert trusts == ["newcomer"] * PROVEN_AFTER
    assert reputation.trust_of("a") == "proven"
    reputation.did_deliver("a", SLOW_S + 0.1)
    assert reputation.trust_of("a") == "slow"
    reputation.did_deliver("a", 0.1)
    reputation.did_not_deliver("a", 0.0)
    assert reputation.trust_of("a") == "slow"
    reputation.did_deliver("a", 0.1)
    assert reputation.trust_of("a") == "proven"


def test_whom_we_doubt_counts_as_a_newcomer_as_long_as_we_do():
    reputation = Reputation()
    for _ in range(PROVEN_AFTER):
        reputation.was_accepted("author")
    assert reputation.trust_of("author") == "proven"
    reputation.doubted = frozenset({"author"})
    assert (reputation.trust_of("author"), reputation.accepted("author")) == ("newcomer", PROVEN_AFTER)
    reputation.doubted = frozenset()
    assert reputation.trust_of("author") == "proven"


def test_we_ask_of_a_peer_a_little_less_than_it_may_ask_of_us():
    ours, theirs = Reputation(), Reputation()
    now, asked, refused = 0.0, 0, 0
    for _ in range(20_000):
        now += 0.001
        if ours.ask("peer", now):
            asked += 1
            refused += not theirs.may_request("us", now)
    assert asked > 20 * PACE * REQUESTS_PER_S
    assert refused == 0


def test_names_without_end_displace_each_other_and_not_those_who_gave_us_a_group():
    reputation = Reputation(max_peers=100)
    for number in range(10):
        reputation.was_accepted(f"friend {number}")
    for number in range(5000):
        reputation.may_announce(f"passer-by {number}", 0.0)
    assert reputation.accepted_by_peer() == {f"friend {number}": 1 for number in range(10)}
    for number in range(5000):
        reputation.was_accepted(f"giver {number}")
        reputation.may_announce(f"passer-by {number}", 0.0)
    assert len(reputation) <= 100


def test_a_rare_answer_too_long_is_forgiven_and_a_stream_of_them_ends_in_a_ban():
    rare, stream = Reputation(), Reputation()
    price = PENALTIES[Reason.TOO_LONG]
    assert not any(rare.punish("a", price, 300.0 * number) for number in range(1000))
    assert any(stream.punish("a", price, float(number)) for number in range(25))


def test_a_ban_says_how_long_it_lasts():
    reputation = Reputation()
    reputation.punish("a", 90.0, 0.0)
    assert reputation.banned_for_s("a", 0.0) == pytest.approx(60.0 * (FORGIVE_AT - 10))
    assert reputation.banned_for_s("b", 0.0) == 0.0


def test_only_so_many_peers_are_remembered_and_the_noisy_ones_longest():
    reputation = Reputation(max_peers=3)
    reputation.punish("bad", 90.0, 0.0)
    for number in range(10):
        reputation.may_announce(f"passer-by {number}", 0.0)
        assert reputation.is_banned("bad", 0.0)
    assert len(reputation) == 3


def test_accepted_groups_are_counted_by_peer():
    reputation = Reputation()
    for peer in ("a", "b", "a"):
        reputation.was_accepted(peer)
    reputation.may_announce("c", 0.0)
    assert reputation.accepted_by_peer() == {"a": 2, "b": 1}


def judged(time: JudgeTime, author: str, trust: Trust, takes_s: float, until_s: float) -> float:
    """Seconds that the judge worked for an author who always has a group waiting."""
    now = spent_s = 0.0
    while now < until_s:
        if time.is_left(trust, now) and time.reputation.has_judge_time(author, now):
            time.took(author, trust, takes_s, now)
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
            time.took(f"name {name}", "newcomer", 3.0, now)
            spent_s += 3.0
    assert spent_s <= now * JUDGE_S_PER_S + JUDGE_BURST_S + 3.0
    assert not time.is_left("newcomer", now) and not time.is_left("slow", now)
    assert time.is_left("proven", now) and time.is_left("neighbour", now)


def test_idle_time_before_a_long_judgement_does_not_pay_for_it_twice():
    time = JudgeTime(Reputation())
    time.took("a", "proven", 0.1, 0.0)
    time.took("a", "proven", AUTHOR_JUDGE_BURST_S + 1.0, 1000.0)
    assert not time.reputation.has_judge_time("a", 1000.0)
    assert time.reputation.has_judge_time("a", 1000.1 + 1.0 / AUTHOR_JUDGE_S_PER_S)
    assert time.reputation.score("a", 1000.0) == FULL_SCORE


@pytest.mark.parametrize("known", [False, True])
def test_a_task_that_overruns_for_three_authors_and_fits_for_nobody_is_given_up_for_a_while(known: bool):
    unfit = Unfit()
    assert not unfit.overran("slow", "a", 0.0, known=known)
    assert not unfit.overran("slow", "a", 1.0, known=known)
    assert not unfit.overran("slow", "b", 2.0, known=known)
    assert unfit.tasks(2.0, known=known) == frozenset()
    assert unfit.overran("slow", "c", 3.0, known=known)
    assert unfit.tasks(3.0, known=known) == {"slow"}
    assert unfit.tasks(3.0 + UNFIT_S, known=known) == frozenset()
    assert not unfit.overran("slow", "c", 4.0 + UNFIT_S, known=known)


def test_a_few_identities_cannot_shut_a_task_of_which_others_groups_fit():
    unfit = Unfit()
    unfit.fitted("game", 0.0)
    told = [unfit.overran("game", f"name {number}", 1.0 + number, known=False) for number in range(10)]
    assert not any(told) and unfit.tasks(11.0, known=False) == frozenset()


def test_newcomers_whose_groups_overrun_shut_a_task_to_newcomers_alone():
    unfit = Unfit()
    for number in range(100):
        unfit.overran("game", f"name {number}", float(number), known=False)
    assert unfit.tasks(100.0, known=False) == {"game"} and unfit.tasks(100.0, known=True) == frozenset()
    unfit.fitted("game", 101.0)
    assert unfit.tasks(101.0, known=False) == frozenset(), (
        "an author that we know shows that it can be played"
    )


def test_a_task_that_is_given_up_is_tried_once_a_while_and_opens_when_a_group_fits():
    unfit = Unfit()
    for name in "abc":
        unfit.overran("game", name, 0.0, known=False)
    assert unfit.tasks(UNFIT_TRIAL_S - 1, known=False) == {"game"}
    assert unfit.tasks(UNFIT_TRIAL_S, known=False) == frozenset()
    unfit.tried("game", UNFIT_TRIAL_S, known=False)
    assert unfit.tasks(UNFIT_TRIAL_S + 1, known=False) == {"game"}
    told = [unfit.overran("game", name, UNFIT_TRIAL_S + 1, known=False) for name in "def"]
    assert not any(told), "it is told once"
    unfit.fitted("game", UNFIT_TRIAL_S + 2)
    assert unfit.tasks(UNFIT_TRIAL_S + 2, known=False) == frozenset()


def test_an_environment_that_is_slow_for_everybody_bans_nobody():
    reputation, now = Reputation(), 0.0
    while now < 6 * 3600:
        now += 1.0
        if reputation.may_be_asked("a", now):
            reputation.did_not_deliver("a", now)
            assert not reputation.punish("a", PENALTIES[Reason.PLAY_TIMEOUT], now)
