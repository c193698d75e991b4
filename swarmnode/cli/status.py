"""`swarmnode status`: ask the node that runs on this machine."""

import typer

from swarmnode.cli.settings import Home, Json
from swarmnode.errors import IdentityInUse, SwarmnodeError
from swarmnode.paths import Paths, resolve_paths

TIMEOUT_S = 5.0


def status(home: Home = None, json: Json = False) -> None:
    """Show what the running node does, learns, hears and waits for."""
    import time
    from http.client import HTTPException
    from urllib.request import urlopen

    import msgspec
    from rich.console import Console

    from swarmnode.node.panel import render
    from swarmnode.node.running import read_running
    from swarmnode.node.status import NodeStatus

    paths = resolve_paths(home)
    running = read_running(paths.running)
    if running is None:
        raise _not_running(paths)
    url = f"http://{running.http_host}:{running.http_port}/status"
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:  # a URL of our own making, on this machine
            found = msgspec.json.decode(answer.read(), type=NodeStatus)
    except (OSError, HTTPException, ValueError, msgspec.DecodeError) as error:
        raise SwarmnodeError(
            f"no node answers at {url}: {error}", hint=f"see {paths.logs}/node.log"
        ) from error
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        Console().print(render(found, (), (), time.time()))


def _not_running(paths: Paths) -> SwarmnodeError:
    """Nobody home, or somebody who is still getting dressed: the identity is locked from the first moment."""
    from swarmnode.identity.lock import IdentityLock

    if paths.identity.exists():
        try:
            with IdentityLock(paths.identity):
                pass
        except IdentityInUse as error:
            return SwarmnodeError(f"a node is starting: {error.message}", hint="ask again in some seconds")
    return SwarmnodeError(
        "no node is running here", hint="start one with `swarmnode join`, or name its --home"
    )
