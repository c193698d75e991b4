"""GossipSub as an attacker writes it: RPCs by hand, over a stream that its own daemon opens to the victim."""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarmnode.errors import NetworkError
from swarmnode.identity.keys import NodeKey, load_or_create
from swarmnode.network.framing import encode_frame, encode_uvarint
from swarmnode.network.multiaddr import peer_id_to_bytes, split_peer
from swarmnode.network.p2pd import DEFAULT_LISTEN, P2pdHost
from swarmnode.network.p2pd_control import ControlClient, PeerAddresses
from swarmnode.network.p2pd_process import DaemonOptions, make_socket_folder, resolve_port, start_daemon
from swarmnode.network.streams import ByteStream, SocketStream

MESHSUB = "/meshsub/1.1.0"
_SIGNED = b"libp2p-pubsub:"
_ECDSA = 3


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that holds bytes, text or another message."""
    return encode_uvarint(number << 3 | 2) + encode_frame(content)


def subscribe(*topics: str) -> bytes:
    """The RPC by which a peer says that it listens to topics."""
    return b"".join(field(1, b"\x08\x01" + field(2, topic.encode())) for topic in topics)


def publish(topic: str, author: bytes, data: bytes, signature_of: Callable[[bytes], bytes]) -> bytes:
    """The RPC with one message. `signature_of` signs it."""
    unsigned = field(1, author) + field(2, data) + field(3, os.urandom(8)) + field(4, topic.encode())
    return field(2, unsigned + field(5, signature_of(_SIGNED + unsigned)))


def publish_as(key: NodeKey, topic: str, data: bytes) -> bytes:
    """A message by an honest kind of author, of whatever size."""
    return publish(topic, peer_id_to_bytes(key.peer_id), data, key.sign)


def publish_by_ecdsa(topic: str, data: bytes) -> bytes:
    """A message whose author is an ECDSA key, whole, where the specification wants its hash.

    go-libp2p takes it: the key is in the id and the signature is right. No host can have this id.
    """
    private = ec.generate_private_key(ec.SECP256R1())
    encoding, kind = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    public = b"\x08" + bytes([_ECDSA]) + field(2, private.public_key().public_bytes(encoding, kind))
    author = b"\x00" + encode_uvarint(len(public)) + public
    return publish(topic, author, data, lambda text: private.sign(text, ec.ECDSA(hashes.SHA256())))


class QuietOptions(DaemonOptions):
    """A daemon without pubsub and DHT: with them it would answer for itself and reset our streams."""

    def arguments(self, control_socket: Path) -> list[str]:
        kept = (each for each in super().arguments(control_socket) if not each.startswith("-pubsub"))
        return [*(each for each in kept if not each.startswith("-dht")), "-pubsub=0"]


@asynccontextmanager
async def gossip_to(victim: P2pdHost, folder: Path) -> AsyncGenerator[SocketStream, None]:
    """A stream on which RPCs are read by the victim's daemon, from an identity of its own in `folder`."""
    key = load_or_create(folder / "attacker.key")
    options = QuietOptions(folder / "attacker.key", (resolve_port(DEFAULT_LISTEN[0]),), ())
    sockets = make_socket_folder()
    process = await start_daemon(options, sockets / "c.sock", on_exit=lambda: None)
    try:
        control = ControlClient(sockets / "c.sock")
        transport, peer_id = split_peer((await victim.addresses())[0])
        await control.connect(PeerAddresses(peer_id, (transport,)), 10)
        stream = SocketStream(key.peer_id, *await control.open_stream(peer_id, MESHSUB, 10))
        try:
            yield stream
        finally:
            stream.close()
            await asyncio.sleep(0)
    finally:
        await process.stop()
        shutil.rmtree(sockets)


async def send(stream: ByteStream, *rpcs: bytes) -> bool:
    """Write RPCs; False when the victim has hung up."""
    with suppress(NetworkError):
        for rpc in rpcs:
            await stream.send(encode_frame(rpc))
        return True
    return False
