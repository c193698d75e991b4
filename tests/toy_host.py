"""A module of a user's with a transport of its own, named in `network.transport` by import path."""

from itertools import count
from pathlib import Path

from swarmnode.identity.key_file import load_or_create
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork

NETWORK = MemoryNetwork(seed=0)
PORTS = count(1)


class LosesEveryTenth(MemoryHost):
    """Gossips all but every tenth message."""

    given = 0

    async def publish(self, topic: str, data: bytes) -> None:
        self.given += 1
        if self.given % 10:
            await super().publish(topic, data)


def host(identity_path: Path, **options: object) -> LosesEveryTenth:
    """Makes the host of the node with this key. There is one network, within this process."""
    key = load_or_create(identity_path)
    return LosesEveryTenth(NETWORK, key.peer_id, port=next(PORTS))


OWN_TRANSPORT = f"{__name__}:{host.__name__}"
