"""`swarmnode logs`: the story of the node that runs here, or of the one that ran.

screen.py -> state/logs/node.log, node.log.1 -> GrowingFile -> [logs] -> stdout
"""

import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated

import msgspec
import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Home
from swarmnode.errors import StorageError
from swarmnode.extensions.page.growing_file import GrowingFile
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.showing.screen import LOG_FILE
from swarmnode.printable import printable_lines

LOOK_EVERY_S = 0.5

HEAD = re.compile(r"((?:[0-9-]{10} )?[0-9:]{8}) ([A-Z]+) ([\w.]+): (.*)", re.DOTALL)
BAD = ("WARNING", "ERROR", "CRITICAL")


class LogEntry(msgspec.Struct, frozen=True):
    """A line of the log, with the traceback below it."""

    text: str
    """As it is in the file."""
    time: str = ""
    level: str = ""
    logger: str = ""
    message: str = ""


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new entries.")] = False,
    number: Annotated[
        int, typer.Option("--number", "-n", min=0, help="How many of the newest entries; 0: all.")
    ] = 100,
    errors: Annotated[bool, typer.Option("--errors", help="Only warnings and errors.")] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Print what the node that runs or ran here did: its start, rounds, warnings, errors and end.

    With --json a list of entries; with --follow one object per line.
    """
    path = resolve_paths(home).logs / LOG_FILE
    if not path.exists() and not follow:
        raise StorageError(
            f"there is no log {path}", hint="`swarmnode join` writes one; or name its home with --home"
        )
    earlier, now = GrowingFile(path.with_name(f"{LOG_FILE}.1")), GrowingFile(path)
    earlier.replaced()
    now.replaced()
    found = deque(_entries(chain(_lines(earlier), _lines(now)), errors=errors), maxlen=number or None)
    if not follow:
        tell(json, list(found), (one.text for one in found))
        return
    while True:
        for one in found:
            tell(json, one, [one.text])
        time.sleep(LOOK_EVERY_S)
        place, was = now.place, now.number
        lines = _lines(now)
        if now.replaced():
            earlier.replaced()
            if earlier.number == was:
                earlier.place = place  # The end of the file that was put aside is read there.
                lines = chain(_lines(earlier), lines)
        found = deque(_entries(lines, errors=errors))


def _lines(file: GrowingFile) -> Iterator[str]:
    for _, line in file.new_lines():
        yield line.decode(errors="replace").removesuffix("\n")


def _entries(lines: Iterable[str], *, errors: bool) -> Iterator[LogEntry]:
    """Yields the entries of the log; lines that are indented belong to the one before."""
    block: list[str] = []
    for line in chain(lines, [""]):
        if block and not line.startswith(" "):
            entry = _entry("\n".join(block))
            if not errors or entry.level in BAD:
                yield entry
            block = []
        block.append(line)


def _entry(text: str) -> LogEntry:
    text = printable_lines(text)
    found = HEAD.match(text)
    return LogEntry(text) if found is None else LogEntry(text, *found.groups())
