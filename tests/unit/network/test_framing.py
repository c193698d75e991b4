"""Varint frames: what is written can be read, and no peer makes us read more than we agreed to."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import MessageTooLarge, NetworkError
from swarmnode.network.framing import decode_uvarint, encode_frame, encode_uvarint, read_frame


def stream_of(data: bytes, *, ended: bool = True) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if ended:
        reader.feed_eof()
    return reader


@given(st.integers(min_value=0, max_value=2**35 - 1), st.binary(max_size=4))
def test_a_varint_reads_back_from_anywhere(value: int, before: bytes):
    encoded = before + encode_uvarint(value) + b"\x01"
    assert decode_uvarint(encoded, len(before)) == (value, len(encoded) - 1)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9])
def test_a_cut_off_or_overlong_varint_is_an_error(data: bytes):
    with pytest.raises(NetworkError):
        decode_uvarint(data)


async def test_frames_read_back_in_order():
    bodies = [b"", b"a", bytes(300), b"last"]
    reader = stream_of(b"".join(encode_frame(body) for body in bodies))
    assert [await read_frame(reader, 300) for _ in bodies] == bodies


async def test_a_frame_over_the_bound_is_refused_before_its_body_arrives():
    reader = stream_of(encode_uvarint(301), ended=False)
    with pytest.raises(MessageTooLarge):
        await read_frame(reader, 300)


async def test_a_length_that_never_ends_is_refused():
    with pytest.raises(MessageTooLarge):
        await read_frame(stream_of(b"\xff" * 100, ended=False), 300)


async def test_a_stream_that_ends_inside_a_frame_is_told():
    with pytest.raises(asyncio.IncompleteReadError):
        await read_frame(stream_of(encode_frame(b"whole")[:-1]), 300)
