"""`swarmnode identity`: who this node is, and how to take that along to another machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Home, Policy
from swarmnode.errors import IdentityError
from swarmnode.extensions.home.key_text import export_key, import_key
from swarmnode.identity.key_file import load_or_create
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import IdentityLock

app = typer.Typer(help="Show, back up and restore the key that this node is known by.", no_args_is_help=True)


@app.command()
def show(policy: Policy = 0, home: Home = None, json: Json = False) -> None:
    """Print peer id and name; the key is made on first use."""
    path = resolve_paths(home).policy(policy).identity
    key = load_or_create(path)
    found = {"peer_id": key.peer_id, "name": key.name, "path": str(path)}
    tell(json, found, [f"{key.name}\npeer id  {key.peer_id}\nkey      {path}"])


@app.command()
def export(policy: Policy = 0, home: Home = None, json: Json = False) -> None:
    """Print the key as one line. Anyone who has it can act as this node: keep it secret."""
    line = export_key(resolve_paths(home).policy(policy).identity)
    tell(json, {"key": line}, [line])


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="File with the exported line, or - for stdin.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the current key; it is kept as a backup.")
    ] = False,
    policy: Policy = 0,
    home: Home = None,
    json: Json = False,
) -> None:
    """Install an exported key. No node may be running on the current one."""
    path = resolve_paths(home).policy(policy).identity
    with IdentityLock(path):
        key = import_key(_read(source), path, overwrite=overwrite)
    told = f"this node is now {key.name} ({key.peer_id})"
    tell(json, {"peer_id": key.peer_id, "name": key.name, "path": str(path)}, [told])


def _read(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(
            f"cannot read {source}: {error}", hint="name the file with the exported line"
        ) from error
