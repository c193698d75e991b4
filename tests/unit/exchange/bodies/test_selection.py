import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.exchange.bodies.selection import (
    Candidate,
    author_share,
    choose,
    choose_header,
    draw,
    drawable,
    is_fresh,
    longest_wait_s,
    newcomer_share,
    slots_of,
)
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.limits import MAX_WAIT_SHARE, NEWCOMER_SHARE, THRIFTY_S
from swarmnode.exchange.messages import Arrival
from swarmnode.exchange.peers.reputation import Trust

TRUSTS: tuple[Trust, ...] = ("neighbour", "proven", "slow", "newcomer")
some_candidates = st.lists(
    st.builds(
        Candidate,
        st.text(max_size=3),
        st.sampled_from(TRUSTS),
        st.integers(0, 5),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=8,
)
running_fetches = st.dictionaries(st.sampled_from(TRUSTS), st.integers(0, 8))


def of(trust: Trust, *authors: str) -> list[Candidate]:
    return [Candidate(author, trust) for author in authors]


def chosen(candidates: Sequence[Candidate], count: int, **running: int) -> "Counter[str | None]":
    rng = random.Random(0)
    picks = (choose(candidates, running, 8, rng) for _ in range(count))
    return Counter(None if pick is None else pick.author for pick in picks)


@given(some_candidates, running_fetches, st.integers(1, 16), st.integers(0, 100))
def test_one_is_chosen_whenever_there_is_one_with_a_free_slot(candidates, running, slots, seed):
    free = [
        one
        for one in candidates
        if one.trust == "neighbour" or running.get(one.trust, 0) < slots_of(one.trust, slots)
    ]
    pick = choose(candidates, running, slots, random.Random(seed))
    assert pick in free if free else pick is None
    assert pick == choose(candidates, running, slots, random.Random(seed))


def test_proven_authors_are_equally_likely_however_much_they_announce():
    counts = chosen(of("proven", "a", "b", "c"), 3000)
    assert set(counts) == {"a", "b", "c"} and all(900 < count < 1100 for count in counts.values())


def test_any_number_of_newcomers_together_have_a_share_of_the_choices_and_of_the_fetches_under_way():
    candidates = of("proven", "known") + of("newcomer", *(f"name {number}" for number in range(500)))
    counts = chosen(candidates, 2000)
    assert 0.9 * (1 - NEWCOMER_SHARE) < counts["known"] / 2000 < 1.1 * (1 - NEWCOMER_SHARE)
    assert chosen(candidates, 100, newcomer=slots_of("newcomer", 8)) == {"known": 100}


def test_proven_authors_find_a_slot_while_newcomers_and_slow_ones_hold_all_of_theirs():
    running = {"newcomer": slots_of("newcomer", 8), "slow": slots_of("slow", 8)}
    candidates = of("slow", "thin line") + of("newcomer", "stranger")
    assert chosen(candidates, 50, **running) == {None: 50}
    assert chosen([*candidates, *of("proven", "known")], 50, **running) == {"known": 50}


def test_a_slow_author_is_fetched_from_when_no_proven_one_is_waiting():
    assert chosen(of("slow", "thin line"), 50) == {"thin line": 50}


def test_no_slow_author_is_fetched_from_while_a_proven_one_is_waiting():
    assert chosen(of("slow", "thin line") + of("proven", "known"), 50) == {"known": 50}
    assert chosen(of("slow", "thin line") + of("neighbour", "sister"), 50) == {"sister": 50}


def test_newcomers_have_no_more_of_the_choices_beside_slow_authors_than_beside_proven_ones():
    counts = chosen(of("slow", "thin line") + of("newcomer", "stranger"), 2000)
    assert 0.9 * NEWCOMER_SHARE < counts["stranger"] / 2000 < 1.1 * NEWCOMER_SHARE


def test_a_newcomer_that_failed_comes_after_all_others_whatever_it_gave():
    costly = Candidate("costly", "newcomer", judge_s=1.0)
    assert chosen([Candidate("gave", "newcomer", failures=1, accepted=3), costly], 50) == {"costly": 50}


def test_of_newcomers_those_come_first_that_gave_something_failed_least_or_are_connected():
    names = [Candidate(f"name {number}", "newcomer") for number in range(500)]
    connected = Candidate("connected", "newcomer", connected=True)
    assert chosen([*names, connected], 50) == {"connected": 50}
    failed = Candidate("failed", "newcomer", failures=1, connected=True)
    assert chosen([*names, connected, failed], 50) == {"connected": 50}
    gave = Candidate("gave", "newcomer", accepted=1)
    assert chosen([*names, connected, failed, gave], 50) == {"gave": 50}


@pytest.mark.parametrize(
    ("authors", "share"), [(0, 8), (1, 8), (2, 6), (3, 4), (4, 4), (1000, 4)], ids=lambda value: str(value)
)
def test_an_author_has_a_part_of_a_draw_for_each_and_one_more_but_at_most_a_quarter(authors: int, share: int):
    assert author_share(16, authors) == share


waiting_authors = st.lists(st.sampled_from("abcdefgh"), max_size=40)


@given(waiting_authors, st.sets(st.sampled_from("abcdefgh")), st.integers(0, 20), st.integers(0, 50))
def test_a_draw_keeps_to_the_shares_and_finds_as_many_as_they_allow(authors, newcomers, count, seed):
    def trust_of(author: str) -> Trust:
        return "newcomer" if author in newcomers else "proven"

    known = len(set(authors))
    places = draw(authors, trust_of, count, known, random.Random(seed))
    drawn = Counter(authors[place] for place in places)
    assert places == sorted(set(places)) and len(places) <= count
    assert all(number <= author_share(count, known) for number in drawn.values())
    anybody = any(author not in newcomers for author in authors)
    assert sum(drawn[one] for one in newcomers) <= newcomer_share(count, anybody_proven=anybody)
    assert len(places) == drawable(Counter(authors), trust_of, count, known)


def test_one_author_that_floods_the_buffer_gives_a_quarter_of_a_draw_once_three_are_known():
    authors = ["flooder"] * 100 + ["a", "b"] * 8
    drawn = Counter(
        authors[place] for place in draw(authors, lambda author: "proven", 16, 3, random.Random(0))
    )
    assert drawn["flooder"] == 4


def test_a_thousand_new_names_give_a_quarter_of_a_draw_together():
    authors = [f"name {number}" for number in range(1000)] + ["known", "other", "third"] * 4

    def trust_of(author: str) -> Trust:
        return "newcomer" if author.startswith("name") else "proven"

    drawn = [authors[place] for place in draw(authors, trust_of, 16, 1003, random.Random(0))]
    assert sum(author.startswith("name") for author in drawn) == 4
    assert len(drawn) == 16


def test_as_long_as_nobody_is_proven_newcomers_give_half_of_a_draw():
    authors = [f"name {number}" for number in range(1000)]
    assert len(draw(authors, lambda author: "newcomer", 16, 1000, random.Random(0))) == 8
    assert drawable(Counter(authors), lambda author: "newcomer", 16, 1000) == 8
    beside = [*authors, "sister"]
    assert (
        len(draw(beside, lambda one: "neighbour" if one == "sister" else "newcomer", 16, 9, random.Random(0)))
        == 5
    )


@given(
    waiting_authors,
    st.fixed_dictionaries({author: st.sampled_from(TRUSTS) for author in "abcdefgh"}),
    st.integers(0, 20),
    st.integers(0, 9),
)
def test_a_draw_finds_as_many_as_are_said_to_be_drawable_whomever_they_are_of(authors, trusts, count, known):
    places = draw(authors, trusts.__getitem__, count, known, random.Random(0))
    assert len(places) == drawable(Counter(authors), trusts.__getitem__, count, known)


def test_policies_of_one_process_share_without_a_bound():
    authors = ["sister"] * 16
    assert len(draw(authors, lambda author: "neighbour", 16, 1, random.Random(0))) == 16
    assert drawable(Counter(authors), lambda author: "neighbour", 16, 1) == 16


@given(st.floats(-1e3, 1e6), st.floats(0, 60))
def test_a_round_waits_for_others_a_tenth_of_its_own_time_at_most(worked_s: float, deadline_s: float):
    assert 0 <= longest_wait_s(worked_s, deadline_s) <= deadline_s
    assert longest_wait_s(worked_s, deadline_s) <= max(0.0, worked_s) * MAX_WAIT_SHARE


def fresh(arrival: Arrival, now: float, version: int) -> bool:
    return is_fresh(arrival, Arrival(now, version), ExchangeSettings(max_age_s=60.0, max_age_versions=2))


def test_what_arrived_too_long_or_too_many_versions_ago_is_stale():
    arrival = Arrival(at=100.0, policy_version=5)
    assert fresh(arrival, 160.0, 7)
    assert not fresh(arrival, 160.1, 5)
    assert not fresh(arrival, 100.0, 8)


def test_zero_versions_is_strictly_this_version():
    arrival = Arrival(at=0.0, policy_version=5)
    strict = ExchangeSettings(max_age_s=1.0, max_age_versions=0)
    assert is_fresh(arrival, Arrival(0.0, 5), strict)
    assert not is_fresh(arrival, Arrival(0.0, 6), strict)


def test_after_a_step_back_to_an_older_checkpoint_nothing_is_stale():
    assert fresh(Arrival(at=100.0, policy_version=50), 100.0, 3)


@given(st.floats(0, 1e9), st.integers(0, 1000), st.floats(0, 1e9), st.integers(0, 1000))
def test_what_is_stale_stays_stale(at, arrived_version, later_s, more_versions):
    arrival = Arrival(at, arrived_version)
    if not fresh(arrival, at + later_s, arrived_version + more_versions):
        assert not fresh(arrival, at + later_s + 1, arrived_version + more_versions)
        assert not fresh(arrival, at + later_s, arrived_version + more_versions + 1)


def test_of_an_authors_headers_those_of_tasks_that_we_fail_on_are_fetched_first() -> None:
    tasks, rng = ["easy"] * 10 + ["hard"] * 10, random.Random(0)
    chosen = Counter(tasks[choose_header(tasks, {"easy": 0.1, "hard": 0.9}, rng)] for _ in range(1000))
    assert chosen["hard"] == pytest.approx(900, abs=40)
    assert chosen["easy"] > 0, "what we master is looked at now and then"


def test_without_needs_each_header_is_as_likely_as_any_other() -> None:
    rng = random.Random(0)
    chosen = Counter(choose_header(["a", "b", "b", "b"], {}, rng) for _ in range(4000))
    assert all(count == pytest.approx(1000, abs=120) for count in chosen.values())


def test_a_task_that_nothing_is_known_of_counts_as_one_that_we_fail_on() -> None:
    rng = random.Random(0)
    chosen = Counter(choose_header(["known", "new"], {"known": 0.25}, rng) for _ in range(1000))
    assert chosen[1] == pytest.approx(800, abs=40)


def test_needs_do_not_change_whom_we_hear() -> None:
    """Whoever floods with what we need has its own share of our fetches and not a header more."""
    rng, heard = random.Random(0), Counter[str]()
    headers = {"flood": ["hard"] * 1000, "quiet": ["easy"]}
    candidates = [Candidate("flood", "proven"), Candidate("quiet", "proven")]
    for _ in range(2000):
        chosen = choose(candidates, {}, 4, rng)
        assert chosen is not None
        choose_header(headers[chosen.author], {"easy": 0.0, "hard": 1.0}, rng)
        heard[chosen.author] += 1
    assert heard["flood"] == pytest.approx(1000, abs=100)


def test_authors_whose_groups_take_the_judge_long_are_asked_the_less_often_so_that_each_has_the_same_time():
    quick = Candidate("quick", "proven", judge_s=0.02)
    counts = chosen([quick, Candidate("costly", "proven", judge_s=9 * THRIFTY_S)], 2000)
    assert 0.87 < counts["quick"] / 2000 < 0.93
    counts = chosen([quick, Candidate("as quick", "proven", judge_s=THRIFTY_S)], 2000)
    assert 0.45 < counts["quick"] / 2000 < 0.55


def test_a_newcomer_that_costs_the_judge_seconds_comes_after_one_that_nobody_knows():
    gave = Candidate("gave", "newcomer", accepted=3, judge_s=1.0)
    assert chosen([gave, Candidate("new", "newcomer")], 50) == {"new": 50}
