"""The first addresses to dial: addresses, files of addresses, and names in the DNS, in one list."""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from swarmnode.errors import ConfigError, NetworkError
from swarmnode.network.multiaddr import is_address, is_dns_name, split_peer

logger = logging.getLogger(__name__)

SHIPPED = "shipped"

DNSADDR = "/dnsaddr/"

MAX_FILE_BYTES = 64 * 1024

MAX_ADDRESSES_OF_NAME = 16

LOOK_UP_TIMEOUT_S = 5.0

Resolve = Callable[[str], Awaitable[Sequence[bytes]]]
"""Called with a DNS name; returns the strings of its TXT records. Raises NetworkError."""


class Seeds(msgspec.Struct, frozen=True):
    """The first peers to dial."""

    addresses: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """DNS names that stand for further addresses."""


def read_seeds(entries: Sequence[str], shipped: Path) -> Seeds:
    """Returns the addresses and names in a list of seeds. `shipped` is the list that came with swarmnode.

    Raises NetworkError for a malformed entry, and ConfigError for a file that cannot be read."""
    addresses: dict[str, None] = {}
    names: dict[str, None] = {}
    for entry in entries:
        if entry.startswith(DNSADDR) or is_address(entry):
            _read_line(entry, addresses, names)
            continue
        for line in _lines(shipped if entry == SHIPPED else Path(entry).expanduser()):
            _read_line(line, addresses, names)
    return Seeds(tuple(addresses), tuple(names))


def _read_line(line: str, addresses: dict[str, None], names: dict[str, None]) -> None:
    if not line.startswith(DNSADDR):
        split_peer(line)
        addresses[line] = None
        return
    name = line.removeprefix(DNSADDR)
    if not is_dns_name(name):
        raise NetworkError(f"{line!r} has no host name", hint="it looks like /dnsaddr/seeds.example.org")
    names[name] = None


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"the list of seeds {path} is larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is neither an address nor a readable list of seeds: {error}",
            hint="pass addresses like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..., or a file of them",
        ) from error
    for line in text.splitlines():
        if said := line.partition("#")[0].strip():
            yield said


async def look_up(name: str, resolve: Resolve) -> tuple[str, ...]:
    """Returns the addresses in a name's records, at most MAX_ADDRESSES_OF_NAME. Raises NetworkError."""
    found: list[str] = []
    for record in (await resolve(f"_dnsaddr.{name}"))[: 4 * MAX_ADDRESSES_OF_NAME]:
        text = record.decode("ascii", errors="replace")
        try:
            split_peer(text.removeprefix("dnsaddr="))
        except NetworkError as error:
            logger.debug("skipping a record of %s: %s", name, error)
        else:
            found.append(text.removeprefix("dnsaddr="))
    return tuple(found[:MAX_ADDRESSES_OF_NAME])


async def ask_dns(name: str) -> Sequence[bytes]:
    """Returns the strings of a name's TXT records, from this machine's resolver. Raises NetworkError."""
    # Imported only if there is a name to look up.
    from dns.asyncresolver import Resolver
    from dns.exception import DNSException

    try:
        answer = await Resolver().resolve(name, "TXT", lifetime=LOOK_UP_TIMEOUT_S)
    except (DNSException, OSError) as error:
        raise NetworkError(f"cannot look up {name}: {error}") from error
    return [b"".join(record.strings) for record in answer]
