"""Hosts for the contract tests: the fixture `new_host` (conftest.py) makes them, `connected` joins two."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from swarmnode.extensions.private_swarms.private_host import PrivateHost
from swarmnode.extensions.private_swarms.private_swarm import PrivateSwarm
from swarmnode.extensions.private_swarms.swarm_record import SwarmRecord, founded, save
from swarmnode.identity import key_file
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.admission import file_of
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.streams import StreamHost

HostFactory = Callable[[], StreamHost]


def memory_hosts(folder: Path) -> HostFactory:
    """Makes hosts of one network in this process, each with a key of its own in `folder`."""
    network = MemoryNetwork(seed=1)
    paths = (folder / f"{number}.key" for number in range(100))
    return lambda: network.host(key_file.load_or_create(next(paths)).peer_id)


def p2pd_hosts(folder: Path) -> HostFactory:
    """Makes hosts on the daemon, each with a key of its own in `folder`."""
    paths = (folder / f"{number}.key" for number in range(100))

    def make() -> StreamHost:
        path = next(paths)
        key_file.load_or_create(path)
        return P2pdHost(path)

    return make


def private_hosts(folder: Path, below: HostFactory) -> HostFactory:
    """Makes hosts of one private swarm on others, each with a home of its own in `folder`."""
    record = founded("friends", NodeKey.generate(), ())
    homes = (folder / f"home{number}" for number in range(100))
    return lambda: member(below(), record, next(homes))


def member(below: StreamHost, record: SwarmRecord, home: Path, *, prove_s: float = 10.0) -> PrivateHost:
    """A member whose home has this record."""
    path = file_of(home, record.name)
    save(record, path)
    return PrivateHost(below, PrivateSwarm(path, home / "met.json"), prove_s=prove_s)


@asynccontextmanager
async def connected(new_host: HostFactory) -> AsyncGenerator[tuple[StreamHost, StreamHost], None]:
    async with new_host() as alice, new_host() as bob:
        await alice.connect((await bob.addresses())[0])
        yield alice, bob
