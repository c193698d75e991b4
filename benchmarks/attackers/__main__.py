"""One attack as a process of its own.

python -m attackers NAME --target ADDRESS [--target ADDRESS] [--seconds N] -> JSON lines, the last one "done"

For the project's own nodes on this machine: every target must be a loopback address.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from swarmnode.network.multiaddr import parse_address

from .attacks import ATTACKS
from .stage import Stage

LOOPBACK = "127.0.0.1"
MOST_SECONDS = 900.0


async def attack(options: argparse.Namespace) -> None:
    told = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(
            targets=tuple(options.target),
            swarm=options.swarm,
            seconds=min(options.seconds, MOST_SECONDS),
            folder=Path(folder),
            told=told,
            about=options.about,
            seed=options.seed,
        )
        connected_after = await ATTACKS[options.name](stage)
        stage.say("done", sent=dict(stage.sent), connected_after=connected_after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--target", action="append", required=True)
    parser.add_argument("--swarm", default="commons")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--about", default="")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for target in options.target:
        if parse_address(target)[0] != ("ip4", LOOPBACK):
            parser.error(f"{target} is not on this machine")
    asyncio.run(attack(options))


if __name__ == "__main__":
    main()
