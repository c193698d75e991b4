"""A key names and seals: nothing opens but with the same key, in the place that it was sealed for."""

import pytest

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.private_swarms.swarm_key import SEAL_BYTES, SwarmKey

KEY, OTHER = SwarmKey(b"k" * 32), SwarmKey(b"o" * 32)


def test_what_is_sealed_opens_in_its_place_and_nowhere_else():
    sealed = KEY.seal(b"a header", "gossip", "topic", "alice")
    assert KEY.open(sealed, "gossip", "topic", "alice") == b"a header"
    assert len(sealed) == len(b"a header") + SEAL_BYTES
    for key, context in (
        (OTHER, ("gossip", "topic", "alice")),
        (KEY, ("gossip", "topic", "bob")),
        (KEY, ("gossip", "topica", "lice")),
        (KEY, ("request", "topic", "alice")),
        (KEY, ("gossip", "topic")),
    ):
        with pytest.raises(Rejected):
            key.open(sealed, *context)


def test_no_byte_of_it_can_be_changed_and_none_is_missing():
    sealed = KEY.seal(b"a body", "request")
    for at in range(len(sealed)):
        with pytest.raises(Rejected):
            KEY.open(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], "request")
        with pytest.raises(Rejected):
            KEY.open(sealed[:at], "request")


def test_the_same_message_is_sealed_differently_each_time():
    assert KEY.seal(b"again", "gossip") != KEY.seal(b"again", "gossip")


def test_names_follow_from_the_key_and_say_nothing_of_what_they_stand_for():
    name = KEY.name("topic", "/swarmnode/4/friends/rollouts/0")
    assert name == KEY.name("topic", "/swarmnode/4/friends/rollouts/0")
    assert name.startswith("/") and len(name) == 33 and "friends" not in name
    others = {
        OTHER.name("topic", "/swarmnode/4/friends/rollouts/0"),
        KEY.name("protocol", "/swarmnode/4/friends/rollouts/0"),
        KEY.name("topic", "/swarmnode/4/friends/rollouts/1"),
    }
    assert name not in others and len(others) == 3


def test_a_key_is_not_shown():
    assert "kkkk" not in repr(KEY)
    with pytest.raises(NetworkError):
        SwarmKey(b"short")
