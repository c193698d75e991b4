"""The control client against a daemon that we script: refusals, silence, and replies that make no sense."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import HostDown, RequestTimeout
from swarmnode.network.daemon.control_client import (
    MAX_REPLY_BYTES,
    ControlClient,
    DaemonRefused,
    PeerAddresses,
)
from swarmnode.network.daemon.hivemind_wheel import load_messages
from swarmnode.network.daemon.p2pd_host import namespace_cid
from swarmnode.network.framing import encode_frame, encode_uvarint, read_frame
from swarmnode.network.multiaddr import address_to_bytes, peer_id_to_bytes

pytestmark = pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed")

PEER = PeerAddresses("12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp", ("/ip4/192.0.2.7/tcp/4001",))

Script = Callable[[Any], bytes | None]
"""What the daemon writes for a request; None: nothing, ever."""


@asynccontextmanager
async def daemon(folder: Path, script: Script) -> AsyncGenerator[ControlClient, None]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = load_messages().Request()
        request.ParseFromString(await read_frame(reader, MAX_REPLY_BYTES))
        reply = script(request)
        if reply is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(reply)
        writer.close()

    path = folder / "s"
    async with await asyncio.start_unix_server(serve, str(path)):
        yield ControlClient(path)
    await asyncio.sleep(0.01)  # the last connection ends


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def reply(**fields: Any) -> bytes:
    pb = load_messages()
    return encode_frame(pb.Response(type=pb.Response.OK, **fields).SerializeToString())


def refusal(message: str) -> bytes:
    pb = load_messages()
    error = pb.ErrorResponse(msg=message)
    return encode_frame(pb.Response(type=pb.Response.ERROR, error=error).SerializeToString())


def peer_info(peer: PeerAddresses) -> Any:
    addresses = [address_to_bytes(address) for address in peer.addresses]
    return load_messages().PeerInfo(id=peer_id_to_bytes(peer.peer_id), addrs=addresses)


async def test_a_refusal_carries_the_words_of_the_daemon_on_one_line(folder: Path):
    async with daemon(folder, lambda request: refusal("failed to dial:\n  * refused")) as control:
        with pytest.raises(DaemonRefused, match=r"^failed to dial: \* refused$"):
            await control.connect(PEER, timeout_s=5)


async def test_a_silent_daemon_is_down_and_a_silent_peer_is_late(folder: Path):
    async with daemon(folder, lambda request: None) as control:
        with pytest.raises(HostDown):
            await control.identify(timeout_s=0.05)
        with pytest.raises(RequestTimeout):
            await control.connect(PEER, timeout_s=0.05)
        with pytest.raises(RequestTimeout):
            await control.open_stream(PEER.peer_id, "/echo", timeout_s=0.05)


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\x05abc", encode_uvarint(MAX_REPLY_BYTES + 1), encode_frame(b"\xff\xff\xff"), encode_frame(b"")],
)
async def test_a_daemon_that_makes_no_sense_is_down(folder: Path, nonsense: bytes):
    async with daemon(folder, lambda request: nonsense) as control:
        with pytest.raises(HostDown):
            await control.identify()


async def test_without_a_daemon_every_question_is_host_down(folder: Path):
    control = ControlClient(folder / "nobody")
    questions: list[Callable[[], Awaitable[object]]] = [
        control.identify,
        control.connected_peers,
        lambda: control.connect(PEER, 1),
        lambda: control.subscribe("topic"),
        lambda: control.find_providers(namespace_cid("a swarm"), 4, 1),
    ]
    for ask in questions:
        with pytest.raises(HostDown):
            await ask()


async def test_disconnecting_names_the_peer(folder: Path):
    seen: list[bytes] = []

    def script(request: Any) -> bytes:
        seen.append(request.disconnect.peer)
        return reply()

    async with daemon(folder, script) as control:
        await control.disconnect(PEER.peer_id)
    assert seen == [peer_id_to_bytes(PEER.peer_id)]


async def test_connections_are_listed_with_the_addresses_that_we_can_read(folder: Path):
    unreadable = load_messages().PeerInfo(id=peer_id_to_bytes(PEER.peer_id), addrs=[b"\xff\x01"])
    async with daemon(folder, lambda request: reply(peers=[peer_info(PEER), unreadable])) as control:
        assert await control.connected_peers() == (PEER, PeerAddresses(PEER.peer_id, ()))


async def test_a_lookup_that_does_not_end_gives_what_it_found(folder: Path):
    pb = load_messages()
    found = pb.DHTResponse(type=pb.DHTResponse.VALUE, peer=peer_info(PEER))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader, MAX_REPLY_BYTES)
        writer.write(reply(dht=pb.DHTResponse(type=pb.DHTResponse.BEGIN)))
        writer.write(encode_frame(found.SerializeToString()))
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, str(folder / "s")):
        control = ControlClient(folder / "s")
        assert await control.find_providers(namespace_cid("a swarm"), 4, 0.1) == (PEER,)
        assert await control.find_providers(namespace_cid("a swarm"), 1, 60) == (PEER,)
    await asyncio.sleep(0.01)
