"""What the host has to bear without a node's help: its own daemon, and streams of peers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.attackers.handle import Attacker
from swarmnode.errors import HostDown, NetworkError
from swarmnode.identity import key_file
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.host import Subscription

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ECHO = "/swarmnode/test/echo/1"
NAMESPACE = "hostile"
TOPIC = "/swarmnode/4/commons/rollouts/0"
MIB = 2**20
BOUND_MIB = 300
"""What a daemon may hold above what it held before."""


def host_in(folder: Path, name: str) -> P2pdHost:
    key_file.load_or_create(folder / f"{name}.key")
    return P2pdHost(folder / f"{name}.key")


async def echo(peer_id: str, request: bytes) -> bytes:
    return request


@asynccontextmanager
async def conversing(folder: Path) -> AsyncGenerator[tuple[P2pdHost, P2pdHost], None]:
    """A victim and an honest host that know each other."""
    async with host_in(folder, "victim") as victim, host_in(folder, "honest") as honest:
        await victim.serve(ECHO, echo, max_request_bytes=1024)
        await honest.connect((await victim.addresses())[0])
        yield victim, honest


def memory_mib(host: P2pdHost) -> float:
    """Of its daemon; 0 while there is none."""
    pid = host.daemon_pid
    try:
        return psutil.Process(pid).memory_info().rss / MIB if pid is not None else 0.0
    except psutil.NoSuchProcess:
        return 0.0


async def subscribed(host: P2pdHost) -> Subscription:
    """Also where the daemon has just been replaced, and does not answer yet."""
    while True:
        try:
            return await host.subscribe(TOPIC)
        except HostDown:
            await asyncio.sleep(0.2)


async def assert_gossip_flows(sender: P2pdHost, receiver: P2pdHost) -> None:
    async with asyncio.timeout(60):
        subscription = await subscribed(receiver)
        while True:
            try:
                await sender.publish(TOPIC, b"still there?")
                async with asyncio.timeout(0.2):
                    async for message in subscription:
                        if message.sender == sender.peer_id:
                            return
            except (TimeoutError, NetworkError):
                continue


async def test_a_provider_with_an_id_of_three_bytes_does_not_hide_the_honest_one(tmp_path: Path) -> None:
    async with conversing(tmp_path) as (victim, honest):
        await advertise(honest)
        with Attacker("short_provider", await victim.addresses(), seconds=60) as attacker:
            await asyncio.to_thread(attacker.wait_for, "ready")
            async with asyncio.timeout(30):
                # The routing table takes a new member in after it has answered a question.
                while not await is_asked(attacker):
                    await find(victim)
            found = await find(victim)
        assert any(address.endswith(honest.peer_id) for address in found)
        assert victim.status().restarts == 0


async def advertise(host: P2pdHost) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                return await host.advertise(NAMESPACE)
            except NetworkError:
                await asyncio.sleep(0.2)  # connections are young: nobody stands in its routing table yet


async def find(host: P2pdHost) -> tuple[str, ...]:
    return await host.find(NAMESPACE, timeout_s=5.0)


async def is_asked(attacker: Attacker) -> bool:
    attacker.tell("how many?")
    return (await asyncio.to_thread(attacker.wait_for, "answered"))["answers"] > 0


async def test_an_honest_peer_is_served_while_others_hold_streams_half_open(tmp_path: Path) -> None:
    async with conversing(tmp_path) as (victim, honest):
        with Attacker("half_open", await victim.addresses(), seconds=60, about=ECHO) as attacker:
            ready = await asyncio.to_thread(attacker.wait_for, "ready")
            assert ready["streams"] > 0
            answers = [
                await honest.request(victim.peer_id, ECHO, b"me too?", max_response_bytes=64)
                for _ in range(10)
            ]
        assert answers == [b"me too?"] * 10


async def test_a_flood_of_topics_does_not_keep_a_daemon_large(tmp_path: Path) -> None:
    async with conversing(tmp_path) as (victim, honest):
        before = memory_mib(victim)
        with Attacker("subscribe_flood", await victim.addresses(), seconds=15) as attacker:
            done = await asyncio.to_thread(attacker.done)
        assert done["sent"]
        async with asyncio.timeout(60):
            while not 0 < memory_mib(victim) < before + BOUND_MIB:  # noqa: ASYNC110  a process has no event
                await asyncio.sleep(0.5)
        await assert_gossip_flows(honest, victim)
