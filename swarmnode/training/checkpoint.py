"""Everything a node needs to go on where it was, in a folder that is either whole or absent.

trainer, node -> [checkpoint] -> disk -> resume (the default) | eval | export

    round-00000060/
      adapter/adapter_model.safetensors, adapter_config.json     as PEFT does: vLLM and the Hub read them
      optimizer.safetensors                                      Adam moments, and torch's RNG state
      exchange.bin, rollouts.bin                                 external and own groups that wait to be
                                                                 trained on, unfinished ones included
      state.json                                                 counters, and a SHA-256 of every other file

Written under another name, synced and renamed; state.json comes last. Damage is noticed by the digests: the
folder is set aside, never deleted, and the one before it is used.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from swarmnode.errors import CheckpointError, StorageError
from swarmnode.storage import sync
from swarmnode.training.policy import Policy
from swarmnode.training.records import Counters
from swarmnode.training.trainer import Trainer

log = logging.getLogger(__name__)

PREFIX = "round-"
FORMAT = 2
EXCHANGE = "exchange.bin"
ROLLOUTS = "rollouts.bin"


class DamagedCheckpoint(CheckpointError):
    """Its files are not those that were written."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """state.json."""

    format: int
    base_model: str
    base_fingerprint: str
    policy_version: int
    seed: int
    counters: Counters
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits to be trained on, as those who hold it wrote it down. Empty: nothing does."""

    exchange: bytes = b""
    rollouts: bytes = b""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    state: State

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"


class CheckpointStore:
    """The checkpoints of one policy: its folder holds nothing else."""

    def __init__(self, root: Path, base_name: str, fingerprint: str, *, keep: int = 3) -> None:
        self.folder = root / f"{_slug(base_name)}-{fingerprint}"
        self.keep = keep

    def save(self, policy: Policy, trainer: Trainer, counters: Counters, waiting: Waiting, seed: int) -> Path:
        """Write one checkpoint and delete those beyond `keep`. Raises StorageError, leaving the old ones.

        A round that has its checkpoint keeps it: nothing is learnt between two rounds.
        """
        target = self.folder / f"{PREFIX}{counters.round:08d}"
        if target.exists():
            return target
        aside = self.folder / f".{target.name}.{os.getpid()}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            policy.save_adapter(aside / "adapter")
            _write(aside / "optimizer.safetensors", _optimizer_bytes(policy, trainer))
            _write(aside / EXCHANGE, waiting.exchange)
            _write(aside / ROLLOUTS, waiting.rollouts)
            _write_state(aside, policy, counters, seed)
            sync(aside / "adapter")
            sync(aside)
            aside.rename(target)
            sync(self.folder)
        except OSError as error:
            raise _storage_error(error, target) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        for old in self._folders()[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def latest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint. Nothing on disk is touched."""
        for folder in self._folders():
            with suppress(DamagedCheckpoint):
                return read_checkpoint(folder)
        return None

    def tidy(self) -> Checkpoint | None:
        """As `latest`, for the one writer: sets damaged checkpoints aside, removes a killed save's rest."""
        for leftover in self.folder.glob(f".{PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in self._folders():
            try:
                return read_checkpoint(folder)
            except DamagedCheckpoint as error:
                aside = folder.with_name(f"damaged-{folder.name}-{int(time.time())}")
                with suppress(OSError):
                    folder.rename(aside)
                log.warning("%s; kept as %s, trying the checkpoint before it", error.message, aside.name)
        return None

    def archive(self) -> Path | None:
        """Move all checkpoints out of the way (`--fresh`) and say where to. Nothing is deleted."""
        if not self._folders():
            return None
        target = self.folder.with_name(f"{self.folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            self.folder.rename(target)
        except OSError as error:
            raise StorageError(
                f"cannot put {self.folder} aside: {error.strerror}", hint="check who owns that folder"
            ) from error
        return target

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob(f"{PREFIX}*"), reverse=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify every digest.

    Raises DamagedCheckpoint naming the first file that is missing or changed, and CheckpointError for what
    is no damage: another version's format, or a disk that cannot be read now.
    """
    try:
        state = msgspec.json.decode((folder / "state.json").read_bytes(), type=State)
        if state.format != FORMAT:
            raise CheckpointError(
                f"checkpoint {folder.name} has format {state.format}, this version reads {FORMAT}",
                hint="use the version that wrote it, or start over with --fresh (nothing is deleted)",
            )
        for name, digest in state.digests.items():
            if _digest(folder / name) != digest:
                raise DamagedCheckpoint(f"checkpoint {folder.name} is damaged: {name} has changed")
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder.name} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder.name} cannot be read: {error}", hint="check the disk"
        ) from error
    return Checkpoint(folder, state)


def restore(checkpoint: Checkpoint, policy: Policy, trainer: Trainer) -> Waiting:
    """Put adapter, optimizer and RNG back; returns what waits to be trained on. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if checkpoint.state.base_fingerprint != policy.base.fingerprint:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder.name} belongs to another base ({checkpoint.state.base_model})",
            hint="use the --model it was trained with, or --fresh",
        )
    policy.load_adapter(checkpoint.adapter)
    try:
        tensors = load_file(str(checkpoint.folder / "optimizer.safetensors"))
        waiting = Waiting(*((checkpoint.folder / name).read_bytes() for name in (EXCHANGE, ROLLOUTS)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.folder.name} is damaged: {error}") from error
    torch.set_rng_state(tensors.pop("rng.cpu"))
    _restore_optimizer(policy, trainer, tensors)
    policy.version = checkpoint.state.policy_version
    return waiting


def _optimizer_bytes(policy: Policy, trainer: Trainer) -> bytes:
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {"rng.cpu": torch.get_rng_state()}
    for name, parameter in policy.trainable().items():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return save(tensors)


def _restore_optimizer(policy: Policy, trainer: Trainer, tensors: dict[str, torch.Tensor]) -> None:
    names = list(policy.trainable())
    state: dict[int, dict[str, torch.Tensor]] = {}
    for full, tensor in tensors.items():
        key, _, name = full.partition("/")
        if name not in names:
            raise CheckpointError(
                f"the optimizer state names an unknown parameter {name!r}", hint="use --fresh"
            )
        state.setdefault(names.index(name), {})[key] = tensor
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _write_state(folder: Path, policy: Policy, counters: Counters, seed: int) -> None:
    files = [p for p in folder.rglob("*") if p.is_file()]
    state = State(
        format=FORMAT,
        base_model=policy.base.name,
        base_fingerprint=policy.base.fingerprint,
        policy_version=policy.version,
        seed=seed,
        counters=counters,
        digests={str(path.relative_to(folder)): _digest(path) for path in sorted(files)},
    )
    for path in files:
        sync(path)
    _write(folder / "state.json", json.dumps(msgspec.to_builtins(state), indent=1).encode())


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    sync(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _slug(name: str) -> str:
    return (
        "".join(c if c.isalnum() or c in "-." else "-" for c in Path(name).name if c.isascii())[:40]
        or "model"
    )


def _storage_error(error: OSError, target: Path) -> StorageError:
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    return StorageError(
        f"checkpoint {target.name} was not written: {reason}",
        hint=f"free space in {target.parent}; the last checkpoint is untouched",
    )
