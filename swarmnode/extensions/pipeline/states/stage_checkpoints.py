"""Checkpoints of a pipeline: each member's own stage, and the whole adapter as a single machine saves it.

StageWorker.state -> [StageCheckpoints.write] -> a folder -> [states] -> StateService (earlier)
all stages' states (StateService.assemble) -> [whole_snapshot] -> CheckpointStore: export, PEFT
a single machine's checkpoint -> [single_machine_tensors] -> StageWorker.load_state of any stage

    step-00000060-layers-4-8/
      state.safetensors       packed_state.py: tensors by global name, Adam's moments among them
      stage.json              which layers, how many steps, of which model, and the SHA-256 of the state

Layers are named as in the whole model, so a stage can be restored from any members that hold its layers, all
of one step (holdings.py). As in checkpoint_store.py, a folder is either complete or absent: it is written
under a name that begins with a dot, synced and renamed. Damaged folders are skipped with a warning and never
deleted.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from swarmnode.errors import CheckpointError, StorageError
from swarmnode.extensions.pipeline.stages.packed_state import MOMENTS, digest_of
from swarmnode.extensions.pipeline.stages.stage_model import PEFT_PREFIX
from swarmnode.extensions.pipeline.states.holdings import Assembled, HeldState, Holding, layer_of
from swarmnode.machine.storage import discard, whole_folder, write_synced
from swarmnode.model.policy import lora_config
from swarmnode.settings.config import PolicyConfig
from swarmnode.training.checkpoints.checkpoint import (
    ADAPTER_TENSORS,
    OPTIMIZER,
    RNG,
    Snapshot,
    State,
    Waiting,
    read_checkpoint,
    reading,
)

logger = logging.getLogger(__name__)

STAGE_FORMAT = 1
PREFIX = "step-"
STATE = "state.safetensors"
RECORD = "stage.json"


class StageRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of stage.json."""

    format: int
    model: str
    """Fingerprint of the trained model (`LoadedModel.fingerprint`)."""
    holding: Holding


class StageCheckpoints:
    """Checkpoints of one member, of any stages. One process writes; others may read."""

    def __init__(self, folder: Path, model: str, *, keep: int = 3) -> None:
        """`model`: fingerprint of the model; checkpoints of other models are ignored. `keep`: number of steps
        to keep."""
        self.folder = folder
        self.model = model
        self.keep = keep

    def write(self, held: HeldState) -> Path:
        """Write a checkpoint, and delete the oldest steps beyond `keep`. Raises StorageError; the old
        checkpoints remain."""
        holding = held.holding
        target = self.folder / (
            f"{PREFIX}{holding.iteration:08d}-layers-{holding.first_layer}-{holding.end_layer}"
        )
        record = msgspec.json.encode(StageRecord(STAGE_FORMAT, self.model, holding))
        try:
            with whole_folder(target) as aside:
                write_synced(aside / STATE, [held.data])
                write_synced(aside / RECORD, [record])
        except OSError as error:
            raise StorageError(
                f"checkpoint {target.name} was not written: {error}",
                hint=f"free space in {self.folder}; the last checkpoint is untouched",
            ) from error
        self._prune()
        return target

    def states(self) -> Iterator[HeldState]:
        """Yield the verified states of this model, newest first. Damaged ones are skipped with a warning."""
        for folder in self._folders():
            try:
                record = msgspec.json.decode((folder / RECORD).read_bytes(), type=StageRecord)
                if (record.format, record.model) != (STAGE_FORMAT, self.model):
                    continue
                held = HeldState(record.holding, (folder / STATE).read_bytes())
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("checkpoint %s is damaged, skipping it: %s", folder.name, error)
                continue
            if digest_of(held.data) == held.holding.digest:
                yield held
            else:
                logger.warning("checkpoint %s is damaged, skipping it: %s has changed", folder.name, STATE)

    def _prune(self) -> None:
        steps = sorted({folder.name.split("-")[1] for folder in self._folders()}, reverse=True)
        for folder in self._folders():
            if folder.name.split("-")[1] in steps[self.keep :]:
                discard(folder)

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob(f"{PREFIX}*-layers-*"), reverse=True)


def whole_snapshot(
    tensors: Mapping[str, Tensor], state: State, adapter: PolicyConfig, *, waiting: Waiting
) -> Snapshot:
    """Return the adapters of all stages as one single-machine checkpoint, including Adam's moments.

    `CheckpointStore(folder).write(...)` makes the folder that `swarmnode export` and a
    resuming node read; its `adapter` is PEFT's. `adapter`: rank and alpha of the training. With full training
    there are no tensors: the folder then has no adapter and only records how far training is
    (`training.checkpoint.check_has_adapter`). Raises CheckpointError if a layer or one half of an adapter is
    missing, or a number is not finite.
    """
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} is not finite", hint="the stage that holds it has given NaN")
    adapters = {name: tensor for name, tensor in tensors.items() if not _is_moment(name)}
    _check_whole(adapters, adapter.lora_rank)
    moments = {name: tensor for name, tensor in tensors.items() if _is_moment(name)}
    return Snapshot(
        state=state,
        adapter_config=_peft_config(adapters, adapter, state.base_model),
        adapter=adapters,
        optimizer={RNG: torch.get_rng_state(), **moments},
        waiting=waiting,
    )


def single_machine_tensors(folder: Path) -> Assembled:
    """Return the tensors of a single machine's checkpoint (round-*), under the names that stages use.

    `StageWorker.load_state` picks those of its stage. Raises CheckpointError, DamagedCheckpoint.
    """
    from safetensors.torch import load_file

    checkpoint = read_checkpoint(folder)
    with reading(folder):
        tensors = load_file(str(folder / ADAPTER_TENSORS)) | load_file(str(folder / OPTIMIZER))
    tensors.pop(RNG, None)
    return Assembled(tensors, checkpoint.state.policy_version)


def _is_moment(name: str) -> bool:
    return name.partition("/")[0] in MOMENTS


def _check_whole(adapters: Mapping[str, Tensor], rank: int) -> None:
    held = {layer_of(name) for name in adapters}
    layers = 1 + max((layer for layer in held if layer is not None), default=-1)
    missing = set(range(layers)) - held
    if missing:
        raise CheckpointError(
            f"no stage's state holds layer {min(missing)} of {layers}", hint="the states of all are needed"
        )
    for name, tensor in adapters.items():
        if ".lora_" not in name:
            raise CheckpointError(
                f"{name} belongs to no adapter", hint="with full training a model is written, not an adapter"
            )
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace("_B.", "_A.")
        is_pair = other in adapters and tensor.ndim == 2
        if not is_pair or tensor.shape[0 if ".lora_A." in name else 1] != rank:
            raise CheckpointError(f"{name} has no partner, or not rank {rank}")


def _peft_config(adapters: Mapping[str, Tensor], adapter: PolicyConfig, base_model: str) -> Any:
    modules = {name.removeprefix(PEFT_PREFIX).split(".lora_")[0].rpartition(".")[2] for name in adapters}
    config = lora_config(adapter, sorted(modules))
    config.base_model_name_or_path, config.inference_mode = base_model, True
    return config
