"""Who dials a home at its place at a relay, who is dialled there, and who only looks on:

`caller.py FOLDER watch`, `caller.py FOLDER serve RELAY WATCHER...`, `caller.py FOLDER call RELAY ADDRESS
WATCHER...`. A watcher tells the two the address that it sees them at: no hole is punched before they know it.
"""

import asyncio
import json
import os
import sys
from hashlib import sha256
from pathlib import Path

from swarmnode.errors import NetworkError
from swarmnode.identity.key_file import load_or_create
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.multiaddr import is_relayed

PROTOCOL = "/lab/digest/1"
REQUEST_BYTES = 2**20
LIFE_S = 240.0


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def digest(peer: str, request: bytes) -> bytes:
    return sha256(request).digest()


async def call(host: P2pdHost, address: str) -> None:
    peer = address.rpartition("/p2p/")[2]
    answered = 0
    while True:
        error = ""
        try:
            if peer not in await host.peers():
                await host.connect(address)
            request = os.urandom(REQUEST_BYTES)
            answer = await host.request(peer, PROTOCOL, request, max_response_bytes=64)
            answered += answer == sha256(request).digest()
        except NetworkError as failed:
            error = f"{type(failed).__name__}: {failed}"
        ends = (await host.far_ends()).get(peer, ())
        say(ends=ends, answered=answered, error=error, peers=await host.peers())
        await asyncio.sleep(0.5)


async def main(folder: Path, role: str, *addresses: str) -> None:
    load_or_create(folder / "identity.key")
    relays = None if role == "watch" else addresses[:1]
    host = P2pdHost(folder / "identity.key", listen=("/ip4/0.0.0.0/tcp/4001",), relays=relays)
    async with host, asyncio.timeout(LIFE_S):
        for watcher in addresses[2 if role == "call" else 1 :]:
            await host.connect(watcher)
        await host.serve(PROTOCOL, digest, max_request_bytes=2 * REQUEST_BYTES)
        while role == "serve" and not any(map(is_relayed, await host.addresses())):  # noqa: ASYNC110  a Host has no event to wait for
            await asyncio.sleep(0.2)
        say(addresses=await host.addresses())
        if role == "call":
            await call(host, addresses[1])
        await asyncio.sleep(LIFE_S)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
