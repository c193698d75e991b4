"""`swarmnode seed`: a steady address through which others find their swarm."""

from typing import Annotated

import typer

from swarmnode.cli.settings import Assignments, ConfigFile, Home, invited
from swarmnode.extensions.seed.seed_node import run_seed
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.settings.config_layers import load_config


def seed(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="ADDRESS", help="An invitation, or other seeds or members to dial."),
    ] = None,
    swarm: Annotated[str | None, typer.Option("--swarm", help="Name of the swarm.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="TCP port to listen on; 4001 if not set.")
    ] = None,
    home: Home = None,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> None:
    """Run a bootstrap node: it connects others, trains nothing, and needs neither torch nor a model.

    The only line on standard output is the address that others join with, printed once it is reachable.
    """
    swarm, addresses = invited(home, swarm, addresses)
    paths = resolve_paths(home)
    flags = {"swarm.name": swarm, "network.port": port, "network.seeds": tuple(addresses or ()) or None}
    loaded = load_config(
        user_file=paths.user_config,
        config_file=config,
        assignments=set_ or (),
        flags={key: value for key, value in flags.items() if value is not None},
    )
    with STOP_SIGNALS:
        run_seed(loaded.config, paths, tell=typer.echo)
