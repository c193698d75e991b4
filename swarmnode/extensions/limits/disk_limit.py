"""Keeps a node's home below limits.disk_gb: what is oldest goes first, what a run goes on with never does.

machine_guard.py -> [make_room] -> checkpoint_store.py: CheckpointStore.prune, kept_rollouts.py: FILE
"""

import logging
from contextlib import suppress

from swarmnode.machine.memory_plan import size_text
from swarmnode.machine.storage import Paths, folder_bytes
from swarmnode.node.building.node_process import read_running
from swarmnode.node.showing.kept_rollouts import FILE
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.checkpoints.run_folders import TrainingRun, runs_in

logger = logging.getLogger(__name__)


def make_room(paths: Paths, most_bytes: float, running: str) -> str:
    """Deletes old checkpoints, the least recent runs first, then the rollouts shown of runs that are neither
    `running` nor another policy's that runs, until the home takes no more than this. Returns what is wrong
    where that is not enough."""
    before = size = home_bytes(paths)
    first, *others = paths.policies()
    homes = [place.checkpoints for place in (first, *others)]
    in_use = {place.checkpoints for place in others if read_running(place.running) is not None}
    known = sorted((run for root in homes for run in runs_in(root)), key=lambda run: run.written_at)
    idle = [run for run in known if run.folder.parent not in in_use and run.folder != homes[0] / running]
    for step, runs in ((_only_what_it_needs, known), (_nothing_shown, idle)):
        for run in runs:
            if size <= most_bytes:
                break
            step(run)
            size = home_bytes(paths)
    if size < before:
        logger.info("limits.disk_gb: freed %s (old checkpoints and rollouts)", size_text(before - size))
    return "" if size <= most_bytes else f"its home takes {size_text(size)} of {size_text(most_bytes)}"


def home_bytes(paths: Paths) -> int:
    """Returns the bytes that a home takes on the disk."""
    folders = {paths.config, paths.data, paths.state, paths.cache}
    return sum(map(folder_bytes, folders))


def _only_what_it_needs(run: TrainingRun) -> None:
    """Leaves a run its newest checkpoint and its best one."""
    CheckpointStore(run.folder).prune(1)


def _nothing_shown(run: TrainingRun) -> None:
    with suppress(OSError):
        (run.folder / FILE).unlink(missing_ok=True)
