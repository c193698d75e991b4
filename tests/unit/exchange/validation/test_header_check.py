"""Headers of strangers: who signed them, when, and of what use they are to us."""

import pytest

from swarmnode.errors import Rejected
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.messages import (
    Arrival,
    encode_header,
)
from swarmnode.exchange.validation.header_check import HEADER_CONTEXT, check_header
from swarmnode.identity.envelope import seal
from swarmnode.identity.node_key import NodeKey
from swarmnode.types import MIN_REWARD_SPREAD
from tests.unit.exchange.validation.conftest import NOW, reason_of, resealed


def test_a_sound_header_becomes_an_announcement_of_its_author(check, composed: SignedGroup, key: NodeKey):
    announcement = check(composed.sealed, key)
    assert announcement.author == key.peer_id
    assert announcement.header == composed.header
    assert announcement.arrival == Arrival(NOW, 0)


def test_a_header_that_another_peer_sends_is_rejected(check, composed: SignedGroup, other_key: NodeKey):
    assert reason_of(check, composed.sealed, other_key) == "sender_mismatch"


def test_a_forged_signature_is_rejected(check, composed: SignedGroup, key: NodeKey):
    forged = composed.sealed[:-1] + bytes([composed.sealed[-1] ^ 1])
    assert reason_of(check, forged, key) == "bad_signature"


def test_a_signature_for_another_purpose_is_rejected(check, composed: SignedGroup, key: NodeKey):
    assert reason_of(check, seal(key, "manifest", encode_header(composed.header)), key) == "bad_signature"


def test_a_large_header_is_rejected(check, key: NodeKey):
    assert reason_of(check, seal(key, HEADER_CONTEXT, bytes(1024)), key) == "too_large"


def test_a_header_of_another_version_of_our_task_is_told_from_one_of_a_task_that_we_do_not_have(
    check, composed: SignedGroup, key: NodeKey
):
    for changes, ours in (
        ({"version": "2"}, "ours is 1"),
        ({"task": "subtraction"}, "no task subtraction here"),
    ):
        with pytest.raises(Rejected, match=ours):
            check(resealed(composed, key, **changes), key)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 1}, "other_protocol"),
        ({"swarm": "elsewhere"}, "other_swarm"),
        ({"task": "subtraction"}, "other_task"),
        ({"version": "2"}, "other_version"),
        ({"created_ms": int((NOW - 1801) * 1000)}, "expired"),
        ({"created_ms": 0}, "expired"),
        ({"created_ms": int((NOW + 121) * 1000)}, "from_the_future"),
        ({"created_ms": 2**53}, "from_the_future"),
        ({"reward_std": 0.0}, "no_spread"),
        ({"reward_std": None}, "no_spread"),
    ],
)
def test_a_header_that_is_of_no_use_is_rejected(
    check, composed: SignedGroup, key: NodeKey, changes, reason: str
):
    assert reason_of(check, resealed(composed, key, **changes), key) == reason


@pytest.mark.parametrize("created_s", [NOW - 1799, NOW + 119])
def test_clocks_may_differ_a_little(check, composed: SignedGroup, key: NodeKey, created_s: float):
    check(resealed(composed, key, created_ms=int(created_s * 1000)), key)


def test_an_old_header_cannot_be_replayed(check, composed: SignedGroup, key: NodeKey):
    check(composed.sealed, key, NOW + 1799)
    assert reason_of(check, composed.sealed, key, NOW + 1801) == "expired"


def test_a_swarm_may_list_who_publishes(check, composed: SignedGroup, key: NodeKey, other_key: NodeKey):
    check(composed.sealed, key, publishers=frozenset({key.peer_id}))
    reason = reason_of(check, composed.sealed, key, publishers=frozenset({other_key.peer_id}))
    assert reason == "not_a_publisher"
    assert reason_of(check, composed.sealed, key, publishers=frozenset()) == "not_a_publisher"


def test_a_header_of_a_task_whose_answers_stay_at_home_is_rejected(
    composed: SignedGroup, key: NodeKey, settings: ExchangeSettings, task
):
    class AtHome(type(task)):
        exchangeable = False

    def found(data: bytes):
        return check_header(data, Arrival(NOW, 0), settings=settings, tasks={task.name: AtHome()})

    assert reason_of(found, composed.sealed) == "not_exchanged"


def test_a_header_of_a_library_may_be_old_and_without_spread_but_is_checked_like_any_other(
    composed: SignedGroup, key: NodeKey, other_key: NodeKey, settings: ExchangeSettings, task
):
    def found(data: bytes, **tasks: object):
        return check_header(data, Arrival(NOW, 7), settings=settings, tasks=tasks)

    shelved = resealed(composed, key, created_ms=0, reward_std=None)
    announcement = found(shelved, addition=task)
    assert (announcement.author, announcement.arrival) == (key.peer_id, Arrival(NOW, 7))
    assert (announcement.header.reward_std, announcement.sealed) == (None, shelved)
    assert reason_of(found, resealed(composed, key, swarm="elsewhere"), addition=task) == "other_swarm"
    assert reason_of(found, shelved) == "other_task"


def test_the_least_spread_that_teaches_something_is_enough(check, composed: SignedGroup, key: NodeKey):
    check(resealed(composed, key, reward_std=MIN_REWARD_SPREAD), key)
    assert reason_of(check, resealed(composed, key, reward_std=0.9 * MIN_REWARD_SPREAD), key) == "no_spread"
