"""`swarmnode pause`, `resume`, `finish` and `stop`: ask the node that runs on this machine for something.

command line -> [pause, resume, finish, stop] -> page_client.py: ask_page -> the page -> RunControl
"""

import re
from typing import Annotated

import msgspec
import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Home
from swarmnode.cli.status import running_nodes
from swarmnode.errors import ConfigError
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.page_client import ask_page
from swarmnode.node.run_control import LONGEST_PAUSE_S, Request

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")


class _Answer(msgspec.Struct):
    answer: str


def pause(
    duration: Annotated[
        str | None, typer.Argument(help="How long, such as 30m, 2h or 1d; until it is resumed if not set.")
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Pause after the current round. The node saves, stays in its swarm and still serves what it has."""
    _ask(home, json, "pause", None if duration is None else seconds_of(duration))


def resume(home: Home = None, json: Json = False) -> None:
    """Resume after a pause."""
    _ask(home, json, "resume")


def finish(home: Home = None, json: Json = False) -> None:
    """End the run after the current round, with a checkpoint."""
    _ask(home, json, "finish")


def stop(home: Home = None, json: Json = False) -> None:
    """End the run now, with a checkpoint that includes unfinished answers."""
    _ask(home, json, "stop")


def seconds_of(duration: str) -> float:
    """Returns the length of a duration. Raises ConfigError for what is none.

    >>> seconds_of("2h"), seconds_of("1.5m")
    (7200.0, 90.0)
    """
    found = DURATION.fullmatch(duration)
    seconds = 0.0 if found is None else float(found[1]) * SECONDS[found[2]]
    if not 0 < seconds <= LONGEST_PAUSE_S:
        raise ConfigError(f"{duration!r} is not a duration", hint="write 90s, 30m, 2h or 1d, at most 366d")
    return seconds


def _ask(home: Home, json: bool, request: Request, for_s: float | None = None) -> None:
    """Asks every policy of the node."""
    paths = resolve_paths(home)
    answers: list[dict[str, str]] = []
    for note in running_nodes(paths):
        found = ask_page(note, "/control", paths, {"request": request, "for_s": for_s})
        told = msgspec.json.decode(found, type=_Answer).answer
        answers.append({"peer_id": note.peer_id, "name": memorable_name(note.peer_id), "answer": told})
    tell(json, answers, (f"{one['name']} {one['answer']}" for one in answers))
