import random
from collections.abc import Callable

import msgspec
import pytest

from swarmnode.exchange.announcing import ModelLabel, compose
from swarmnode.exchange.messages import Header
from swarmnode.exchange.selection import MAX_CLAIMANTS, Claims, meeting_places
from swarmnode.identity.keys import NodeKey
from swarmnode.types import ExampleKey

Announced = Callable[..., Header]


@pytest.fixture
def header(groups_of, key: NodeKey) -> Announced:
    sent = compose(groups_of(key.peer_id), key, swarm="test", model=ModelLabel("tiny", None), now=1.0).header

    def announced(seed: int, *, rate: float, task: str = "addition", low: float = 0.0, high: float = 1.0):
        """What somebody says who was right that often, where wrong is `low` and right is `high`."""
        spread = (high - low) * (rate * (1 - rate)) ** 0.5
        mean = low + rate * (high - low)
        return msgspec.structs.replace(sent, task=task, seed=seed, reward_mean=mean, reward_std=spread)

    return announced


def seeds(places: list[ExampleKey]) -> list[int]:
    return [place.seed for place in places]


def test_hard_examples_are_met_on_and_no_others(header: Announced):
    by_author = {
        "a": [header(1, rate=0.5)],
        "b": [header(2, rate=0.1)],
        "c": [header(3, rate=0.9)],
        "d": [header(4, rate=0.25)],
    }
    assert set(seeds(meeting_places(by_author, (), 4))) == {2, 4}


def test_nodes_that_heard_the_same_choose_the_same_in_whatever_order(header: Announced):
    heard = [(f"author {n}", header(n, rate=0.1)) for n in range(20)] + [("x", header(99, rate=0.5))]
    choices = []
    for seed in range(5):
        random.Random(seed).shuffle(heard)
        choices.append(meeting_places({author: [one] for author, one in heard}, (), 3))
    assert choices == [choices[0]] * 5 and len(choices[0]) == 3


def test_nodes_that_heard_nearly_the_same_choose_nearly_the_same(header: Announced):
    headers = {f"author {n}": [header(n, rate=0.1)] for n in range(20)} | {"x": [header(99, rate=0.5)]}
    whole = meeting_places(headers, (), 4)
    for missing in list(headers)[:-1]:
        part = meeting_places({a: one for a, one in headers.items() if a != missing}, (), 4)
        assert len(set(whole) & set(part)) >= 3


def test_an_author_has_one_place_however_many_it_announces(header: Announced):
    loud = [header(n, rate=0.1) for n in range(500)]
    places = meeting_places({"loud": loud, "quiet": [header(900, rate=0.2), header(901, rate=0.5)]}, (), 4)
    assert len(places) == 2 and 900 in seeds(places)


def test_what_is_taken_is_not_chosen_again(header: Announced):
    headers = {"a": [header(1, rate=0.1), header(2, rate=0.1), header(3, rate=0.5)]}
    (first,) = meeting_places(headers, (), 4)
    (second,) = meeting_places(headers, {first}, 4)
    assert {first.seed, second.seed} == {1, 2}
    assert meeting_places(headers, {first, second}, 4) == []


def test_what_is_hard_depends_on_the_rewards_of_the_task(header: Announced):
    def graded(seed: int, rate: float) -> Header:
        return header(seed, rate=rate, task="graded", low=-10.0, high=10.0)

    headers = {"a": [graded(1, 0.1)], "b": [graded(2, 0.5)], "c": [header(3, rate=0.5)]}
    assert seeds(meeting_places(headers, (), 4)) == [1]


def test_a_claim_without_a_mean_is_not_met_on(header: Announced):
    nothing = msgspec.structs.replace(header(1, rate=0.1), reward_mean=None)
    assert meeting_places({"a": [nothing], "b": [header(2, rate=0.5)]}, (), 4) == []


def test_claims_are_remembered_of_as_many_authors_and_announcements_as_are_bounded(header: Announced):
    claims = Claims()
    for number in range(MAX_CLAIMANTS + 5):
        claims.hear(f"author {number}", header(number, rate=0.1))
    for number in range(100):
        claims.hear("author 20", header(number, rate=0.1))
    assert len(claims.by_author) == MAX_CLAIMANTS and "author 4" not in claims.by_author
    assert [one.seed for one in claims.by_author["author 20"]] == list(range(68, 100))
