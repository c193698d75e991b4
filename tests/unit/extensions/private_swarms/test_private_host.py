"""Who is barred after a new key of a private swarm: strangers, not the members who have yet to hear of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnode.extensions.private_swarms import private_host
from swarmnode.extensions.private_swarms.private_host import NEWS_EVERY_S, PROVE_S, PrivateHost
from swarmnode.extensions.private_swarms.swarm_record import changed, founded, save
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.admission import file_of
from swarmnode.network.memory_network import MemoryNetwork
from tests.contracts.hosts import member
from tests.unit.exchange.conftest import Clock

FRIENDS = 5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all members, which look around only when a test has them."""
    clock = Clock()
    monkeypatch.setattr(PrivateHost, "_watch", lambda self: asyncio.Event().wait())
    monkeypatch.setattr(private_host, "time", SimpleNamespace(monotonic=clock))
    return clock


@asynccontextmanager
async def after_a_new_key(network: MemoryNetwork, home: Path) -> AsyncIterator[tuple[PrivateHost, ...]]:
    """The founder, who has moved to a new key, and its friends, who have not heard of it; all connected."""
    key = NodeKey.generate()
    record = founded("friends", key, ())
    async with AsyncExitStack() as stack:
        below = [network.host(key.peer_id), *(network.host() for _ in range(FRIENDS))]
        hosts = [
            await stack.enter_async_context(member(host, record, home / str(number)))
            for number, host in enumerate(below)
        ]
        # Its friends met the founder last, and ask those first whom they met first.
        for number, host in enumerate(reversed(hosts)):
            for other in hosts[::-1][number + 1 :]:
                await host.connect((await other.addresses())[0])
        members = [host.peer_id for host in hosts]
        save(changed(record, key, members=members, new_key=True), file_of(home / "0", "friends"))
        hosts[0]._swarm.refresh()
        await hosts[0]._move()
        await hosts[0]._look()
        yield tuple(hosts)


async def test_members_who_have_not_heard_of_a_new_key_are_not_barred_and_hear_of_it_when_they_look(
    tmp_path: Path, clock: Clock
) -> None:
    async with after_a_new_key(MemoryNetwork(), tmp_path) as (founder, *friends):
        clock.advance(PROVE_S + 1)
        await founder._look()
        assert len(await founder._inner.peers()) == FRIENDS
        for friend in friends:
            await friend._look()
        assert {friend._swarm.key for friend in friends} == {founder._swarm.key}


async def test_who_does_not_prove_the_new_key_in_the_end_is_barred(tmp_path: Path, clock: Clock) -> None:
    async with after_a_new_key(MemoryNetwork(), tmp_path) as (founder, *_):
        clock.advance(NEWS_EVERY_S * (FRIENDS + 2) + 1)
        await founder._look()
        assert await founder._inner.peers() == ()
