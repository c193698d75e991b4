"""`swarmnode status`: ask the node that runs on this machine."""

import typer

from swarmnode.cli.settings import Home, Json
from swarmnode.errors import SwarmnodeError
from swarmnode.paths import resolve_paths

TIMEOUT_S = 5.0


def status(home: Home = None, json: Json = False) -> None:
    """Show what the running node does, learns, hears and waits for."""
    import time

    import msgspec
    from rich.console import Console

    from swarmnode.node.panel import render
    from swarmnode.node.running import read_running
    from swarmnode.node.status import NodeStatus

    running = read_running(resolve_paths(home).running)
    if running is None:
        raise SwarmnodeError(
            "no node is running here", hint="start one with `swarmnode join`, or name its --home"
        )
    body = _get(f"http://{running.http_host}:{running.http_port}/status")
    if json:
        typer.echo(body.decode())
        return
    Console().print(render(msgspec.json.decode(body, type=NodeStatus), (), (), time.time()))


def _get(url: str) -> bytes:
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:  # a URL of our own making, on this machine
            return answer.read()
    except (URLError, TimeoutError, ConnectionError) as error:
        raise SwarmnodeError(f"the node at {url} does not answer: {error}", hint="see its log") from error
