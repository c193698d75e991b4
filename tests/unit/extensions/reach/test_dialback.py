"""Peers try our port: only where they see us, only in public, not often, and who answers must be us."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import util
from pathlib import Path

import msgspec
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.extensions.reach import dialback
from swarmnode.extensions.reach.dialback import DialBack, DialReport, answers_as, open_second_message
from swarmnode.identity.key_file import load_or_create
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork

needs_daemon = pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed")


class Knocks:
    """Says yes to everything, and remembers where it was sent."""

    def __init__(self) -> None:
        self.at: list[tuple[str, int]] = []

    async def __call__(self, ip: str, port: int, peer_id: str) -> bool:
        self.at.append((ip, port))
        return True


@asynccontextmanager
async def asked_from(ip: str) -> AsyncGenerator[tuple[MemoryHost, MemoryHost, Knocks], None]:
    network, knocks = MemoryNetwork(), Knocks()
    async with network.host(ip="198.51.100.1") as helper, network.host(ip=ip) as asker:
        await asker.connect(helper.address)
        await DialBack(helper, answers=knocks).serve()
        yield asker, helper, knocks


async def test_a_peer_dials_the_port_at_the_address_that_it_sees_us_at():
    async with asked_from("203.0.113.9") as (asker, helper, knocks):
        assert await DialBack(asker).ask(helper.peer_id, 4001) == DialReport("reached", "203.0.113.9")
        assert knocks.at == [("203.0.113.9", 4001)]


@pytest.mark.parametrize("ip", ["127.0.0.1", "192.168.1.20", "10.0.0.1", "169.254.169.254", "100.64.0.1"])
async def test_nobody_is_made_to_knock_in_a_private_network(ip: str):
    async with asked_from(ip) as (asker, helper, knocks):
        assert await DialBack(asker).ask(helper.peer_id, 4001) == DialReport("refused")
        assert knocks.at == []


async def test_who_asks_too_often_is_refused():
    async with asked_from("203.0.113.9") as (asker, helper, knocks):
        told = [await DialBack(asker).ask(helper.peer_id, 4000 + number) for number in range(9)]
        assert [each and each.outcome for each in told] == ["reached"] * 2 + ["refused"] * 7
        assert len(knocks.at) == 2


async def test_many_identities_at_one_address_have_no_more_dials_than_some():
    network, knocks = MemoryNetwork(), Knocks()
    async with network.host(ip="198.51.100.1") as helper:
        service = DialBack(helper, answers=knocks, clock=lambda: 0.0)
        for _ in range(20):
            async with network.host(ip="203.0.113.9") as one:
                await one.connect(helper.address)
                await service.answer(one.peer_id, msgspec.msgpack.encode([4001]))
    assert len(knocks.at) == dialback.MAX_PER_ADDRESS


@pytest.mark.parametrize(
    "request_", [b"", b"\x90", b"\x91\x00", b"\x91\xcd\xff\xff\x00", b"\x92\x01\x01", b"\xc1"]
)
async def test_a_bad_question_dials_nobody(request_: bytes, caplog: pytest.LogCaptureFixture):
    async with asked_from("203.0.113.9") as (asker, helper, knocks):
        assert await asker.request(helper.peer_id, dialback.PROTOCOL, request_, max_response_bytes=9) == b""
        assert knocks.at == [] and "Traceback" not in caplog.text


async def test_who_asks_without_end_does_not_keep_the_daemon_busy():
    async with asked_from("192.168.1.20") as (asker, helper, _):
        looked, far_ends = 0, helper.far_ends

        async def counted() -> dict[str, tuple[str, ...]]:
            nonlocal looked
            looked += 1
            return await far_ends()

        helper.far_ends = counted
        for _ in range(20):
            assert await DialBack(asker).ask(helper.peer_id, 4001) == DialReport("refused")
        assert looked == dialback.MAX_PER_ASKER


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc0",
        msgspec.msgpack.encode(["reached", "192.168.1.1"]),
        msgspec.msgpack.encode(["reached", "; rm"]),
        msgspec.msgpack.encode(["reached", "8.8.4.4/dns4/evil"]),
        msgspec.msgpack.encode(["reached", "8.8.4.4/tcp/1"]),
        msgspec.msgpack.encode(["yes", ""]),
        msgspec.msgpack.encode(["reached", "x" * 90]),
    ],
)
async def test_an_answer_that_makes_no_sense_is_no_answer(answer: bytes):
    async def lie(peer: str, request: bytes) -> bytes:
        return answer

    network = MemoryNetwork()
    async with network.host() as helper, network.host() as asker:
        await asker.connect(helper.address)
        await helper.serve(dialback.PROTOCOL, lie, max_request_bytes=8)
        assert await DialBack(asker).ask(helper.peer_id, 4001) is None


# ---- who answers there ----

HELLO = b"\x13/multistream/1.0.0\n\x07/noise\n"


@needs_daemon
async def test_only_the_daemon_with_our_identity_answers_as_us(tmp_path: Path):
    keys = [load_or_create(tmp_path / name) for name in ("ours", "theirs")]
    async with P2pdHost(tmp_path / "ours") as host:
        (address, *_) = await host.addresses()
        port = int(address.split("/")[4])
        assert await answers_as("127.0.0.1", port, keys[0].peer_id)
        assert not await answers_as("127.0.0.1", port, keys[1].peer_id)


async def answered_by(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object], peer_id: str
) -> bool:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk(reader, writer)
        await reader.read(1000)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        return await answers_as("127.0.0.1", server.sockets[0].getsockname()[1], peer_id)


@pytest.mark.parametrize(
    "bytes_",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        HELLO + b"\x00\x00",
        HELLO + b"\x00\xa0" + b"x" * 160,
        b"\x13/multistream/1.0.0\n\x03na\n",
        b"\xff" * 99,
    ],
)
async def test_something_else_that_listens_there_is_not_us(bytes_: bytes, tmp_path: Path):
    peer_id = load_or_create(tmp_path / "key").peer_id
    assert not await answered_by(lambda _, writer: writer.write(bytes_), peer_id)


async def test_who_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialback, "DIAL_TIMEOUT_S", 0.1)
    assert not await answered_by(lambda *_: None, load_or_create(tmp_path / "key").peer_id)


@given(st.binary(max_size=300))
def test_no_bytes_pass_for_a_handshake(message: bytes):
    with pytest.raises((InvalidTag, ValueError)):
        open_second_message(X25519PrivateKey.generate(), message)
