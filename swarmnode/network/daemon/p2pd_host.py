"""The default host: go-libp2p's daemon (p2pd) under supervision, behind the Host Protocol.

node, exchange -> [P2pdHost] -> daemon_supervisor.py (keeps the daemon alive)
                             -> control_client.py (asks it), peer_gate.py (who may stay)
                             -> peer_gate.py (who asks us), rpc.py (bytes on a stream)

The daemon does the networking: GossipSub with strict signatures, Kademlia, Noise and TLS. This file keeps the
state that must outlive it: subscriptions, served protocols and the peers to dial again.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Container, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from swarmnode.errors import HostDown, MessageTooLarge, NetworkError, PeerUnreachable, RequestTimeout
from swarmnode.network.daemon.control_client import (
    ControlClient,
    DaemonRefused,
    GossipFrame,
    PeerAddresses,
    Stream,
    Unusable,
)
from swarmnode.network.daemon.daemon_process import DaemonOptions
from swarmnode.network.daemon.daemon_supervisor import DaemonSupervisor
from swarmnode.network.daemon.peer_gate import PeerGate
from swarmnode.network.daemon.stream_server import StreamServer, listening
from swarmnode.network.daemon.traffic import STREAMED_BYTES
from swarmnode.network.host import MAX_GOSSIP_BYTES, Handler, HostStatus
from swarmnode.network.message_queue import MessageQueue, as_heard
from swarmnode.network.multiaddr import (
    MAX_ADDRESSES_PER_PEER,
    by_reach,
    check_peer_id,
    is_relayed,
    split_peer,
)
from swarmnode.network.rpc import Service, ask
from swarmnode.network.skip_counters import SkipCause, SkipCounters, oversized_story
from swarmnode.network.streams import SocketStream, StreamHandler

logger = logging.getLogger(__name__)

DEFAULT_LISTEN = ("/ip4/127.0.0.1/tcp/0",)
"""Addresses to listen on by default: loopback only, since being reachable from elsewhere is the user's
decision."""

MAX_REMEMBERED_PEERS = 64
"""Most peers that are dialled again after a restart. GossipSub needs 6 to 12 neighbours; discovery finds the
others."""

MAX_LOOKUPS_PER_PROBE = 8

LOOKUP_TIMEOUT_S = 1.0
"""Seconds for a look-up. The daemon knows a connected peer's addresses; a peer that left must not hold up the
probes."""

REDIAL_TIMEOUT_S = 10.0

PUNCHES = 3

PUNCH_WAIT_S = 5.0

PUNCH_PAUSE_S = 0.5
"""Punching: a relayed connection must be followed by a direct one within these seconds; otherwise it is made
again, a few times. The daemon tries once for each connection, in vain while the other side does not know its
own address yet."""


def namespace_cid(namespace: str) -> bytes:
    """Returns the Kademlia key of a namespace: CIDv1, raw codec, SHA-256.

    >>> namespace_cid("swarm").hex()[:8]
    '01551220'
    """
    return bytes.fromhex("01551220") + hashlib.sha256(namespace.encode()).digest()


class P2pdHost:
    """A `Host` on the go-libp2p daemon of the hivemind wheel.

    async with P2pdHost(paths.identity, listen=("/ip4/0.0.0.0/tcp/4001",)) as host:
        await host.connect("/dns4/seed.example.org/tcp/4001/p2p/12D3KooW...")
    """

    may_publish: Container[str] | None = None

    def __init__(
        self,
        identity_path: Path,
        *,
        listen: Sequence[str] = DEFAULT_LISTEN,
        announce: Sequence[str] = (),
        map_port: bool = False,
        relays: Sequence[str] | None = None,
        relay_for_others: bool = False,
    ) -> None:
        """`listen`: addresses to accept connections at; port 0 picks a port once and keeps it. `announce`:
        addresses to tell others instead. `map_port`: asks the router to forward the port, and tells others
        the forwarded address. `relays`: peers that take connections for us; empty: none do, but relayed
        addresses of others can be dialled; None: neither. `relay_for_others`: takes connections for peers
        that nobody can dial."""
        self._skipped = SkipCounters()
        self._gate = PeerGate(lambda: self._supervisor.listen, relays=relay_for_others)
        self._uses_relays = relays is not None
        self._punched: set[str] = set()
        self._punching: set[str] = set()
        """Peers behind a relay to which a direct connection was tried, or is being tried."""
        self._incoming = StreamServer(self._gate, self._skipped)
        self._supervisor = DaemonSupervisor(
            DaemonOptions(
                identity_path,
                tuple(listen),
                tuple(announce),
                map_port,
                None if relays is None else tuple(relays),
                relay_for_others,
            ),
            skipped=self._skipped,
            restore=self._restore,
            observe=self._observe,
            guard=self._gate.guard,
            relieve=self._gate.relieve,
        )
        self._exit = AsyncExitStack()
        self._peer_id = ""
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._topics: dict[MessageQueue, asyncio.StreamWriter] = {}
        self._remembered: dict[str, PeerAddresses] = {}

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def daemon_pid(self) -> int | None:
        """Process id of the daemon, for monitoring and for tests that kill it. None while there is none."""
        return self._supervisor.pid

    async def __aenter__(self) -> Self:
        await self._exit.enter_async_context(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        # The task group must not see the caller's exception: it would wrap it in a group.
        await self._exit.aclose()

    def status(self) -> HostStatus:
        return replace(
            self._supervisor.status,
            skipped=self._skipped.counts(),
            relays_for_others=self._supervisor.relays_for_others,
        )

    async def addresses(self) -> tuple[str, ...]:
        identity = await self._supervisor.control.identify()
        return by_reach(_full_addresses(identity))

    async def peers(self) -> tuple[str, ...]:
        return tuple(sorted(await self.far_ends()))

    async def far_ends(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for connection in await self._supervisor.control.connected_peers():
            found[connection.peer_id] = (*found.get(connection.peer_id, ()), *connection.addresses)
        return found

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> str:
        transport, peer_id = split_peer(address)
        self._gate.check(peer_id)
        peer = PeerAddresses(peer_id, (transport,))
        try:
            await self._supervisor.control.connect(peer, timeout_s)
        except DaemonRefused as error:
            raise PeerUnreachable(f"no connection to {address}: {_reason(error)}") from error
        except RequestTimeout as error:
            raise RequestTimeout(f"no connection to {address} within {timeout_s:g} s") from error
        self._remembered.setdefault(peer_id, peer)
        return peer_id

    async def disconnect(self, peer_id: str, *, barred_s: float = 0.0) -> None:
        self._gate.bar(check_peer_id(peer_id), barred_s)
        self._remembered.pop(peer_id, None)
        await self._gate.disconnect(self._supervisor.control, peer_id)

    async def publish(self, topic: str, data: bytes) -> None:
        if len(data) > MAX_GOSSIP_BYTES:
            raise MessageTooLarge(f"a gossip message of {len(data)} bytes exceeds {MAX_GOSSIP_BYTES} bytes")
        await self._supervisor.control.publish(topic, data)

    async def subscribe(self, topic: str, *, queue_size: int = 1024) -> MessageQueue:
        control = self._supervisor.control
        stream = await control.subscribe(topic)
        try:
            self._supervisor.check_current(control)
        except HostDown:
            stream[1].transport.abort()
            raise
        queue = MessageQueue(topic, queue_size, self._unsubscribe)
        self._attach(queue, control, stream)
        return queue

    async def serve(self, protocol: str, handler: Handler, *, max_request_bytes: int) -> None:
        await self._take_streams(protocol, self._incoming.services)
        self._incoming.services[protocol] = Service(protocol, handler, max_request_bytes)

    async def request(
        self, peer_id: str, protocol: str, data: bytes, *, timeout_s: float = 10.0, max_response_bytes: int
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._open(peer_id, protocol, timeout_s)
                try:
                    response = await ask(reader, writer, data, max_response_bytes=max_response_bytes)
                finally:
                    writer.transport.abort()
                self._gate.traffic.note_handed(peer_id, len(response))
                return response
        except TimeoutError as error:
            raise RequestTimeout(f"{peer_id} did not answer within {timeout_s:g} s") from error

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        await self._take_streams(protocol, self._incoming.handlers)
        self._incoming.handlers[protocol] = handler

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> SocketStream:
        stream = await self._open(peer_id, protocol, timeout_s)
        self._gate.traffic.allow(peer_id, STREAMED_BYTES)
        return SocketStream(peer_id, *stream, received=partial(self._gate.traffic.note_handed, peer_id))

    async def advertise(self, namespace: str, *, timeout_s: float = 10.0) -> None:
        try:
            await self._supervisor.control.provide(namespace_cid(namespace), timeout_s)
        except DaemonRefused as error:
            raise PeerUnreachable(f"the announcement reached no peer: {error.message}") from error

    async def find(self, namespace: str, *, limit: int = 16, timeout_s: float = 10.0) -> tuple[str, ...]:
        # One more than asked for: we may be among them.
        providers = await self._supervisor.control.find_providers(
            namespace_cid(namespace), limit + 1, timeout_s
        )
        others = [provider for provider in providers if provider.peer_id != self._peer_id][:limit]
        found = (address for peer in others for address in _full_addresses(peer))
        return tuple(address for address in found if self._uses_relays or not is_relayed(address))

    async def _take_streams(self, protocol: str, served: Container[str]) -> None:
        control = self._supervisor.control
        if protocol not in served:
            await control.handle_streams(protocol, self._listener)
            self._supervisor.check_current(control)

    @property
    def _listener(self) -> Path:
        """The socket that the daemon connects to for each incoming stream. It outlives the daemon."""
        return self._supervisor.folder / "streams.sock"

    @asynccontextmanager
    async def _run(self) -> AsyncGenerator[None, None]:
        self._peer_id = await self._supervisor.start()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    async with listening(self._accept, self._listener):
                        self._spawn(self._supervisor.run())
                        try:
                            yield
                        finally:
                            self._supervisor.retire()
                finally:
                    self._end_tasks()
        finally:
            await self._supervisor.stop()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _end_tasks(self) -> None:
        for queue in tuple(self._topics):
            queue.close()
        for task in self._running:
            task.cancel()

    async def _restore(self, control: ControlClient) -> None:
        """Restores the state of the old daemon in a new one."""
        for protocol in (*self._incoming.services, *self._incoming.handlers):
            await control.handle_streams(protocol, self._listener)
        for queue in tuple(self._topics):
            self._attach(queue, control, await control.subscribe(queue.topic))
        for peer in self._remembered.values():
            if peer.peer_id not in self._gate.barred:
                self._spawn(self._redial(control, peer))

    async def _look_at_relayed(self, connected: set[str]) -> None:
        """Starts punching to peers behind a relay. Only the end with the smaller id does so."""
        self._punched &= connected | self._punching
        for peer_id, ends in (await self.far_ends()).items():
            if peer_id > self._peer_id and peer_id not in self._punched and all(map(is_relayed, ends)):
                self._punched.add(peer_id)
                self._punching.add(peer_id)
                self._spawn(self._punch(PeerAddresses(peer_id, ends)))

    async def _punch(self, peer: PeerAddresses) -> None:
        """Tries a few times to turn a relayed connection into a direct one, as long as no stream uses it."""
        try:
            for _ in range(PUNCHES):
                await asyncio.sleep(PUNCH_WAIT_S)
                ends = (await self.far_ends()).get(peer.peer_id, ())
                if not all(map(is_relayed, ends)) or self._gate.traffic.has_streams_with(peer.peer_id):
                    return
                control = self._supervisor.control
                await self._gate.disconnect(control, peer.peer_id)
                self._gate.check(peer.peer_id)
                await asyncio.sleep(PUNCH_PAUSE_S)
                await control.connect(peer, REDIAL_TIMEOUT_S)
        except NetworkError as error:
            logger.debug("%s stays connected through its relay: %s", peer.peer_id, error)
        finally:
            self._punching.discard(peer.peer_id)

    async def _redial(self, control: ControlClient, peer: PeerAddresses) -> None:
        try:
            await control.connect(peer, REDIAL_TIMEOUT_S)
        except NetworkError as error:
            logger.debug("cannot reconnect to %s after the restart: %s", peer.peer_id, error)

    async def _observe(self, control: ControlClient) -> None:
        """Remembers the connected peers, with every address that they told the daemon."""
        connected = await self._gate.look(control)
        if self._uses_relays:
            await self._look_at_relayed(connected)
        self._remembered = {
            peer_id: peer for peer_id, peer in self._remembered.items() if peer_id in connected
        }
        room = min(MAX_REMEMBERED_PEERS - len(self._remembered), MAX_LOOKUPS_PER_PROBE)
        for peer_id in sorted(connected - self._remembered.keys())[: max(room, 0)]:
            try:
                peer = await control.find_peer(peer_id, LOOKUP_TIMEOUT_S)
            except Unusable as error:
                self._skipped.note(SkipCause.ADDRESSES, f"the addresses of {peer_id}, {error.message}")
            except (DaemonRefused, RequestTimeout) as error:
                logger.debug("the addresses of %s are unknown: %s", peer_id, error)
            else:
                if peer.addresses:
                    self._remembered[peer_id] = peer

    def _attach(self, queue: MessageQueue, control: ControlClient, stream: Stream) -> None:
        if not queue.closed:  # closed by its reader while we asked the daemon
            self._topics[queue] = stream[1]
        self._spawn(self._pump(queue, control, stream))

    def _unsubscribe(self, queue: MessageQueue) -> None:
        writer = self._topics.pop(queue, None)
        if writer is not None:
            writer.transport.abort()

    async def _pump(self, queue: MessageQueue, control: ControlClient, stream: Stream) -> None:
        """Moves messages from the daemon to the queue. Never waits: the daemon drops messages after 32."""
        reader, writer = stream
        try:
            while not queue.closed:
                try:
                    frame = await control.read_gossip(reader)
                except Unusable as error:
                    self._skipped.note(
                        SkipCause.GOSSIP_AUTHOR, f"gossip without a valid sender, {error.message}"
                    )
                else:
                    self._hear(queue, frame)
        except HostDown:
            if not queue.closed:
                self._supervisor.suspect(control)
        finally:
            writer.transport.abort()

    def _hear(self, queue: MessageQueue, frame: GossipFrame) -> None:
        self._gate.traffic.note_gossip(len(frame.data))
        if frame.sender == self._peer_id:
            return
        message = as_heard(queue.topic, frame.sender, frame.data)
        if message.oversized:
            self._skipped.note(SkipCause.GOSSIP_SIZE, oversized_story(frame.sender, len(frame.data)))
        queue.put(message)

    async def _open(self, peer_id: str, protocol: str, timeout_s: float) -> Stream:
        self._gate.check(check_peer_id(peer_id))
        try:
            return await self._supervisor.control.open_stream(peer_id, protocol, timeout_s)
        except DaemonRefused as error:
            raise PeerUnreachable(f"no {protocol} stream to {peer_id}: {_reason(error)}") from error

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._supervisor.status.state == "closed":
            writer.transport.abort()
        else:
            served = self._spawn(self._serve_stream(reader, writer))
            # Not in the coroutine: if it is cancelled before it begins, none of its lines run.
            served.add_done_callback(lambda _: writer.transport.abort())

    async def _serve_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._incoming.serve(self._supervisor.control, reader, writer)
        except HostDown as error:
            logger.debug("lost an incoming stream: %s", error)


def _full_addresses(peer: PeerAddresses) -> tuple[str, ...]:
    return tuple(f"{address}/p2p/{peer.peer_id}" for address in peer.addresses[:MAX_ADDRESSES_PER_PEER])


def _reason(error: DaemonRefused) -> str:
    # go-libp2p: "failed to dial 12D3...: all dials failed * [ADDRESS] what really happened".
    return error.message.rpartition("] ")[2]
