"""`swarmnode swarm COMMAND`: private swarms, for invited nodes only.

An extension may put what `swarmnode swarm` does without a command in front of these."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Home
from swarmnode.errors import ConfigError, NetworkError
from swarmnode.extensions.private_swarms.private_swarm import read_met
from swarmnode.extensions.private_swarms.swarm_record import (
    SwarmRecord,
    changed,
    founded,
    load,
    names_in,
    record_of,
    save,
)
from swarmnode.identity.key_file import load_or_create
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.network.admission import file_of
from swarmnode.node.building.node_process import read_running
from swarmnode.node.showing.figures import age
from swarmnode.settings.config_layers import load_config

app = typer.Typer(help="Create and manage a private swarm.", no_args_is_help=True)

Swarm = Annotated[
    str | None, typer.Option("--swarm", help="Which private swarm, if this home is in several.")
]
Seeds = Annotated[
    list[str] | None,
    typer.Option("--seed", metavar="ADDRESS", help="An address to put into invitations; may be repeated."),
]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the swarm.")],
    private: Annotated[
        bool,
        typer.Option("--private", help="Only invited nodes can take part; a public swarm needs no command."),
    ] = False,
    seed: Seeds = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Create a private swarm: make its key, and print an invitation that holds it."""
    load_config(environ={}, flags={"swarm.name": name})
    if not private:
        raise ConfigError(
            "a public swarm exists as soon as somebody joins it",
            hint=f"swarmnode join --swarm {name}, or create it with --private",
        )
    paths = resolve_paths(home)
    if record_of(paths.swarms, name) is not None:
        raise ConfigError(
            f"this home is already in a private swarm {name}", hint=f"swarmnode swarm invite --swarm {name}"
        )
    record = founded(name, load_or_create(paths.identity), seed or ())
    save(record, file_of(paths.swarms, name))
    _print_invitation(record, paths, (), json)


@app.command()
def invite(swarm: Swarm = None, seed: Seeds = None, home: Home = None, json: Json = False) -> None:
    """Print an invitation, with the addresses of the node that runs here. Anyone who has it can take part."""
    paths = resolve_paths(home)
    _print_invitation(_record(paths, swarm), paths, seed or (), json)


@app.command()
def members(swarm: Swarm = None, home: Home = None, json: Json = False) -> None:
    """List the members met, who gets the next key, who may publish, and who was removed."""
    paths = resolve_paths(home)
    record = _record(paths, swarm)
    manifest, met = record.manifest, _met(paths, record.name)
    removed = set(manifest.removed if manifest else ())
    listed = {*met, *(manifest.members if manifest else ()), record.founder} - removed
    may = None if manifest is None else manifest.publishers
    next_key = _next_members(record, paths, met)
    rows = [
        {
            "peer_id": peer,
            "name": memorable_name(peer),
            "founder": peer == record.founder,
            "publishes": peer not in removed and (may is None or peer in may),
            "removed": peer in removed,
            "next_key": peer in next_key,
            "met": met.get(peer),
        }
        for peer in (*sorted(listed), *sorted(removed))
    ]
    tell(json, {"swarm": record.name, "members": rows}, _table(rows))


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        at = row["met"]
        seen = "not met here" if at is None else f"met {age(time.time() - at)} ago"
        notes = [word for word in ("founder", "removed") if row[word]]
        notes += [] if row["publishes"] or row["removed"] else ["does not publish"]
        notes += ["gets the next key"] if row["next_key"] else []
        yield f"{row['peer_id']}  {row['name']:32}  {', '.join([seen, *notes])}"


@app.command()
def remove(
    peers: Annotated[list[str], typer.Argument(metavar="PEER...", help="Peer ids, as `members` lists them.")],
    swarm: Swarm = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Remove members: they are disconnected, and all others get a new key. Founder only."""
    record = _change(resolve_paths(home), swarm, remove=peers, new_key=True)
    tell(json, _changed(record), [f"removed; {_told(record)}"])


@app.command()
def rotate(
    swarm: Swarm = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PEER", help="Give it only to these members; may be repeated."),
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Make a new key and give it to every member; earlier invitations no longer work. Founder only."""
    record = _change(resolve_paths(home), swarm, only=only or (), new_key=True)
    tell(json, _changed(record), [_told(record)])


@app.command()
def publishers(
    peers: Annotated[
        list[str] | None, typer.Argument(metavar="PEER", help="Peer ids. None: anyone with the key.")
    ] = None,
    swarm: Swarm = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Set whose groups the members train on. Founder only."""
    record = _change(resolve_paths(home), swarm, publishers=peers or ())
    told = f"{len(peers)} peers may publish" if peers else f"anyone with the key of {record.name} may publish"
    tell(json, _changed(record), [told])


def _record(paths: Paths, swarm: str | None) -> SwarmRecord:
    names = names_in(paths.swarms)
    if swarm is None and len(names) > 1:
        raise ConfigError(f"this home is in {', '.join(names)}", hint=f"choose one: --swarm {names[0]}")
    name = swarm or "".join(names)
    if name not in names:
        wanted = f"the private swarm {swarm}" if swarm else "any private swarm"
        at = "" if paths.home is None else f" --home {paths.home}"
        raise NetworkError(
            f"this home is not in {wanted}",
            hint=f"swarmnode swarm create {swarm or 'NAME'} --private{at}, or swarmnode join INVITATION{at}",
        )
    return load(file_of(paths.swarms, name))


def _met(paths: Paths, name: str) -> dict[str, float]:
    """Returns the peers that the policies of this home have met, with the last time of each."""
    met: dict[str, float] = {}
    for place in paths.policies():
        for peer, at in read_met(place.met_members(name)).items():
            met[peer] = max(at, met.get(peer, 0.0))
    return met


def _next_members(record: SwarmRecord, paths: Paths, met: Mapping[str, float]) -> tuple[str, ...]:
    """Returns who would get a new key if the founder made one now. A member knows the founder's list only."""
    manifest = record.manifest
    if manifest is not None and paths.identity.exists():
        key = load_or_create(paths.identity)
        if key.peer_id == record.founder:
            manifest = changed(record, key, members=tuple(met)).manifest
    return () if manifest is None else manifest.members


def _change(
    paths: Paths,
    swarm: str | None,
    *,
    only: list[str] | tuple[str, ...] = (),
    remove: list[str] | tuple[str, ...] = (),
    publishers: list[str] | tuple[str, ...] | None = None,
    new_key: bool = False,
) -> SwarmRecord:
    before = _record(paths, swarm)
    record = changed(
        before,
        load_or_create(paths.identity),
        members=tuple(_met(paths, before.name)),
        only=only,
        remove=remove,
        publishers=publishers,
        new_key=new_key,
    )
    save(record, file_of(paths.swarms, record.name))
    return record


def _changed(record: SwarmRecord) -> dict[str, Any]:
    """Returns the result of a founder's change, for JSON. The key is not part of any output."""
    manifest = record.manifest
    assert manifest is not None, "only a founder changes a swarm"
    return {
        "swarm": record.name,
        "members": manifest.members,
        "publishers": manifest.publishers,
        "removed": manifest.removed,
    }


def _told(record: SwarmRecord) -> str:
    members = len(record.manifest.members) - 1 if record.manifest else 0
    return (
        f"a new key for {record.name}: {members} known members receive it when they meet this node or one"
        " another; anyone else needs a new invitation (`swarmnode swarm invite`)"
    )


def _print_invitation(record: SwarmRecord, paths: Paths, seeds: Sequence[str], json: bool) -> None:
    running = read_running(paths.running)
    text = record.invitation((*seeds, *(running.addresses if running else ()))).text()
    typer.echo(
        f"anyone who has this can take part in {record.name}: give it only to those you invite", err=True
    )
    if not record.seeds and not seeds and running is None:
        typer.echo(
            f"it names no address to dial: once `swarmnode join --swarm {record.name}` runs here,"
            " `swarmnode swarm invite` prints one that does, or name one with --seed",
            err=True,
        )
    tell(json, {"swarm": record.name, "invitation": text}, [text])
