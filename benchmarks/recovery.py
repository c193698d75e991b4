"""How long a node is off the network when its daemon is killed.

python benchmarks/recovery.py [--quick] [--json FILE]

Two hosts gossip over loopback. SIGKILL hits the daemon of one of them, again and again; measured are the
seconds until its host is up again, and until a message published after the kill has arrived in both
directions: the median, and as spread the fastest and the slowest.

The first restart is immediate; a daemon killed every few seconds is restarted with back-off, so each round
starts from a fresh pair of hosts.
"""

import asyncio
import os
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from common import arguments, report

from swarmnode.errors import HostDown
from swarmnode.identity import key_file
from swarmnode.network.daemon.daemon_supervisor import PROBE_INTERVAL_S
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.host import Subscription

TOPIC = "/swarmnode/4/benchmark/rollouts/0"
PUBLISH_EVERY_S = 0.02
ROUND_TIMEOUT_S = 60.0


def new_host(folder: Path, name: str) -> P2pdHost:
    key_file.load_or_create(folder / f"{name}.key")
    return P2pdHost(folder / f"{name}.key")


async def until_delivered(sender: P2pdHost, receiver: Subscription, data: bytes) -> float:
    """Publish until it arrives; returns the time of arrival."""
    arrived = asyncio.Event()

    async def publish() -> None:
        while not arrived.is_set():
            with suppress(HostDown):
                await sender.publish(TOPIC, data)
            await asyncio.sleep(PUBLISH_EVERY_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        async for message in receiver:
            if message.data == data:
                arrived.set()
                return time.monotonic()
    raise AssertionError("the subscription ended")


async def until_back(host: P2pdHost) -> float:
    while True:
        if host.status().restarts == 1 and host.status().state == "up":
            return time.monotonic()
        await asyncio.sleep(0.002)


async def measure_round(folder: Path) -> tuple[float, float]:
    """(seconds until the host is up, seconds until gossip flows both ways), from the SIGKILL."""
    async with new_host(folder, "alice") as alice, new_host(folder, "bob") as bob:
        await alice.connect((await bob.addresses())[0])
        at_alice, at_bob = await alice.subscribe(TOPIC), await bob.subscribe(TOPIC)
        await until_delivered(alice, at_bob, b"before")
        await until_delivered(bob, at_alice, b"before")
        await asyncio.sleep(PROBE_INTERVAL_S + 0.5)  # steady state: bob knows where alice listens

        pid = bob.daemon_pid
        assert pid is not None
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(ROUND_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            back = tasks.create_task(until_back(bob))
            inward = tasks.create_task(until_delivered(alice, at_bob, b"after"))
            outward = tasks.create_task(until_delivered(bob, at_alice, b"after"))
        return back.result() - killed, max(inward.result(), outward.result()) - killed


async def measure(rounds: int) -> list[tuple[float, float]]:
    results: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, rounds + 1):
            results.append(await measure_round(Path(folder)))
            host_s, gossip_s = results[-1]
            print(f"kill {number:2}: host back after {host_s:.2f} s, gossip both ways after {gossip_s:.2f} s")
    return results


def main() -> None:
    options = arguments("seconds from the death of the network daemon to gossip flowing again")
    results = asyncio.run(measure(rounds=5 if options.quick else 20))
    host_s, gossip_s = ([result[column] for result in results] for column in (0, 1))
    report(
        "recovery",
        claims={"host_back_s": statistics.median(host_s), "gossip_back_s": statistics.median(gossip_s)},
        spread={
            "host_back_s": (min(host_s), max(host_s)),
            "gossip_back_s": (min(gossip_s), max(gossip_s)),
        },
        json_path=options.json,
    )


if __name__ == "__main__":
    main()
