"""`swarmnode library`: right answers as a file that anyone can verify row by row, for ever."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Assignments, Home, Policy
from swarmnode.errors import StorageError
from swarmnode.extensions.library_files.library_files import (
    Judging,
    LibraryReport,
    add_verified,
    copy_verified,
    look_through,
)
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import IdentityLock
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.printable import printable
from swarmnode.settings.config_layers import load_settings

app = typer.Typer(
    help="Show, export and import the right answers of this node's book, as their authors signed them.",
    no_args_is_help=True,
)

JudgedBy = Annotated[
    list[str] | None,
    typer.Option(
        "--task", help="Also judge the answers to this task, named as for `join --task`; may be repeated."
    ),
]
LEFT_OUT_SHOWN = 10
"""Lines about damaged rows that are printed; the others are counted."""


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="A library file; by default, the library of this home.")
    ] = None,
    task: JudgedBy = None,
    policy: Policy = 0,
    home: Home = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Verify each row of a library, and say what is in it: tasks, authors, and with --task what is right.

    Verified means that the author signed exactly these answers to exactly this example. With --task the
    example is drawn again and the answers are judged, as a node does before it learns from them.
    """
    paths = resolve_paths(home).policy(policy)
    path = _of_home(paths.library) if file is None else _existing(file)
    with ExitStack() as stack:
        judging = Judging(_tasks(stack, task, home, set_)) if task else None
        report = look_through(path, judging=judging)
    tell(json, report.as_json(), _lines(path, report, judged=bool(task)))
    _print_damaged(report)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="Where to write it.")],
    policy: Policy = 0,
    home: Home = None,
    json: Json = False,
) -> None:
    """Write this home's library to a new file, without rows that are damaged. A node may be running."""
    if file.exists():
        raise StorageError(f"{file} exists already", hint="name a file that does not exist yet")
    report = copy_verified(_of_home(resolve_paths(home).policy(policy).library), file)
    told = f"wrote {report.rows} groups of {len(report.authors)} authors to {file}"
    tell(json, report.as_json(), [told])
    _print_damaged(report)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A library file, as written by `export`.")],
    policy: Policy = 0,
    home: Home = None,
    json: Json = False,
) -> None:
    """Take the verified rows of a file into this home's library. No node may be running in this home.

    The next start judges them like those of any peer, and catches up with what is right.
    """
    paths = resolve_paths(home).policy(policy)
    with IdentityLock(paths.identity) if paths.identity.exists() else nullcontext():
        report = add_verified(_existing(file), paths.library)
    if not report.rows:
        _print_damaged(report)
        raise StorageError(f"{file} has no group that could be verified", hint="nothing was imported")
    known = f", {report.known} were already there" if report.known else ""
    full = f", {report.no_room} did not fit" if report.no_room else ""
    told = [f"imported {report.taken} of {report.rows + report.damaged_rows} groups{known}{full}"]
    if report.taken:
        told.append("`swarmnode join` judges them at its start and learns from what is right")
    counts = {"taken": report.taken, "known": report.known, "no_room": report.no_room}
    tell(json, report.as_json() | counts, told)
    _print_damaged(report)


def _existing(path: Path, hint: str = "name a file that `swarmnode library export` wrote") -> Path:
    if not path.is_file():
        raise StorageError(f"there is no library {path}", hint=hint)
    return path


def _of_home(path: Path) -> Path:
    return _existing(path, "`swarmnode join` makes one as it learns")


def _tasks(stack: Any, names: list[str], home: Path | None, set_: list[str] | None) -> dict[str, Any]:
    settings = load_settings(home=home, assignments=set_, flags={"tasks.names": names})
    return start_tasks(stack, settings.config.tasks, resolve_paths(home).home)


def _lines(path: Path, report: LibraryReport, *, judged: bool) -> Iterator[str]:
    yield f"{path}: {report.rows} groups, {report.answers} answers, {report.size_bytes / 1e6:.1f} MB"
    for (task, version), count in sorted(report.tasks.items()):
        right = report.right.get((task, version))
        told = "" if right is None else f", {right} answers with a reward above 0"
        if judged and right is None:
            told = ", not judged: --task names another version, or not this task"
        yield printable(f"  {task} {version}: {count} groups{told}")
    for author, count in sorted(report.authors.items(), key=lambda one: -one[1])[:LEFT_OUT_SHOWN]:
        yield printable(f"  by {memorable_name(author)} ({author}): {count} groups")
    if len(report.authors) > LEFT_OUT_SHOWN:
        yield f"  and {len(report.authors) - LEFT_OUT_SHOWN} more authors"
    if report.refused:
        yield "  judged but of no use: " + ", ".join(f"{k} {n}" for k, n in report.refused.items())


def _print_damaged(report: LibraryReport) -> None:
    for line in report.damaged[:LEFT_OUT_SHOWN]:
        typer.echo(printable(f"left out: {line}"), err=True)
    if report.damaged_rows > LEFT_OUT_SHOWN:
        typer.echo(f"and {report.damaged_rows - LEFT_OUT_SHOWN} more damaged rows", err=True)
