"""One identity of an attacker: a p2pd of its own, without the parts that an honest node uses.

attacks -> [Identity] -> p2pd without pubsub and DHT -> raw streams to the victim

The daemon does transport, encryption and identify; GossipSub and Kademlia are spoken here, by hand. An
attacker's daemon that ran them too would answer for itself and reset our streams.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.errors import NetworkError
from swarmnode.identity.key_file import load_or_create
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.daemon.control_client import ControlClient, PeerAddresses, Stream
from swarmnode.network.daemon.daemon_process import (
    DaemonOptions,
    make_socket_folder,
    resolve_port,
    start_daemon,
)
from swarmnode.network.framing import encode_frame, read_frame
from swarmnode.network.multiaddr import split_peer

CONNECT_TIMEOUT_S = 10.0
LISTEN = "/ip4/127.0.0.1/tcp/0"
MAX_FRAME_BYTES = 4 * 1024 * 1024

Answer = Callable[[str, bytes], Awaitable[bytes | None]]
"""Called with (peer id, request); None: no answer, the stream is held open instead."""

Framing = tuple[Callable[[asyncio.StreamReader], Awaitable[bytes]], Callable[[bytes], bytes]]
"""Reads the next request, and frames an answer."""


class HostileOptions(DaemonOptions):
    """Nothing but connections and streams."""

    def arguments(self, control_socket: Path) -> list[str]:
        return [
            f"-listen=/unix{control_socket}",
            f"-id={self.identity}",
            f"-hostAddrs={','.join(self.listen)}",
            *("-natPortMap=0", "-autonat=0", "-relay=0", "-relayService=0"),
            *("-dht=0", "-dhtClient=0", "-dhtServer=0", "-pubsub=0", "-connManager=0"),
        ]


@dataclass
class Identity:
    """A key, its daemon, and the streams that were opened from it."""

    key: NodeKey
    control: ControlClient
    folder: Path
    tasks: asyncio.TaskGroup
    servers: list[asyncio.Server] = field(default_factory=list[asyncio.Server])
    talks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def connect(self, address: str) -> str:
        """Dial a victim; returns its peer id. Raises NetworkError."""
        transport, peer_id = split_peer(address)
        await self.control.connect(PeerAddresses(peer_id, (transport,)), CONNECT_TIMEOUT_S)
        return peer_id

    async def is_connected(self, peer_id: str) -> bool:
        return peer_id in {connection.peer_id for connection in await self.control.connected_peers()}

    async def open(self, peer_id: str, protocol: str) -> Stream:
        return await self.control.open_stream(peer_id, protocol, CONNECT_TIMEOUT_S)

    async def serve(self, protocol: str, answer: Answer, *, framing: Framing | None = None) -> None:
        """Answer framed requests of a protocol, as often as a stream brings one."""
        plain: Framing = (lambda reader: read_frame(reader, MAX_FRAME_BYTES)), encode_frame
        framing = framing or plain
        path = self.folder / f"{protocol.strip('/').replace('/', '-')}.sock"

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self.tasks.create_task(self._talk(reader, writer, answer, framing))
            self.talks.add(task)
            task.add_done_callback(self.talks.discard)

        self.servers.append(await asyncio.start_unix_server(accept, str(path)))
        await self.control.handle_streams(protocol, path)

    async def _talk(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answer,
        framing: Framing,
    ) -> None:
        read, write = framing
        try:
            peer_id, _ = await self.control.read_stream_info(reader)
            while True:
                response = await answer(peer_id, await read(reader))
                if response is not None:
                    writer.write(write(response))
                    await writer.drain()
        except (OSError, NetworkError, asyncio.IncompleteReadError):
            pass  # what the victim does with its end of a stream is no fault of ours
        finally:
            writer.transport.abort()

    def hang_up(self) -> None:
        """End every conversation, so that the daemon can be stopped."""
        for server in self.servers:
            server.close()
        for task in self.talks:
            task.cancel()


@asynccontextmanager
async def identity(folder: Path, key: NodeKey | None = None) -> AsyncIterator[Identity]:
    """A new identity with a running daemon, which ends with the block."""
    path = folder / f"{os.urandom(4).hex()}.key"
    if key is None:
        key = load_or_create(path)
    else:
        path.write_bytes(key.to_protobuf())
        path.chmod(0o600)
    sockets = make_socket_folder()
    control_socket = sockets / "control.sock"
    process = await start_daemon(
        HostileOptions(path, (resolve_port(LISTEN),), ()), control_socket, lambda: None
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            one = Identity(key, ControlClient(control_socket), sockets, tasks)
            try:
                yield one
            finally:
                one.hang_up()
    finally:
        await process.stop()
        shutil.rmtree(sockets, ignore_errors=True)
