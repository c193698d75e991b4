"""Peers on the same local network, found by multicast DNS in the way of libp2p.

Discovery -> [LocalPeers] -> zeroconf -> 224.0.0.251:5353

Each node registers a randomly named instance of its swarm's service whose TXT record holds one
`dnsaddr=<multiaddr>/p2p/<peer id>` per address. libp2p's own service, `_p2p._udp`, would have us dial
whatever else speaks libp2p in the same house. Names say nothing; only the TXT record counts.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from zeroconf import ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from swarmnode.errors import NetworkError
from swarmnode.network.multiaddr import MAX_ADDRESSES_PER_PEER, parse_address, split_peer

logger = logging.getLogger(__name__)


def service_type(namespace: str) -> str:
    """Returns the name of a swarm's service, at most 15 characters as RFC 6763 wants it.

    >>> service_type("swarm")
    '_sn-44eb92b4._udp.local.'
    """
    return f"_sn-{hashlib.sha256(namespace.encode()).hexdigest()[:8]}._udp.local."


DNSADDR = b"dnsaddr="

MAX_TXT_STRING_BYTES = 255
"""The longest DNS character-string: the length in front is one byte."""

MAX_WAITING_NAMES = 64
"""Most instances found but not yet asked for their TXT record; more are ignored until there is room."""

TXT_TIMEOUT_S = 2.0


def encode_txt(addresses: Iterable[str]) -> bytes:
    """Returns the TXT record of our addresses. One too long for a DNS string is left out.

    >>> encode_txt(["/ip4/10.0.0.7/tcp/4001"])
    b'\\x1ednsaddr=/ip4/10.0.0.7/tcp/4001'
    """
    strings = (DNSADDR + address.encode() for address in addresses)
    return b"".join(bytes([len(s)]) + s for s in strings if len(s) <= MAX_TXT_STRING_BYTES)


def parse_txt(record: bytes) -> tuple[str, ...]:
    """Returns the dialable addresses of a TXT record, at most MAX_ADDRESSES_PER_PEER; the rest of it is
    skipped."""
    addresses: list[str] = []
    offset = 0
    while offset < len(record) and len(addresses) < MAX_ADDRESSES_PER_PEER:
        string = record[offset + 1 : offset + 1 + record[offset]]
        offset += 1 + record[offset]
        if not string.startswith(DNSADDR):
            continue
        address = string.removeprefix(DNSADDR).decode("ascii", errors="replace")
        try:
            split_peer(address)
        except NetworkError as error:
            logger.debug("mDNS: %s", error)
        else:
            addresses.append(address)
    return tuple(addresses)


class LocalPeers:
    """The peers that the local network announces: iterating gives the addresses of one instance after the
    other, forever.

    async with local_peers(await host.addresses()) as local:
        async for addresses in local: ...
    """

    def __init__(self, zeroconf: Zeroconf, service: str, own_name: str) -> None:
        self._zeroconf = zeroconf
        self._service = service
        self._own_name = own_name
        self._names: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING_NAMES)

    def on_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Called by zeroconf, which names the arguments."""
        if state_change is ServiceStateChange.Removed or name == self._own_name:
            return
        if self._names.full():
            logger.debug("mDNS: too many instances at once, %s is ignored for now", name)
        else:
            self._names.put_nowait(name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, ...]:
        instance = AsyncServiceInfo(self._service, await self._names.get())
        # It also waits for host records, which some libp2p implementations do not send: only the text counts.
        await instance.async_request(self._zeroconf, TXT_TIMEOUT_S * 1000)
        return parse_txt(instance.text or b"")


@asynccontextmanager
async def local_peers(
    addresses: Sequence[str], *, namespace: str = "", interfaces: Sequence[str] = ()
) -> AsyncGenerator[LocalPeers, None]:
    """Announces our addresses and looks for others, on these interfaces (IP addresses; empty: all).

    Raises NetworkError when the machine has no multicast.
    """
    service = service_type(namespace)
    instance = _our_instance(service, addresses)
    try:
        zeroconf = AsyncZeroconf(interfaces=list(interfaces)) if interfaces else AsyncZeroconf()
    except OSError as error:
        raise NetworkError(f"no multicast DNS on this machine: {error}") from error
    try:
        local = LocalPeers(zeroconf.zeroconf, service, instance.name)
        # A random name needs no probing for conflicts. The awaitable inside is zeroconf's, and untyped.
        await (await zeroconf.async_register_service(instance, cooperating_responders=True))  # pyright: ignore[reportUnknownMemberType]
        browser = AsyncServiceBrowser(zeroconf.zeroconf, [service], handlers=[local.on_change])
        yield local
        await browser.async_cancel()
    finally:
        await zeroconf.async_close()


def _our_instance(service: str, addresses: Sequence[str]) -> ServiceInfo:
    name = secrets.token_hex(16)
    components = [parse_address(address) for address in addresses]
    hosts = {parts[0][1] for parts in components if parts[0][0] in ("ip4", "ip6")}
    ports = [int(parts[1][1]) for parts in components]
    return ServiceInfo(
        service,
        f"{name}.{service}",
        port=ports[0] if ports else 0,
        properties=encode_txt(addresses),
        server=f"{name}.local.",
        parsed_addresses=sorted(hosts),
    )
