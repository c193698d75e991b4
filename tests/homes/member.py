"""A member of a swarm without a policy, to be run in a home of the lab: `member.py FOLDER PORT [ADDRESS]...`

It announces groups of one small task, fetches those of others and says now and then what it has. Its
environment says how often it announces (MEMBER_EVERY_S), how long each answer is (MEMBER_CHARS), a file
beside which it rests (MEMBER_REST), whether it asks its router for a port (MEMBER_MAP_PORT), and which
private swarm it is in (MEMBER_RECORD, a file as homes have it).
"""

import asyncio
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.extensions.mdns.mdns import local_peers
from swarmnode.extensions.private_swarms.private_host import PrivateHost
from swarmnode.extensions.private_swarms.private_swarm import PrivateSwarm
from swarmnode.identity.key_file import load_or_create
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.tasks.task import draw_train, score_strictly
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, one_span

PUBLISH_EVERY_S = float(os.environ.get("MEMBER_EVERY_S", "0.5"))
CHARS = int(os.environ.get("MEMBER_CHARS", "0"))
ANSWERS = 16 if CHARS else 2
REST = Path(os.environ.get("MEMBER_REST", "/nonexistent"))
RECORD = os.environ.get("MEMBER_RECORD", "")
MAP_PORT = "MEMBER_MAP_PORT" in os.environ
LIFE_S = 240.0
"""No test takes longer; a member that nobody ends goes by itself."""


class Addition:
    """`12 + 7 =`, endlessly."""

    name = "addition"
    version = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        rng = random.Random(seed)
        for index in count():
            a, b = rng.randrange(1000), rng.randrange(1000)
            yield Example(ExampleKey("addition", "1", seed, index), f"{a} + {b} =", {"answer": str(a + b)})

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        return [{"correct": float(text.split()[0] == example.columns["answer"])} for text in completions]


def rests() -> bool:
    return REST.exists()


async def main(folder: Path, port: int, seeds: Sequence[str]) -> None:
    task, key = Addition(), load_or_create(folder / "identity.key")
    host = P2pdHost(folder / "identity.key", listen=(f"/ip4/0.0.0.0/tcp/{port}",), map_port=MAP_PORT)
    if RECORD:
        host = PrivateHost(host, PrivateSwarm(Path(RECORD), folder / "met.json"))
    book = PeerBook.load(folder / "peers.json")
    discovery = Discovery(
        host, book, seeds, "/swarmnode/homes", local_peers=local_peers, asks_router=MAP_PORT
    )
    exchange = Exchange(
        host,
        key,
        {task.name: task},
        encode=lambda text, finish: (*text.encode(), 256),
        prompt_ids=lambda text: tuple(text.encode()),
        settings=ExchangeSettings(receipts_every_s=1.0),
        model_family="none",
        model_size=None,
    )

    async def publish() -> None:
        for example in draw_train(task, int.from_bytes(key.peer_id.encode()[-4:], "big")):
            while rests():  # noqa: ASYNC110  a file has no event to wait for
                await asyncio.sleep(0.2)
            tails = [f" {secrets.token_hex(CHARS)[:CHARS]}" if CHARS else "" for _ in range(ANSWERS)]
            texts = [example.columns["answer"] + tails[0], *(f"no idea{tail}" for tail in tails[1:])]
            completions = tuple(Completion(text, (1,), None, one_span(0, 1), "stop") for text in texts)
            scores = score_strictly(task, example, texts)
            await exchange.publish([RolloutGroup(example, completions, scores, key.peer_id, 0)])
            await asyncio.sleep(PUBLISH_EVERY_S)

    async def collect() -> None:
        authors: dict[str, int] = {}
        while True:
            for group in await exchange.collect(0 if rests() else 4, 0, deadline_s=0.2):
                authors[group.author] = authors.get(group.author, 0) + 1
                exchange.receipts.note_learnt([(group.author, group.example.key, 1)])
            peers = list(await host.peers()) if host.status().state == "up" else []
            reach = discovery.reach
            line = {"at": time.time(), "peer": key.peer_id, "peers": peers, "authors": authors}
            stats = exchange.stats()
            line |= {"banned": stats.banned_peers, "thanked_by": stats.receipts.nodes}
            line |= {"verdict": reach.verdict, "told": reach.as_line(), "invites": reach.addresses}
            print(json.dumps(line), flush=True)
            await asyncio.sleep(0.3)

    async with host, exchange, asyncio.timeout(LIFE_S), asyncio.TaskGroup() as tasks:
        print(json.dumps({"addresses": await host.addresses()}), flush=True)
        for work in (discovery.run(), publish(), collect()):
            tasks.create_task(work)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
