import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import Rejected
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import MAX_BODY_BYTES, MAX_GROUP_SIZE, MAX_RAW_BODY_BYTES
from swarmnode.exchange.messages import (
    Answer,
    Body,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
    fingerprint,
    hash_body,
)


def a_body(*texts: str, author: str = "somebody") -> Body:
    answers = tuple(Answer(text, "stop") for text in texts)
    return Body(author=author, task="addition", version="1", seed=1, index=0, answers=answers)


def compressed(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


def reason_of(decode, data: bytes) -> str:
    with pytest.raises(Rejected) as caught:
        decode(data)
    return caught.value.reason


@given(st.lists(st.text(max_size=50), min_size=2, max_size=8))
def test_a_body_survives_the_way(texts: list[str]):
    assert decode_body(encode_body(a_body(*texts))) == a_body(*texts)


def test_a_header_survives_the_way(composed: SignedGroup):
    assert decode_header(encode_header(composed.header)) == composed.header


def test_the_hash_is_that_of_the_compressed_bytes():
    data = encode_body(a_body("a", "b"))
    assert len(hash_body(data)) == 32
    assert hash_body(data) != hash_body(data + b"\0")


def test_the_fingerprint_is_of_the_answers_and_not_of_who_signs_them():
    assert fingerprint(a_body("a", "b", author="x")) == fingerprint(a_body("a", "b", author="y"))
    assert fingerprint(a_body("a", "b")) != fingerprint(a_body("a", "c"))


def test_a_body_that_no_peer_would_accept_is_not_made():
    assert (
        reason_of(encode_body, a_body("x" * (MAX_RAW_BODY_BYTES // 2), "y" * (MAX_RAW_BODY_BYTES // 2)))
        == "too_large"
    )
    assert reason_of(encode_body, a_body("half a pair: \ud800", "b")) == "malformed_body"


def test_a_body_that_does_not_compress_enough_is_not_made():
    import random

    noise = random.Random(0).randbytes(MAX_BODY_BYTES).hex()
    assert len(noise) * 2 < MAX_RAW_BODY_BYTES + 10
    assert (
        reason_of(encode_body, a_body(noise[: len(noise) // 2] * 2, noise[len(noise) // 2 :])) == "too_large"
    )


def test_a_bomb_is_rejected_unopened():
    bomb = compressed(bytes(64 * MAX_RAW_BODY_BYTES))
    assert len(bomb) < 64 * 1024
    assert reason_of(decode_body, bomb) == "bad_compression"


def test_a_bomb_that_hides_its_size_is_rejected():
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MAX_RAW_BODY_BYTES))
    assert reason_of(decode_body, bomb) == "bad_compression"


def test_a_bomb_that_lies_about_its_size_is_rejected():
    bomb = compressed(bytes(300_000))
    # After the magic number (4) and the frame descriptor (1), the content size has four bytes.
    assert bomb[5:9] == (300_000).to_bytes(4, "little")
    liar = bomb[:5] + (1000).to_bytes(4, "little") + bomb[9:]
    assert zstandard.get_frame_parameters(liar).content_size == 1000
    assert reason_of(decode_body, liar) == "bad_compression"


@pytest.mark.parametrize("tail", [b"\0", compressed(b"second frame"), b"\x50\x2a\x4d\x18\x04\0\0\0abcd"])
def test_nothing_may_follow_the_frame(tail: bytes):
    assert reason_of(decode_body, encode_body(a_body("a", "b")) + tail) == "bad_compression"


@pytest.mark.parametrize("data", [b"", b"\0", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\x04\0\0\0abcd"])
def test_what_is_no_frame_is_rejected(data: bytes):
    assert reason_of(decode_body, data) == "bad_compression"


def test_a_truncated_body_is_rejected():
    data = encode_body(a_body("a" * 100, "b"))
    for length in range(len(data)):
        assert reason_of(decode_body, data[:length]) == "bad_compression"


def test_a_body_over_the_wire_limit_is_rejected_unopened():
    assert reason_of(decode_body, bytes(MAX_BODY_BYTES + 1)) == "too_large"


GOOD = ["somebody", "addition", "1", 1, 0, [["a", "stop"], ["b", "length"]]]


def changed(place: int, value: object) -> list[object]:
    return [*GOOD[:place], value, *GOOD[place + 1 :]]


def test_the_shape_of_a_body_is_what_this_test_says():
    assert decode_body(compressed(msgspec.msgpack.encode(GOOD))).answers[1] == Answer("b", "length")


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        [],
        GOOD[:-1],
        [*GOOD, 1],
        changed(0, 7),
        changed(0, "x" * 53),
        changed(1, ""),
        changed(1, "x" * 65),
        changed(3, -1),
        changed(3, 2**63),
        changed(3, 1.0),
        changed(3, True),
        changed(4, 4096),
        changed(4, -1),
        changed(5, []),
        changed(5, [["a", "stop"]]),
        changed(5, [["a", "stop"]] * (MAX_GROUP_SIZE + 1)),
        changed(5, ["a", "b"]),
        changed(5, [["a", "abort"], ["b", "stop"]]),
        changed(5, [["a", "stop", 1], ["b", "stop"]]),
        changed(5, [[b"a", "stop"], ["b", "stop"]]),
        changed(5, [["x" * (128 * 1024 + 1), "stop"], ["b", "stop"]]),
    ],
)
def test_wrong_shapes_and_types_are_malformed(fields: object):
    assert reason_of(decode_body, compressed(msgspec.msgpack.encode(fields))) == "malformed_body"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x91" * 1_000_000 + b"\xc0",
        b"\x96\xa1a\xa1b\xa1c\x01\x00" + b"\x91" * 1_000_000 + b"\xc0",
        b"\x96\xa1a\xa1b\xa1c\x01\x00\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x96\xa2\xff\xff\xa1b\xa1c\x01\x00\x90",
        msgspec.msgpack.encode(GOOD) + b"\xc0",
    ],
    ids=["nothing", "deep", "deep answers", "huge array", "huge string", "not utf-8", "trailing"],
)
def test_hostile_msgpack_is_malformed(raw: bytes):
    assert reason_of(decode_body, compressed(raw)) == "malformed_body"


@given(st.binary(max_size=400))
def test_random_bytes_are_rejected(data: bytes):
    assert reason_of(decode_header, data) == "malformed"
    assert reason_of(decode_body, data) == "bad_compression"
    assert reason_of(decode_body, compressed(data)) == "malformed_body"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=16) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.lists(json_like, max_size=16))
def test_random_structures_are_rejected(fields: list[object]):
    raw = msgspec.msgpack.encode(fields)
    assert reason_of(decode_header, raw) == "malformed"
    assert reason_of(decode_body, compressed(raw)) == "malformed_body"


@given(st.integers(0, 15), json_like)
def test_one_random_field_in_a_good_header_is_read_or_rejected(composed_fields, place: int, value: object):
    fields = list(composed_fields)
    fields[place % len(fields)] = value
    try:
        header = decode_header(msgspec.msgpack.encode(fields))
    except Rejected as rejected:
        assert rejected.reason == "malformed"
    else:
        assert header.reward_std is None or 0 <= header.reward_std <= 1e6
        assert 0 <= header.index < 4096


@pytest.fixture(scope="module")
def composed_fields() -> list[object]:
    return [1, "test", bytes(32), 100, "addition", "1", 1, 0, 4, 0.5, 0.5, "tiny", 1000, 3, 1_700_000_000_000]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e7, True, "1", [1.0]])
@pytest.mark.parametrize("place", [9, 10])
def test_claims_must_be_finite_numbers(composed_fields: list[object], place: int, value: object):
    decode_header(msgspec.msgpack.encode(composed_fields))
    fields = [*composed_fields[:place], value, *composed_fields[place + 1 :]]
    assert reason_of(decode_header, msgspec.msgpack.encode(fields)) == "malformed"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, "1"),
        (1, ""),
        (2, bytes(31)),
        (3, 0),
        (3, MAX_BODY_BYTES + 1),
        (6, -1),
        (6, 2**63),
        (7, -1),
        (7, 4096),
        (8, 0),
        (8, 1),
        (8, MAX_GROUP_SIZE + 1),
        (10, -0.5),
        (12, -1),
        (13, -1),
        (14, -1),
        (14, 1.7e12),
    ],
)
def test_header_fields_have_bounds(composed_fields: list[object], place: int, value: object):
    fields = [*composed_fields[:place], value, *composed_fields[place + 1 :]]
    assert reason_of(decode_header, msgspec.msgpack.encode(fields)) == "malformed"
