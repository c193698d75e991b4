"""The checkpoints of one policy as folders: the last few, and the best one.

checkpoint_writer -> [CheckpointStore] -> disk -> resume (the newest) | eval, export (the newest or the best)

A folder named round-* is complete: it is written under a name that begins with a dot, synced and renamed, and
renamed again before it is deleted. So a crash at any instant leaves the existing checkpoints, with or without
the new one, and perhaps a dot folder that the next start removes. Damage is detected by the digests: such a
folder is set aside, never deleted, and the one before it is used.
"""

import errno
import logging
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from swarmnode.errors import CheckpointError, StorageError
from swarmnode.machine.storage import discard, whole_folder
from swarmnode.training.checkpoints.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    Measure,
    Snapshot,
    add_evaluation,
    read_checkpoint,
    read_state,
    write_files,
)
from swarmnode.training.checkpoints.run_folders import PREFIX

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one policy, in the folder of its run. One process writes, others may read."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        """`keep`: how many of the newest stay, in addition to the best one."""
        self.folder = folder
        self.keep = keep

    def write(self, snapshot: Snapshot) -> str:
        """Writes one checkpoint, deletes those beyond `keep`, and returns its name.

        Raises StorageError, leaving the old ones. A round that has a checkpoint keeps it, since nothing is
        learnt between two rounds; but a reward that was measured afterwards is added.
        """
        target = self.folder / f"{PREFIX}{snapshot.round:08d}"
        if target.exists() and (there := self._sound(target)) is not None:
            if there.state.reward is None and snapshot.state.reward is not None:
                self._add_evaluation(there, snapshot)
            return target.name
        try:
            with whole_folder(target, replaces=False) as aside:
                write_files(snapshot, aside)
        except OSError as error:
            raise _storage_error(error, target) from error
        self.prune(self.keep)
        return target.name

    def latest(self) -> Checkpoint | None:
        """Returns the newest undamaged checkpoint. Changes nothing on disk."""
        return _first_undamaged(self._folders())

    def best(self) -> Checkpoint | None:
        """Returns the undamaged one with the highest held-out reward; among equals, the newest. None: none
        has one.

        Considers only those whose reward was measured like the newest such reward, on the same tasks."""
        return _first_undamaged(self._by_reward())

    def tidy(self) -> Checkpoint | None:
        """Returns the checkpoint that `latest` finds. Also sets damaged ones aside and removes what a crash
        left, so only the writer may call it."""
        for leftover in self.folder.glob(f".{PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folders = self._folders()
        found = next(filter(None, map(self._sound, folders)), None)
        if folders and found is None:
            logger.warning(
                "cannot read any checkpoint of run %s, so it starts over; the damaged ones are kept in %s",
                *(self.folder.name, self.folder),
            )
        return found

    def archive(self) -> Path | None:
        """Moves all checkpoints out of the way (`--fresh`) and returns their new folder. Deletes nothing."""
        if not self._folders():
            return None
        target = self.folder.with_name(f"{self.folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            self.folder.rename(target)
        except OSError as error:
            raise StorageError(
                f"cannot move {self.folder} aside: {error.strerror}", hint="check who owns that folder"
            ) from error
        return target

    def prune(self, keep: int) -> None:
        """Deletes all except the `keep` newest and the best. A folder that cannot be deleted now is deleted
        next time."""
        try:
            best = self._by_reward()[:1]
        except CheckpointError as error:
            logger.warning("%s; deleting no checkpoints until the best one is known", error)
            return
        for old in self._folders()[keep:]:
            if old not in best:
                discard(old)

    def _folders(self) -> list[Path]:
        """Returns the folders of checkpoints, newest first."""
        return sorted(self.folder.glob(f"{PREFIX}*"), reverse=True)

    def _by_reward(self) -> list[Path]:
        """Returns the folders of evaluated checkpoints, best first, by the reward in their states."""
        rewards: dict[Path, float] = {}
        measure: tuple[Measure, dict[str, str]] | None = None
        for folder in self._folders():
            with suppress(DamagedCheckpoint):
                state = read_state(folder)
                measured = state.measure, state.tasks
                if state.reward is not None and measure in (None, measured):
                    rewards[folder], measure = state.reward, measured
        return sorted(rewards, key=lambda folder: (rewards[folder], folder), reverse=True)

    def _sound(self, folder: Path) -> Checkpoint | None:
        try:
            return read_checkpoint(folder)
        except DamagedCheckpoint as error:
            _set_aside(folder, error)
            return None

    def _add_evaluation(self, there: Checkpoint, snapshot: Snapshot) -> None:
        try:
            add_evaluation(there, snapshot)
        except OSError as error:
            raise _storage_error(error, there.folder) from error
        self.prune(self.keep)


def _first_undamaged(folders: Iterable[Path]) -> Checkpoint | None:
    for folder in folders:
        with suppress(DamagedCheckpoint):
            return read_checkpoint(folder)
    return None


def _set_aside(folder: Path, error: DamagedCheckpoint) -> None:
    aside = folder.with_name(f"damaged-{folder.name}-{int(time.time())}")
    with suppress(OSError):
        folder.rename(aside)
    logger.warning("%s; kept as %s, trying the previous checkpoint", error.message, aside.name)


def _storage_error(error: OSError, target: Path) -> StorageError:
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    return StorageError(
        f"cannot write checkpoint {target.name}: {reason}",
        hint=f"free space in {target.parent}; the last checkpoint is untouched",
    )
