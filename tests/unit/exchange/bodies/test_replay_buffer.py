import random
from collections import Counter

import pytest

from swarmnode.exchange.bodies.replay_buffer import Accepted, ReplayBuffer
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.messages import Arrival
from swarmnode.identity.node_key import NodeKey
from swarmnode.types import RolloutGroup

NOW = 1_700_000_000.0


@pytest.fixture
def accepted(announced, groups_of):
    def accept(key: NodeKey, number: int = 0, *, at: float = NOW, policy_version: int = 0) -> Accepted:
        announcement = announced(key, number, at=at, policy_version=policy_version)
        return Accepted(announcement, groups_of(key.peer_id, number=number))

    return accept


def a_buffer(capacity: int = 100) -> ReplayBuffer:
    return ReplayBuffer(ExchangeSettings(buffer_groups=capacity, max_age_s=60.0, max_age_versions=2))


def draw(buffer: ReplayBuffer, count: int, rng: random.Random, *, among: int = 1) -> list[RolloutGroup]:
    """A draw from proven authors, of whom `among` are known."""
    return buffer.draw(count, rng, trust_of=lambda author: "proven", known=among)


def keys(count: int) -> list[NodeKey]:
    return [NodeKey(bytes([number]) * 32) for number in range(count)]


def test_a_group_is_drawn_once(accepted, key: NodeKey):
    buffer = a_buffer()
    for number in range(5):
        assert not buffer.add(accepted(key, number))
    drawn = draw(buffer, 6, random.Random(0)) + draw(buffer, 10, random.Random(0))
    assert len({group.example.key for group in drawn}) == 5
    assert len(buffer) == 0 and not buffer.by_author
    assert draw(buffer, 1, random.Random(0)) == []


def test_every_group_is_equally_likely_to_be_drawn(accepted, key: NodeKey):
    groups = [accepted(key, number) for number in range(6)]
    rng = random.Random(0)
    drawn = Counter()
    for _ in range(2000):
        buffer = a_buffer()
        for group in groups:
            buffer.add(group)
        drawn.update(group.example.key for group in draw(buffer, 4, rng))
    assert all(560 < count < 780 for count in drawn.values())
    assert len(drawn) == 6


def test_the_same_seed_draws_the_same_groups(accepted, key: NodeKey):
    draws = []
    for _ in range(2):
        buffer = a_buffer()
        for number in range(6):
            buffer.add(accepted(key, number))
        draws.append(draw(buffer, 6, random.Random(7)))
    assert draws[0] == draws[1]


def test_a_group_ages_by_time_and_by_our_policy_version(accepted, key: NodeKey):
    buffer = a_buffer()
    buffer.add(accepted(key, 0, at=NOW - 61))
    buffer.add(accepted(key, 1, policy_version=1))
    buffer.add(accepted(key, 2, policy_version=2))
    assert buffer.drop_stale(Arrival(NOW, 2)) == 1
    assert buffer.drop_stale(Arrival(NOW, 4)) == 1
    assert buffer.drop_stale(Arrival(NOW, 4)) == 0
    assert len(buffer) == 1


def test_an_author_may_hold_a_quarter_and_loses_its_own_oldest(accepted, key: NodeKey, other_key: NodeKey):
    buffer = a_buffer(capacity=80)
    buffer.add(accepted(other_key))
    left = [buffer.add(accepted(key, number)) for number in range(22)]
    assert left == [None] * 20 + ["over_share"] * 2
    assert not buffer.has_room_for(key.peer_id)
    assert buffer.has_room_for(other_key.peer_id)
    kept = draw(buffer, 80, random.Random(0))
    assert Counter(group.author for group in kept) == {key.peer_id: 20, other_key.peer_id: 1}
    assert accepted(key, 21).group in kept
    assert accepted(key, 1).group not in kept


def test_one_author_alone_may_fill_a_small_buffer(accepted, key: NodeKey):
    buffer = a_buffer(capacity=8)
    assert [buffer.add(accepted(key, number)) for number in range(8)] == [None] * 8


def test_a_full_buffer_loses_its_oldest_group(accepted):
    buffer = a_buffer(capacity=4)
    left = [buffer.add(accepted(author)) for author in keys(5)]
    assert left == [None, None, None, None, "crowded_out"]
    assert {group.author for group in draw(buffer, 8, random.Random(0))} == {
        key.peer_id for key in keys(5)[1:]
    }
