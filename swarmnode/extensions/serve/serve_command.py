"""`swarmnode serve`: OpenAI's endpoints for the policy in training here, or for a checkpoint."""

import socket
from typing import Annotated

import typer

from swarmnode.cli.settings import (
    Assignments,
    Base,
    Best,
    ConfigFile,
    Home,
    Model,
    Policy,
    Preset,
    RunName,
    settings_of_trained,
)
from swarmnode.errors import ConfigError
from swarmnode.extensions.page.bounded_server import BoundedServer, bounded_server, listen_on, url_of
from swarmnode.extensions.serve.api_guard import ApiGuard
from swarmnode.extensions.serve.api_routes import FindService, application
from swarmnode.extensions.serve.standing_alone import answering
from swarmnode.settings.config import SHORTEST_PASSWORD, is_loopback

IDLE_S = 30
"""Seconds for which a connection is kept open for another request."""
CORE_SHARE = 0.5
"""Enough for about two hundred questions a second, or three thousand tokens sent one by one."""


def serve(
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. If other machines can reach it, a key is needed."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for any free one.")] = 8000,
    key: Annotated[
        str,
        typer.Option(
            "--key",
            envvar="SWARMNODE_SERVE_KEY",
            show_envvar=True,
            show_default=False,
            help="Key that clients must send. Better set the variable: others can see a command line.",
        ),
    ] = "",
    model: Model = None,
    base: Base = False,
    best: Best = False,
    run: RunName = None,
    policy: Policy = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> None:
    """Answer as OpenAI's API does, with the policy that trains here now; without a running node, with its
    newest checkpoint (or the best, or the base model)."""
    if key and len(key) < SHORTEST_PASSWORD:
        raise ConfigError(f"the key needs {SHORTEST_PASSWORD} characters or more", hint="choose a longer one")
    if not key and not is_loopback(host):
        raise ConfigError(
            f"other machines can reach {host}", hint="set SWARMNODE_SERVE_KEY, or leave out --host"
        )
    settings = settings_of_trained(
        home=home, preset=preset, config=config, set_=set_, model=model, run=run, policy=policy
    )
    with (
        listen_on(host, port) as listening,
        answering(settings, base=base, best=best, model=model, run=run, policy=policy) as found,
    ):
        typer.echo(f"serving {found.about} at {url_of(host, listening)}/v1 (Ctrl-C ends)")
        try:
            api_server(found.find, host, key).run([listening])
        except KeyboardInterrupt:
            typer.echo("stopped serving")


def api_server(find: FindService, host: str, key: str) -> BoundedServer:
    """Returns the server of the endpoints, not running yet."""
    guard = ApiGuard(application(find), bound=host, own_name=socket.gethostname(), key=key)
    return bounded_server(guard, idle_s=IDLE_S, core_share=CORE_SHARE)
