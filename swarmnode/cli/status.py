"""`swarmnode status`: ask the node that runs on this machine."""

import time
from contextlib import suppress
from typing import Annotated

import psutil
import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Home
from swarmnode.errors import SwarmnodeError
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.node.building.node_process import IdentityLock, RunningNode, read_running
from swarmnode.node.building.page_client import ask_status
from swarmnode.node.showing.at_work import at_work
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.node.showing.screen import find_panel
from swarmnode.printable import printable


def status(
    home: Home = None,
    json: Json = False,
    healthy: Annotated[
        bool, typer.Option("--healthy", help="One line; fails if no round has finished for too long.")
    ] = False,
) -> None:
    """Show what the running node is doing, learning, hearing and waiting for, for each of its policies."""
    paths = resolve_paths(home)
    answers = [ask_status(note, paths) for note in running_nodes(paths)]
    found = [answer for answer in answers if not isinstance(answer, SwarmnodeError)]
    if not found:
        raise next(answer for answer in answers if isinstance(answer, SwarmnodeError))
    if healthy:
        _say_healthy(found, json)
        return
    alone = found[0].policies == 1
    panel = find_panel()
    pictures = () if panel is None else map(panel.picture, found)
    tell(json or panel is None, found[0] if alone else {"policies": found}, pictures)


def _say_healthy(found: list[NodeStatus], json: bool) -> None:
    """Prints a line for each policy. Raises SwarmnodeError for the first that makes no progress."""
    said: dict[str, str] = {}
    for one in found:
        well, said[one.name] = at_work(one, time.time())
        if not well:
            raise SwarmnodeError(f"{one.name}: {said[one.name]}", hint="see node.log, then restart the node")
    tell(json, said, (f"{name}: {printable(told)}" for name, told in said.items()))


def running_nodes(paths: Paths) -> list[RunningNode]:
    """Returns the notes of all policies that run here. Raises SwarmnodeError if none does, or if we may not
    read this home."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            paths.running.open().close()
    except PermissionError:
        raise SwarmnodeError(
            f"permission denied reading {paths.running}",
            hint="run this as the user who started the node, or name your own --home",
        ) from None
    running = [note for place in paths.policies() if (note := read_running(place.running)) is not None]
    if not running:
        raise _not_running(paths)
    return running


def _not_running(paths: Paths) -> SwarmnodeError:
    """Returns the error for no node, or for one that is still starting, which locks the identity first. The
    lock is only inspected: taking it here could keep a node from starting."""
    lock = IdentityLock(paths.identity).path
    with suppress(OSError, ValueError, psutil.Error):
        holder = psutil.Process(int(lock.read_text()))
        if any(lock.samefile(file.path) for file in holder.open_files()):
            said = f"a node is starting: process {holder.pid} holds this identity"
            return SwarmnodeError(said, hint="try again in a few seconds")
    return SwarmnodeError(
        "no node is running here",
        hint="start one with `swarmnode join`, or pass the --home of a running node",
    )
