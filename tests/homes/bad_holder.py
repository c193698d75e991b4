"""A reachable holder that does harm, to be run in the lab: `bad_holder.py FOLDER PORT KIND [ADDRESS]...`

It floods with announcements of bodies that it does not have. KIND is what it answers who asks for one,
its own or another's: lies, half of it, nothing in time (stalls) or nothing at all (drops).
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from swarmnode.errors import NetworkError
from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL, MAX_REQUEST_BYTES, read_request
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.gossip.header_gossip import topic_of
from swarmnode.exchange.limits import MAX_BODY_BYTES
from swarmnode.identity.key_file import load_or_create
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.tasks.task import draw_train, score_strictly
from swarmnode.types import Completion, RolloutGroup, one_span
from tests.homes.member import LIFE_S, Addition

TOPIC = topic_of("commons")
FLOOD_EVERY_S = 0.05


async def main(folder: Path, port: int, kind: str, seeds: Sequence[str]) -> None:
    task, key = Addition(), load_or_create(folder / "identity.key")
    host = P2pdHost(folder / "identity.key", listen=(f"/ip4/0.0.0.0/tcp/{port}",))
    bodies: dict[bytes, bytes] = {}
    asked_by: set[str] = set()

    async def answer(peer: str, request: bytes) -> bytes:
        body_hash, author = read_request(request)
        asked_by.add(peer)
        if kind == "stalls":
            await asyncio.sleep(LIFE_S)
        if kind == "drops":
            return b""
        body = bodies.get(body_hash, b"")
        if kind == "half" and author != key.peer_id:
            body = await host.request(author, BODY_PROTOCOL, request, max_response_bytes=MAX_BODY_BYTES)
        return b"what you asked for" if kind == "lies" else body[: len(body) // 2]

    async def flood() -> None:
        for example in draw_train(task, 7):
            texts = [example.columns["answer"], "no idea"]
            completions = tuple(Completion(text, (1,), None, one_span(0, 1), "stop") for text in texts)
            scores = score_strictly(task, example, texts)
            group = RolloutGroup(example, completions, scores, key.peer_id, 0)
            composed = compose(group, key, swarm="commons", model=ModelLabel("none", None), now=time.time())
            bodies[composed.header.body_hash] = composed.body
            try:
                await host.publish(TOPIC, composed.sealed)
            except NetworkError as error:
                print(error, file=sys.stderr)
            print(json.dumps({"peer": key.peer_id, "asked_by": sorted(asked_by)}), flush=True)
            await asyncio.sleep(FLOOD_EVERY_S)

    async with host, asyncio.timeout(LIFE_S):
        await host.serve(BODY_PROTOCOL, answer, max_request_bytes=MAX_REQUEST_BYTES)
        # Headers pass only through who is on their topic.
        await host.subscribe(TOPIC)
        for address in seeds:
            await host.connect(address)
        print(json.dumps({"addresses": await host.addresses()}), flush=True)
        await flood()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
