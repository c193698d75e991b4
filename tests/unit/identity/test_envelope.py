from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import Rejected
from swarmnode.identity.envelope import decoded, seal, unseal
from swarmnode.identity.node_key import NodeKey

KEY = NodeKey(b"\1" * 32)
OTHER = NodeKey(b"\2" * 32)


class Open(msgspec.Struct):
    """A record that takes fields it does not know."""


def reason_of(data: bytes, context: str = "test", max_bytes: int = 4096) -> str:
    with pytest.raises(Rejected) as caught:
        unseal(data, context, max_bytes=max_bytes)
    return caught.value.reason


@given(st.binary(max_size=200))
def test_what_was_sealed_comes_out_with_its_author(payload: bytes):
    envelope = unseal(seal(KEY, "test", payload), "test", max_bytes=4096)
    assert (envelope.author, envelope.payload) == (KEY.peer_id, payload)


def test_a_signature_made_for_another_purpose_is_rejected():
    assert reason_of(seal(KEY, "test", b"hello"), context="manifest") == "bad_signature"


def test_context_and_payload_cannot_be_cut_elsewhere():
    author, payload, signature = msgspec.msgpack.decode(seal(KEY, "test", b"1hello"))
    assert (
        reason_of(msgspec.msgpack.encode([author, payload[1:], signature]), context="test1")
        == "bad_signature"
    )


def test_a_signature_does_not_carry_over_to_another_author():
    _, payload, signature = msgspec.msgpack.decode(seal(KEY, "test", b"hello"))
    assert reason_of(msgspec.msgpack.encode([OTHER.peer_id, payload, signature])) == "bad_signature"


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_byte_of_an_envelope_can_be_changed(position: int, flip: int):
    data = bytearray(seal(KEY, "test", b"hello"))
    data[position % len(data)] ^= flip
    assert reason_of(bytes(data)) in {"bad_signature", "bad_peer_id", "malformed"}


def test_a_large_envelope_is_rejected_before_it_is_decoded():
    assert reason_of(b"\xc1" * 101, max_bytes=100) == "too_large"


def test_lists_in_lists_are_rejected_however_deep_they_are():
    deep = b"\x91" * 5000 + b"\xc0"
    for kind, data in ((Any, deep), (msgspec.Raw, deep), (Open, b"\x81\xa1x" + deep)):
        with pytest.raises(Rejected, match="malformed"):
            decoded(msgspec.msgpack.Decoder(kind), data)


@given(st.binary(max_size=300))
def test_random_bytes_are_rejected(data: bytes):
    assert reason_of(data) in {"malformed", "bad_peer_id", "bad_signature"}


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [KEY.peer_id, b"hello"],
        [KEY.peer_id, b"hello", bytes(64), 1],
        [KEY.peer_id, "text", bytes(64)],
        [7, b"hello", bytes(64)],
        [KEY.peer_id, b"hello", bytes(63)],
        {"author": KEY.peer_id, "payload": b"hello", "signature": bytes(64)},
    ],
)
def test_wrong_fields_are_malformed(fields: object):
    assert reason_of(msgspec.msgpack.encode(fields)) == "malformed"


def test_an_author_that_is_no_peer_id_is_rejected():
    assert reason_of(msgspec.msgpack.encode(["somebody", b"hello", bytes(64)])) == "bad_peer_id"


def test_a_context_with_nul_is_a_programming_error():
    with pytest.raises(ValueError, match="NUL"):
        seal(KEY, "a\0b", b"hello")
