"""All that is known of a run, whether it runs or has ended: what the page reads, read the same way.

page of a running node | metrics.jsonl, state.json, settings.json -> [read_record] -> report_page.py
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

import msgspec

from swarmnode.errors import CheckpointError, SwarmnodeError
from swarmnode.extensions.page.reward_history import RewardHistory
from swarmnode.extensions.page.rollout_reader import RolloutReader
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.machine.storage import Paths
from swarmnode.node.building.node_process import read_running
from swarmnode.node.building.page_client import ask_page, ask_status
from swarmnode.node.showing.kept_rollouts import FILE
from swarmnode.node.showing.node_status import NodeStatus, printable_status
from swarmnode.node.showing.used_settings import SETTINGS_FILE
from swarmnode.training.checkpoints.run_folders import TrainingRun, no_such_run, runs_in


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run and its node."""

    status: NodeStatus
    """The present one, or that of the last round."""
    running: bool
    history: RewardHistory
    rollouts: RolloutReader
    settings: list[dict[str, str]]
    """Each with key, value and origin."""


def read_record(paths: Paths, named: str | None) -> RunRecord:
    """Returns the record of the named run; else of the one that is trained now, or was trained last. Raises
    CheckpointError where there is none, SwarmnodeError."""
    note = read_running(paths.running)
    status = None if note is None else ask_status(note, paths)
    if note is not None and isinstance(status, NodeStatus) and status.run and named in (None, status.run):
        settings = msgspec.json.decode(ask_page(note, "/settings", paths), type=list[dict[str, str]])
        return _record(paths, status.run, status, settings)
    known = runs_in(paths.checkpoints)
    meant = (run for run in known if (run.name == named if named else not run.put_aside))
    if (run := next(meant, None)) is None:
        raise no_such_run(named or "", known)
    return _record(paths, run.name, run, _kept_settings(run))


def _record(
    paths: Paths, name: str, found: NodeStatus | TrainingRun, settings: list[dict[str, str]]
) -> RunRecord:
    running = isinstance(found, NodeStatus)
    history = RewardHistory(paths.logs, name, found.peer_id if running else None)
    history.read()
    status = found if running else _last_status(found, history)
    rollouts = RolloutReader(paths.checkpoints / name / FILE)
    return RunRecord(printable_status(status), running, history, rollouts, settings)


def _last_status(run: TrainingRun, history: RewardHistory) -> NodeStatus:
    if history.newest is None:
        raise CheckpointError(
            f"nothing is recorded about run {run.name}",
            hint="its lines in metrics.jsonl are gone: train it further",
        )
    try:
        return status_of(history.newest, model="" if run.state is None else run.state.base_model)
    except msgspec.ValidationError as error:
        raise SwarmnodeError(f"metrics.jsonl is from another version: {error}", hint="train on") from error


def _kept_settings(run: TrainingRun) -> list[dict[str, str]]:
    """Returns those that the last start wrote; of earlier versions, those that the checkpoint notes."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((run.folder / SETTINGS_FILE).read_bytes(), type=list[dict[str, str]])
    noted: dict[str, Any] = {} if run.state is None else run.state.settings
    return [{"key": key, "value": str(value), "origin": "checkpoint"} for key, value in noted.items()]


def status_of(values: Mapping[str, Any], *, model: str = "") -> NodeStatus:
    """Returns the status of an ended run by a line of metrics.jsonl, which has no texts but `peer` and `run`:
    the inverse of `measurements`. Raises msgspec.ValidationError."""
    peer = str(values.get("peer", ""))
    tree: dict[str, Any] = {
        "peer_id": peer, "name": memorable_name(peer), "run": values.get("run", ""), "model": model,
        "swarm": "", "version": "", "pid": 0, "started_at": 0.0,
        "phase": {"name": "ended", "since": values.get("time", 0.0)}, "network": {"state": "ended"},
    }  # fmt: skip
    for name, value in values.items():
        # Every number of the file is a float.
        whole = isinstance(value, float) and value.is_integer()
        _put(tree, NodeStatus, name, int(value) if whole else value)
    return msgspec.convert(tree, NodeStatus)


def _put(tree: dict[str, Any], struct: type[msgspec.Struct], name: str, value: Any) -> None:
    """Puts a number to its place in the tree of a struct; names that are not known are left out."""
    first, _, rest = name.partition(".")
    field = get_type_hints(struct).get(first)
    if isinstance(field, type) and issubclass(field, msgspec.Struct) and rest:
        _put(tree.setdefault(first, {}), field, rest, value)
    elif get_origin(field) is dict and rest:
        tree.setdefault(first, {})[rest] = value
    elif field is not None and not rest:
        tree[first] = value
