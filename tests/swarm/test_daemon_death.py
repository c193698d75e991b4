"""The network process dies or freezes; the host comes back as the same peer, and the swarm goes on."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarmnode.errors import HostDown, NetworkError
from swarmnode.identity import key_file
from swarmnode.network.daemon.daemon_supervisor import PROBE_INTERVAL_S
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.host import Subscription

TOPIC = "/swarmnode/4/test/rollouts/0"
ECHO = "/swarmnode/test/echo/1"
BACK_WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def needs_the_daemon() -> None:
    try:
        find_daemon()
    except NetworkError as error:
        pytest.skip(str(error))


def host_in(folder: Path, name: str) -> P2pdHost:
    path = folder / f"{name}.key"
    key_file.load_or_create(path)
    return P2pdHost(path)


async def echo(peer_id: str, request: bytes) -> bytes:
    return request


@asynccontextmanager
async def conversing(folder: Path) -> AsyncGenerator[tuple[P2pdHost, P2pdHost], None]:
    """Two connected hosts that serve ECHO. Alice dialled, so bob learns from her call where she listens."""
    async with host_in(folder, "alice") as alice, host_in(folder, "bob") as bob:
        await alice.serve(ECHO, echo, max_request_bytes=1024)
        await bob.serve(ECHO, echo, max_request_bytes=1024)
        await alice.connect((await bob.addresses())[0])
        await asyncio.sleep(PROBE_INTERVAL_S + 0.5)  # the next health probe is when bob notes it down
        yield alice, bob


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 30.0) -> None:
    """Calls may fail on the way, but only in the ways that the Protocol names."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                if await holds():
                    return
            except NetworkError:
                pass
            await asyncio.sleep(0.05)


async def assert_gossip_flows(sender: P2pdHost, subscription: Subscription, data: bytes) -> None:
    async def arrived() -> bool:
        await sender.publish(TOPIC, data)
        try:
            message = await asyncio.wait_for(anext(subscription), 0.1)
        except TimeoutError:
            return False
        return (message.sender, message.data) == (sender.peer_id, data)

    await until(arrived)


async def assert_answers(asker: P2pdHost, answerer: P2pdHost) -> None:
    async def answered() -> bool:
        return (
            await asker.request(answerer.peer_id, ECHO, b"still you?", max_response_bytes=64) == b"still you?"
        )

    await until(answered)


async def bring_down(host: P2pdHost, how: signal.Signals) -> None:
    pid = host.daemon_pid
    assert pid is not None
    os.kill(pid, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_host_whose_daemon_dies_or_freezes_comes_back_as_itself(tmp_path: Path, how: signal.Signals):
    async with conversing(tmp_path) as (alice, bob):
        at_alice, at_bob = await alice.subscribe(TOPIC), await bob.subscribe(TOPIC)
        await assert_gossip_flows(alice, at_bob, b"before")
        await assert_gossip_flows(bob, at_alice, b"before")
        peer_id, addresses = bob.peer_id, await bob.addresses()

        await bring_down(bob, how)

        async def is_back() -> bool:
            return bob.status().restarts == 1 and bob.status().state == "up"

        await until(is_back, BACK_WITHIN_S)
        assert bob.status().detail
        assert (bob.peer_id, await bob.addresses()) == (peer_id, addresses)
        await assert_gossip_flows(alice, at_bob, b"after")
        await assert_gossip_flows(bob, at_alice, b"after")
        await assert_answers(alice, bob)
        await assert_answers(bob, alice)


async def test_while_the_daemon_is_away_calls_say_so_and_nothing_else(tmp_path: Path):
    async with conversing(tmp_path) as (alice, bob):
        refusals: list[str] = []
        await bring_down(bob, signal.SIGKILL)
        while bob.status().restarts == 0:
            try:
                await bob.publish(TOPIC, b"anyone?")
            except HostDown as error:
                refusals.append(error.message)
            await asyncio.sleep(0.005)
        assert refusals
        await assert_answers(bob, alice)


async def test_a_daemon_that_cannot_start_again_is_tried_until_it_can(tmp_path: Path):
    key, away = tmp_path / "alice.key", tmp_path / "elsewhere.key"
    async with host_in(tmp_path, "alice") as alice:
        peer_id = alice.peer_id
        key.rename(away)
        await bring_down(alice, signal.SIGKILL)

        async def says_why() -> bool:
            return alice.status().state == "restarting" and "identity" in alice.status().detail

        await until(says_why)
        away.rename(key)

        async def is_back() -> bool:
            return (alice.status().state, alice.peer_id) == ("up", peer_id)

        await until(is_back)


async def test_a_daemon_killed_again_and_again_keeps_its_subscriptions(tmp_path: Path):
    async with conversing(tmp_path) as (alice, bob):
        at_bob = await bob.subscribe(TOPIC)
        await assert_gossip_flows(alice, at_bob, b"life 0")
        for life in (1, 2, 3):
            await bring_down(bob, signal.SIGKILL)

            async def is_back(restarts: int = life) -> bool:
                return bob.status().restarts == restarts and bob.status().state == "up"

            await until(is_back, BACK_WITHIN_S)
            await assert_gossip_flows(alice, at_bob, f"life {life}".encode())
