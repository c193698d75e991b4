"""`swarmnode runs`: the runs of a home, and how to get rid of one."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.output import Json, table, tell
from swarmnode.cli.settings import Home, Policy
from swarmnode.errors import IdentityInUse, StorageError
from swarmnode.machine.storage import Paths, folder_bytes, resolve_paths
from swarmnode.node.building.node_process import IdentityLock
from swarmnode.node.showing.figures import age
from swarmnode.training.checkpoints.run_folders import TrainingRun, no_such_run, runs_in

app = typer.Typer(
    help="List the runs of this home, each a policy with its tasks; remove one.",
    invoke_without_command=True,
    no_args_is_help=False,
)


@app.callback()
def runs(context: typer.Context, home: Home = None, json: Json = False) -> None:
    """List the runs of this home, the one that was written to last first."""
    if context.invoked_subcommand is not None:
        return
    paths = resolve_paths(home)
    found = [
        _described(number, run)
        for number, place in enumerate(paths.policies())
        for run in runs_in(place.checkpoints)
    ]
    tell(json, found, _table(found, paths))


def _table(found: Sequence[dict[str, Any]], paths: Paths) -> Iterator[str]:
    if not found:
        yield f"no runs in {paths.checkpoints}; `swarmnode join` begins one"
        return
    rows = [("run", "policy", "model", "round", "reward", "last written", "MiB", "tasks")]
    for one in found:
        reward = "-" if one["reward_last"] is None else format(one["reward_last"], ".3f")
        ago, size = f"{age(time.time() - one['written_at'])} ago", format(one["size_bytes"] / 2**20, ".1f")
        rounds, tasks = "?" if one["round"] is None else str(one["round"]), ", ".join(one["tasks"])
        number, model = str(one["policy"]), str(one["model"] or "?").rpartition("/")[2]
        rows.append((one["name"], number, model, rounds, reward, ago, size, tasks))
    if len(paths.policies()) == 1:
        rows = [(row[0], *row[2:]) for row in rows]
    yield from table(rows)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The run, as `swarmnode runs` lists it.")],
    policy: Policy = 0,
    home: Home = None,
    json: Json = False,
) -> None:
    """Delete a run with all of its checkpoints. No node may be running in this home."""
    paths = resolve_paths(home).policy(policy)
    # Whoever trains a run holds the lock.
    try:
        with IdentityLock(paths.identity) if paths.identity.exists() else nullcontext():
            run = remove_run(paths.checkpoints, name)
    except IdentityInUse as error:
        raise IdentityInUse(error.message, hint="stop that node first: it may be training this run") from None
    round = None if run.state is None else run.state.counters.round
    told = f"removed run {run.name}" + ("" if round is None else f" of round {round}")
    tell(json, {"removed": run.name, "round": round}, [told])


def _described(number: int, run: TrainingRun) -> dict[str, Any]:
    """A run as JSON has it. None: no checkpoint of it can be read."""
    state = run.state
    return {
        "name": run.name,
        "policy": number,
        "model": None if state is None else state.base_model,
        "tasks": run.tasks,
        "round": None if state is None else state.counters.round,
        "reward_first": None if state is None else state.counters.reward_first,
        "reward_last": None if state is None else state.counters.reward_last,
        "evaluated_round": None if state is None else state.counters.evaluated_round,
        "written_at": run.written_at,
        "size_bytes": folder_bytes(run.folder),
    }


def remove_run(root: Path, name: str) -> TrainingRun:
    """Deletes a run with all of its checkpoints, and returns it. Raises CheckpointError, StorageError."""
    known = runs_in(root)
    run = next((run for run in known if run.name == name), None)
    if run is None:
        raise no_such_run(name, known)
    going = run.folder.with_name(f".{run.name}.{time.time_ns()}")
    try:
        run.folder.rename(going)
        shutil.rmtree(going)
    except OSError as error:
        raise StorageError(
            f"cannot remove {run.folder}: {error.strerror}", hint="check who owns that folder"
        ) from error
    return run
