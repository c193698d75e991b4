"""Request and response over a byte stream, here a Unix socket between two ends of one process."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarmnode.errors import MessageTooLarge, PeerUnreachable
from swarmnode.network import rpc
from swarmnode.network.framing import encode_frame, encode_uvarint, read_frame
from swarmnode.network.rpc import Service, answer, ask

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def double(peer_id: str, request: bytes) -> bytes:
    return request * 2


@pytest.fixture
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s"


@asynccontextmanager
async def served(socket_path: Path, service: Service) -> AsyncGenerator[Stream, None]:
    """The requester's end of a stream whose other end answers one request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer, "a peer", service)
        writer.close()

    server = await asyncio.start_unix_server(serve, str(socket_path))
    reader, writer = await asyncio.open_unix_connection(str(socket_path))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()
        server.close()
        await asyncio.sleep(0.01)  # the other end sees the end of the stream


async def test_the_response_is_what_the_handler_returns(socket_path: Path):
    async with served(socket_path, Service("/double", double, 10)) as (reader, writer):
        assert await ask(reader, writer, b"ab", max_response_bytes=4) == b"abab"


async def test_the_bytes_on_the_wire_are_the_documented_ones(socket_path: Path):
    async with served(socket_path, Service("/double", double, 200)) as (reader, writer):
        writer.write(b"\x96\x01" + bytes(150))
        assert await reader.readexactly(2 + 300) == b"\xac\x02" + bytes(300)


async def test_the_responder_lets_the_requester_hang_up_first(socket_path: Path):
    async with served(socket_path, Service("/double", double, 10)) as (reader, writer):
        writer.write(encode_frame(b"a"))
        assert await read_frame(reader, 2) == b"aa"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)


async def test_a_response_over_the_bound_is_not_read(socket_path: Path):
    async with served(socket_path, Service("/double", double, 10)) as (reader, writer):
        with pytest.raises(MessageTooLarge):
            await ask(reader, writer, b"abc", max_response_bytes=5)


async def test_a_request_over_the_bound_is_refused_by_its_length_alone(socket_path: Path):
    async with served(socket_path, Service("/double", double, 10)) as (reader, writer):
        writer.write(encode_uvarint(2**34))
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_handler_that_raises_leaves_a_traceback_and_no_answer(
    socket_path: Path, caplog: pytest.LogCaptureFixture
):
    async def fail(peer_id: str, request: bytes) -> bytes:
        raise LookupError("no such rollout")

    async with served(socket_path, Service("/fail", fail, 10)) as (reader, writer):
        with caplog.at_level(logging.ERROR), pytest.raises(PeerUnreachable):
            await ask(reader, writer, b"", max_response_bytes=5)
    assert "no such rollout" in caplog.text


@pytest.mark.parametrize("sent", [b"", b"\x05abc"])
async def test_a_requester_that_dribbles_is_dropped(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
):
    monkeypatch.setattr(rpc, "READ_TIMEOUT_S", 0.05)
    async with served(socket_path, Service("/double", double, 10)) as (reader, writer):
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_handler_that_takes_too_long_answers_nobody(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended: list[str] = []

    async def sleep(peer_id: str, request: bytes) -> bytes:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(peer_id)
        return b""

    monkeypatch.setattr(rpc, "ANSWER_TIMEOUT_S", 0.05)
    async with served(socket_path, Service("/sleep", sleep, 10)) as (reader, writer):
        with pytest.raises(PeerUnreachable):
            await ask(reader, writer, b"", max_response_bytes=5)
    assert ended == ["a peer"]
