"""The interface between a node and any network: everything that a node may ask of its host.

node, exchange -> [Host] -> memory_network.py (one process, for tests) | p2pd_host.py (go-libp2p daemon)

A host may lose its daemon and restart it. While it is down, calls that need it raise HostDown immediately;
subscriptions and served protocols survive and work again afterwards, so callers never re-register.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

MAX_GOSSIP_BYTES = 64 * 1024
"""Well below GossipSub's limit of 1 MiB, above which go-libp2p drops messages silently. Headers are under
1 KiB."""

HostState = Literal["starting", "up", "restarting", "closed"]


@dataclass(frozen=True, slots=True)
class Message:
    """A gossip message. `sender` signed it at the libp2p layer; the forwarding peer does not matter."""

    topic: str
    sender: str
    data: bytes
    oversized: bool = False
    """True if the message was longer than MAX_GOSSIP_BYTES, which no honest host sends. `data` is then empty,
    and the reader of the topic decides what to do about the sender."""


@dataclass(frozen=True, slots=True)
class HostStatus:
    """The state of the network, for display. Times are in seconds since the epoch."""

    state: HostState
    since: float
    restarts: int
    detail: str
    """The reason for the state, in one sentence. Empty: none."""
    memory_restarts: int = 0
    """Number of daemons replaced because they had grown too large; not included in `restarts`."""
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of messages from peers that could not be used, by cause (rpc.py)."""
    private: bool = False
    """True if only holders of the swarm's key can take part (private_host.py)."""
    relays_for_others: bool = False
    """True if the host relays connections for peers that nobody can dial (relaying.py)."""


Handler = Callable[[str, bytes], Awaitable[bytes]]
"""Called with (peer id, request bytes); returns the response bytes. An exception resets the stream."""


class Subscription(Protocol):
    """An endless stream of the messages of one topic, without our own.

    The queue behind it is bounded: a reader that is too slow loses the oldest messages.
    """

    def __aiter__(self) -> AsyncIterator[Message]: ...

    async def __anext__(self) -> Message:
        """Returns the next message. Raises StopAsyncIteration once the subscription or the host is closed."""
        ...

    async def aclose(self) -> None: ...


class Host(Protocol):
    """One identity on the network. `async with host:` starts and stops it; constructors do nothing.

    Peers are named by their libp2p peer id in base58. Addresses are multiaddrs as text that end in
    `/p2p/<peer id>`. Every call has a deadline and raises only NetworkError and its subclasses.
    """

    @property
    def peer_id(self) -> str: ...

    @property
    def may_publish(self) -> Container[str] | None:
        """The peer ids whose groups are accepted, in a private swarm. None: all."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    def status(self) -> HostStatus: ...

    async def addresses(self) -> tuple[str, ...]:
        """Returns the addresses at which others can dial us, each ending in `/p2p/<peer id>`."""
        ...

    async def peers(self) -> tuple[str, ...]:
        """Returns the ids of the peers that we are connected to."""
        ...

    async def far_ends(self) -> dict[str, tuple[str, ...]]:
        """Returns the remote addresses of each connected peer, without /p2p/, one for each connection. For a
        peer behind a router they are the router's."""
        ...

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> str:
        """Dials a peer and returns its id. Raises PeerUnreachable, RequestTimeout."""
        ...

    async def disconnect(self, peer_id: str, *, barred_s: float = 0.0) -> None:
        """Closes all connections to a peer, if there are any.

        With `barred_s` the peer is also barred for that many seconds: it is disconnected whenever it comes
        back, its streams are refused, and it is neither dialled nor remembered (PeerUnreachable). The bar
        remains while the host is down. The peer's gossip still arrives through others.
        """
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossips `data` (at most MAX_GOSSIP_BYTES). Succeeds even if nobody listens."""
        ...

    async def subscribe(self, topic: str, *, queue_size: int = 1024) -> Subscription: ...

    async def serve(self, protocol: str, handler: Handler, *, max_request_bytes: int) -> None:
        """Answers requests of `protocol`. A request over the limit is refused before it is read into memory.

        Serving a protocol again replaces its handler.
        """
        ...

    async def request(
        self, peer_id: str, protocol: str, data: bytes, *, timeout_s: float = 10.0, max_response_bytes: int
    ) -> bytes:
        """Sends one request and returns its response. Raises PeerUnreachable, RequestTimeout,
        MessageTooLarge."""
        ...

    async def advertise(self, namespace: str, *, timeout_s: float = 10.0) -> None:
        """Announces in the routing table (a Kademlia provider record) that we belong to `namespace`.

        Raises PeerUnreachable if there is no peer to store the record.
        """
        ...

    async def find(self, namespace: str, *, limit: int = 16, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Returns addresses of at most `limit` other peers that advertised `namespace`."""
        ...
