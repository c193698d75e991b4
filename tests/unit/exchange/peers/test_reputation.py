import pytest

from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.limits import (
    AUTHOR_JUDGE_BURST_S,
    AUTHOR_JUDGE_S_PER_S,
    HEADERS_BURST,
    PACE,
    PROVEN_AFTER,
    REQUESTS_BURST,
    REQUESTS_PER_S,
    SLOW_S,
    TAKEN_PER_GIVEN,
)
from swarmnode.exchange.peers.reputation import (
    FORGIVE_AT,
    FULL_SCORE,
    GIVER_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_SHOWN,
    Reputation,
    Standing,
)
from swarmnode.exchange.validation.judge_time import JudgeTime

HOUR = 3600.0


def test_a_peer_may_announce_a_burst_and_then_at_its_rate():
    reputation = Reputation()
    allowed = 0
    while reputation.may_announce("a", 0.0):
        reputation.count_header("a", 0.0)
        allowed += 1
    assert allowed == HEADERS_BURST
    assert reputation.may_announce("a", 1.0)
    assert reputation.may_announce("b", 0.0)


def test_a_peer_may_ask_for_a_burst_of_bodies():
    reputation = Reputation()
    assert sum(reputation.take_request("a", 0.0) for _ in range(1000)) == REQUESTS_BURST


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
    assert reputation.banned_peers(0.0) == ("a",)
    assert reputation.is_banned("a", 60.0 * (FORGIVE_AT - 1))
    assert not reputation.is_banned("a", 60.0 * (FORGIVE_AT + 1))
    assert reputation.banned_peers(60.0 * (FORGIVE_AT + 1)) == ()


def test_a_ban_ends_though_nobody_asks_about_the_peer():
    reputation = Reputation()
    for _ in range(4):
        reputation.punish("a", 30.0, 0.0)
    assert reputation.banned_peers(60.0 * (FORGIVE_AT - 1)) == ("a",)
    assert reputation.banned_peers(60.0 * (FORGIVE_AT + 1)) == ()


def test_who_offends_after_a_ban_that_nobody_saw_end_is_banned_anew():
    reputation = Reputation()
    for _ in range(4):
        reputation.punish("a", 30.0, 0.0)
    later = 60.0 * (FORGIVE_AT + 1)
    assert [reputation.punish("a", 30.0, later) for _ in range(2)] == [False, True]


def test_one_offence_never_bans():
    assert all(reason.points <= FULL_SCORE - 20.0 for reason in Reason)


def test_a_judge_of_ours_that_is_slow_for_everybody_bans_nobody():
    """Each group overruns the deadline, and the next is asked for as soon as there is judge time."""
    reputation, now = Reputation(), 0.0
    judge_time, deadline_s = JudgeTime(reputation), ExchangeSettings().score_timeout_s
    while now < 24 * 3600:
        if reputation.has_judge_time("a", now):
            now += deadline_s
            judge_time.charge("a", "proven", deadline_s, now)
            assert not reputation.punish("a", Reason.SCORE_TIMEOUT.points, now)
        now += 1.0


def test_a_fetch_in_vain_is_no_offence_but_makes_us_wait_longer_each_time():
    reputation = Reputation()
    now, pauses = 0.0, []
    for _ in range(10):
        reputation.note_failure("a", now)
        pause = next(s for s in range(1, 1000) if reputation.may_be_asked("a", now + s))
        pauses.append(pause)
        now += pause
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert reputation.score("a", now) == FULL_SCORE
    reputation.note_delivery("a", 0.1)
    assert reputation.may_be_asked("a", now)


def test_a_mishap_of_a_proven_author_costs_a_second_and_what_is_of_no_use_costs_more():
    reputation = Reputation()
    for _ in range(PROVEN_AFTER):
        reputation.note_accepted("a")
    for _ in range(2):  # of what was asked for at once
        reputation.note_failure("a", 0.0, mishap=True)
    assert not reputation.may_be_asked("a", GIVER_PAUSE_S - 0.1)
    assert reputation.may_be_asked("a", GIVER_PAUSE_S) and reputation.may_be_asked("a", GIVER_PAUSE_S + 0.5)
    reputation.note_failure("newcomer", 0.0, mishap=True)
    assert not reputation.may_be_asked("newcomer", GIVER_PAUSE_S)
    reputation.note_failure("a", GIVER_PAUSE_S, mishap=True)
    assert not reputation.may_be_asked("a", 2.5 * GIVER_PAUSE_S)
    reputation.note_delivery("a", 0.1)
    reputation.note_failure("a", 0.0)
    assert not reputation.may_be_asked("a", GIVER_PAUSE_S)


def test_failures_for_days_do_not_overflow():
    reputation = Reputation()
    for number in range(5000):
        reputation.note_failure("a", number * LONGEST_PAUSE_S)
    assert reputation.standing_of("a").failures == 5000
    assert reputation.may_be_asked("a", 5000 * LONGEST_PAUSE_S)


def test_an_author_is_proven_by_what_was_accepted_from_it_and_slow_while_it_lets_us_wait():
    reputation = Reputation()
    trusts = []
    for _ in range(PROVEN_AFTER):
        trusts.append(reputation.trust_of("a"))
        reputation.note_accepted("a")
    assert trusts == ["newcomer"] * PROVEN_AFTER
    assert reputation.trust_of("a") == "proven"
    reputation.note_delivery("a", SLOW_S + 0.1)
    assert reputation.trust_of("a") == "slow"
    reputation.note_delivery("a", 0.1)
    reputation.note_failure("a", 0.0)
    assert reputation.trust_of("a") == "slow"
    reputation.note_delivery("a", 0.1)
    assert reputation.trust_of("a") == "proven"


def test_whom_we_doubt_counts_as_a_newcomer_as_long_as_we_do():
    reputation = Reputation()
    for _ in range(PROVEN_AFTER):
        reputation.note_accepted("author")
    assert reputation.trust_of("author") == "proven"
    reputation.doubted = frozenset({"author"})
    assert (reputation.trust_of("author"), reputation.standing_of("author").accepted) == (
        "newcomer",
        PROVEN_AFTER,
    )
    reputation.doubted = frozenset()
    assert reputation.trust_of("author") == "proven"


def test_we_ask_of_a_peer_a_little_less_than_it_may_ask_of_us():
    ours, theirs = Reputation(), Reputation()
    now, asked, refused = 0.0, 0, 0
    for _ in range(20_000):
        now += 0.001
        if ours.take_ask("peer", now):
            asked += 1
            refused += not theirs.take_request("us", now)
    assert asked > 20 * PACE * REQUESTS_PER_S
    assert refused == 0


def test_names_without_end_displace_each_other_and_not_those_who_gave_us_a_group():
    reputation = Reputation(max_peers=100)
    for number in range(10):
        reputation.note_accepted(f"friend {number}")
    for number in range(5000):
        reputation.may_announce(f"passer-by {number}", 0.0)
    assert set(reputation.givers) == {f"friend {number}" for number in range(10)}
    for number in range(5000):
        reputation.note_accepted(f"giver {number}")
        reputation.may_announce(f"passer-by {number}", 0.0)
    assert len(reputation) <= 100


def test_a_rare_answer_too_long_is_forgiven_and_a_stream_of_them_ends_in_a_ban():
    rare, stream = Reputation(), Reputation()
    price = Reason.TOO_LONG.points
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
    assert [peer for peer, _ in reputation.standings()] == ["passer-by 8", "passer-by 9", "bad"]


def test_accepted_groups_are_counted_by_peer():
    reputation = Reputation()
    for peer in ("a", "b", "a"):
        reputation.note_accepted(peer)
    reputation.may_announce("c", 0.0)
    assert [reputation.standing_of(peer).accepted for peer in "abc"] == [2, 1, 0]


def test_figures_are_of_peers_of_which_something_was_used_or_refused():
    reputation = Reputation()
    reputation.note_accepted("friend")
    reputation.punish("foe", 1.0, 0.0)
    for peer in ("friend", "foe", "late", "unknown"):
        reputation.may_announce("late", 0.0)
        reputation.may_announce("passer-by", 0.0)
        reputation.note_refused(peer, "expired")
    assert [(one.peer, one.refused) for one in reputation.figures(0.0)] == [
        (peer, {"expired": 1}) for peer in ("friend", "foe", "late")
    ]


def test_what_an_author_lets_our_judge_work_is_an_average_in_which_the_last_groups_count_most():
    reputation = Reputation()
    averages = []
    for took_s in (1.0, 3.0, 3.0):
        reputation.charge_judge("a", took_s, 0.0)
        averages.append(reputation.standing_of("a").judge_s)
    assert averages == [1.0, 2.0, 2.5]


def test_an_environment_that_is_slow_for_everybody_bans_nobody():
    reputation, now = Reputation(), 0.0
    while now < 6 * 3600:
        now += 1.0
        if reputation.may_be_asked("a", now):
            reputation.note_failure("a", now)
            assert not reputation.punish("a", Reason.PLAY_TIMEOUT.points, now)


def test_names_that_somebody_asks_about_are_not_remembered_and_no_ban_is_forgotten_for_them():
    reputation = Reputation(max_peers=3)
    reputation.punish("bad", 90.0, 0.0)
    for number in range(10):
        assert not reputation.is_banned(f"name {number}", 0.0)
        assert reputation.score(f"name {number}", 0.0) == FULL_SCORE
    assert len(reputation) == 1 and reputation.standing_of("bad").banned


def test_a_pause_ends_when_the_clock_is_set_back_before_it():
    reputation = Reputation()
    reputation.note_failure("a", 2 * HOUR)
    assert not reputation.may_be_asked("a", 2 * HOUR)
    assert reputation.may_be_asked("a", 0.0)
    reputation.note_failure("a", 0.0)
    assert not reputation.may_be_asked("a", 0.0), "and the next pause begins as ever"


def test_a_score_recovers_no_faster_for_being_asked_about_and_falls_with_no_clock_that_is_set_back():
    reputation = Reputation()
    reputation.punish("a", 30.0, HOUR)
    assert reputation.score("a", 0.0) == 70.0
    assert [reputation.score("a", 60.0 * minutes) for minutes in (1, 2, 3, 3)] == [71.0, 72.0, 73.0, 73.0]


def test_a_peer_that_would_have_to_refuse_us_is_not_asked():
    reputation = Reputation()
    while reputation.take_ask("a", 0.0):
        assert reputation.standing_of("a").pause_s(0.0) == 0.0
    assert not reputation.may_be_asked("a", 0.0)
    assert reputation.may_be_asked("a", 1.0) and reputation.may_be_asked("b", 0.0)


def test_judge_time_that_an_author_did_not_use_does_not_add_up():
    reputation, owed_s = Reputation(), 8.0
    reputation.charge_judge("a", 0.0, 0.0)
    assert reputation.has_judge_time("a", 0.0)
    reputation.charge_judge("a", AUTHOR_JUDGE_BURST_S + owed_s, HOUR)
    paid_s = HOUR + owed_s / AUTHOR_JUDGE_S_PER_S
    assert [reputation.has_judge_time("a", now) for now in (HOUR, paid_s - 1.0, paid_s + 1.0)] == [
        False,
        False,
        True,
    ]


def test_of_those_who_gave_something_the_ones_not_heard_of_for_longest_are_forgotten_first():
    reputation = Reputation(max_peers=4)
    for peer in ("a", "b"):
        reputation.note_accepted(peer)
    reputation.may_announce("a", 0.0)
    reputation.note_accepted("c")
    assert list(reputation.givers) == ["a", "c"]


def test_figures_are_of_the_peers_that_we_know_most_about():
    reputation = Reputation()
    for number in range(MOST_SHOWN):
        reputation.punish(f"foe {number}", 1.0, 0.0)
    reputation.punish("foe 7", 1.0, 0.0)
    reputation.note_accepted("friend")
    shown = [one.peer for one in reputation.figures(0.0)]
    assert shown[:2] == ["friend", "foe 7"] and len(shown) == MOST_SHOWN


def test_a_giver_of_an_earlier_run_is_still_one_and_no_more_are_restored_than_are_remembered():
    reputation = Reputation(max_peers=3)
    reputation.restore("friend", Standing(accepted=1))
    for number in range(5):
        reputation.restore(f"foe {number}", Standing(score=50.0))
    assert list(reputation.givers) == ["friend"]
    assert [peer for peer, _ in reputation.standings()] == ["foe 0", "foe 1", "friend"]


def test_all_that_came_from_a_peer_counts_against_all_that_it_took():
    reputation = Reputation()
    for _ in range(2):
        reputation.note_given("a", 100)
        reputation.note_taken("a", int(100 * TAKEN_PER_GIVEN) - 1)
    assert reputation.gives_enough("a")
    reputation.note_taken("a", 2)
    assert not reputation.gives_enough("a")


def test_a_group_that_comes_while_we_pause_ends_the_pause():
    reputation = Reputation()
    reputation.note_failure("a", 0.0)
    assert not reputation.may_be_asked("a", 1.0)
    reputation.note_delivery("a", 0.1)
    assert reputation.may_be_asked("a", 1.0)
