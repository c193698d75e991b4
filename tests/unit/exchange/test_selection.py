import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.exchange.messages import Arrival
from swarmnode.exchange.selection import choose, is_fresh

waiting_headers = st.dictionaries(st.text(max_size=3), st.lists(st.integers(), max_size=5), max_size=8)


def anyone(author: str) -> bool:
    return True


@given(waiting_headers, st.sets(st.text(max_size=3)), st.integers(0, 100))
def test_only_a_waiting_header_of_an_author_who_may_be_asked_is_chosen(waiting, refused, seed):
    candidates = {author: headers for author, headers in waiting.items() if headers and author not in refused}
    chosen = choose(waiting, lambda author: author not in refused, random.Random(seed))
    if candidates:
        assert any(chosen in headers for headers in candidates.values())
    else:
        assert chosen is None


@given(waiting_headers, st.integers(0, 100))
def test_the_same_seed_chooses_the_same_header(waiting, seed):
    assert choose(waiting, anyone, random.Random(seed)) == choose(waiting, anyone, random.Random(seed))


@given(waiting_headers, st.integers(0, 100))
def test_every_waiting_header_is_chosen_once_before_none_is_left(waiting, seed):
    rng = random.Random(seed)
    left = {author: list(enumerate(headers)) for author, headers in waiting.items()}
    named = {author: [(author, place) for place, _ in headers] for author, headers in left.items()}
    expected = {header for headers in named.values() for header in headers}
    chosen = set()
    while (header := choose(named, anyone, rng)) is not None:
        named[header[0]].remove(header)
        chosen.add(header)
    assert chosen == expected


def test_all_headers_are_equally_likely_when_authors_announce_equally_much():
    waiting = {author: [f"{author}{number}" for number in range(4)] for author in "abc"}
    rng = random.Random(0)
    drawn = Counter(choose(waiting, anyone, rng) for _ in range(12_000))
    assert len(drawn) == 12
    assert all(850 < count < 1150 for count in drawn.values())


def test_a_flood_does_not_make_an_author_likelier():
    waiting = {"flooder": ["flooder"] * 1000, "quiet": ["quiet"], "normal": ["normal"] * 10}
    rng = random.Random(0)
    drawn = Counter(choose(waiting, anyone, rng) for _ in range(3000))
    assert all(900 < drawn[author] < 1100 for author in waiting)


def fresh(arrival: Arrival, now: float, version: int) -> bool:
    return is_fresh(arrival, now, version, max_age_s=60.0, max_age_versions=2)


def test_what_arrived_too_long_or_too_many_versions_ago_is_stale():
    arrival = Arrival(at=100.0, policy_version=5)
    assert fresh(arrival, 160.0, 7)
    assert not fresh(arrival, 160.1, 5)
    assert not fresh(arrival, 100.0, 8)


def test_zero_versions_is_strictly_this_version():
    arrival = Arrival(at=0.0, policy_version=5)
    assert is_fresh(arrival, 0.0, 5, max_age_s=1.0, max_age_versions=0)
    assert not is_fresh(arrival, 0.0, 6, max_age_s=1.0, max_age_versions=0)


def test_after_a_step_back_to_an_older_checkpoint_nothing_is_stale():
    assert fresh(Arrival(at=100.0, policy_version=50), 100.0, 3)


@given(st.floats(0, 1e9), st.integers(0, 1000), st.floats(0, 1e9), st.integers(0, 1000))
def test_what_is_stale_stays_stale(at, arrived_version, later_s, more_versions):
    arrival = Arrival(at, arrived_version)
    if not fresh(arrival, at + later_s, arrived_version + more_versions):
        assert not fresh(arrival, at + later_s + 1, arrived_version + more_versions)
        assert not fresh(arrival, at + later_s, arrived_version + more_versions + 1)
