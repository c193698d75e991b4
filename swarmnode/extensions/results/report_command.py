"""`swarmnode report`: a run as one HTML file that can be sent to somebody."""

from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Home, Policy, RunName
from swarmnode.errors import StorageError
from swarmnode.extensions.results.report_page import report_page
from swarmnode.extensions.results.run_record import read_record
from swarmnode.machine.storage import replace_file, resolve_paths


def report(
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write, replaced if it exists; RUN.html by default.")
    ] = None,
    run: RunName = None,
    policy: Policy = 0,
    home: Home = None,
    json: Json = False,
) -> None:
    """Write one HTML file about the run that is trained here now, or was trained last.

    It has rewards, what was learnt from whom, what keeps it from learning, times, rollouts and settings, and
    needs no network and no script.
    """
    record = read_record(resolve_paths(home).policy(policy), run)
    name, round = record.status.run, record.status.progress.round
    file = out or Path(f"{name}.html")
    try:
        replace_file(file, report_page(record).encode())
    except OSError as error:
        raise StorageError(
            f"cannot write {file}: {error.strerror}", hint="name another: --out FILE"
        ) from error
    found = {"file": str(file), "run": name, "round": round, "running": record.running}
    tell(json, found, [f"wrote run {name}, round {round}, to {file}"])
