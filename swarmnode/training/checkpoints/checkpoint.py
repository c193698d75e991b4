"""Everything a node needs to continue where it was: its contents, and how it is written and restored.

node -> [take_snapshot -> write_files] -> disk -> [read_checkpoint -> restore] -> resume | eval | export

    round-00000060/
      adapter/adapter_model.safetensors, adapter_config.json     as PEFT does: vLLM and the Hub read them
      optimizer.safetensors                                      Adam moments, and torch's RNG state
      rollouts.bin                                               own groups that wait to be trained on,
                                                                 unfinished ones included
      rule.bin                                                   what the rule for others' answers has learnt:
                                                                 its book (rules/lessons.py)
      state.json                                                 counters, the held-out reward, and a SHA-256
                                                                 of every other file

The training thread takes a snapshot, which is a copy: training continues while it is written
(node/workers.py). checkpoint_store.py manages the folders. Tensors have the names of PEFT's files, without
the adapter's own name: any policy of a node can resume what another one saved.

Safetensors files are written one tensor at a time. The library's own `save` builds the whole file in memory
and holds the interpreter's lock meanwhile: a background writer would stop the training that it must not
disturb. Here every piece is a view of a tensor's memory, and both hashing and writing a piece release the
lock.
"""

import copy
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from swarmnode.errors import CheckpointError
from swarmnode.machine.storage import replace_file, sha256_of, sync, write_synced
from swarmnode.model.policy import Policy
from swarmnode.training.records import (
    FORMAT,
    STATE,
    Counters,
    DamagedCheckpoint,
    Measure,
    State,
    read_state,
    unreadable,
)

ADAPTER = "adapter"
ADAPTER_CONFIG = "adapter/adapter_config.json"
ADAPTER_TENSORS = "adapter/adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
ROLLOUTS = "rollouts.bin"
RULE = "rule.bin"
RNG = "rng.cpu"

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8
"""In bytes. The header is padded with spaces, and wide numbers come first, so that every tensor is
aligned."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rollouts and lessons that wait to be trained on, in their owners' own formats. Empty: nothing waits."""

    rollouts: bytes = b""
    rule: bytes = b""
    """`Rule.state`: among other things, answers to be trained on again."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a policy at one moment: nothing in it changes when training continues."""

    state: State
    """Content of state.json except for the digests, which are computed from the files."""
    adapter_config: Any
    """PEFT's config, which can write itself."""
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    waiting: Waiting

    @property
    def round(self) -> int:
        return self.state.counters.round


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    state: State

    @property
    def adapter(self) -> Path:
        return self.folder / ADAPTER


def take_snapshot(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    counters: Counters,
    waiting: Waiting,
    seed: int,
    *,
    measure: Measure = Measure(),  # noqa: B008 - frozen
    task_specs: tuple[str, ...] = (),
    tasks: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Copies everything to the CPU and writes nothing. The policy must not be training meanwhile. `measure`:
    the examples of the last reward in `counters`. `tasks`: the versions of the tasks, by name. `settings`:
    the settings that shaped learning."""
    base, version = policy.base, policy.version
    return Snapshot(
        state=state_of(
            base.name, base.fingerprint, version, counters, seed, measure, task_specs, tasks, settings
        ),
        adapter_config=copy.deepcopy(policy.peft_model.peft_config[policy.adapter_name]),
        adapter={name: tensor.cpu().contiguous() for name, tensor in policy.adapter().items()},
        optimizer={RNG: torch.get_rng_state(), **_copied(optimizer_tensors(optimizer, policy.trainable()))},
        waiting=waiting,
    )


def state_of(
    base_model: str,
    base_fingerprint: str,
    policy_version: int,
    counters: Counters,
    seed: int,
    measure: Measure,
    task_specs: tuple[str, ...] = (),
    tasks: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> State:
    """Returns the state of a snapshot, with a copy of `counters`."""
    return State(
        format=FORMAT,
        base_model=base_model,
        base_fingerprint=base_fingerprint,
        policy_version=policy_version,
        seed=seed,
        counters=copy.deepcopy(counters),
        reward=counters.reward_last if counters.evaluated_round == counters.round else None,
        measure=measure,
        task_specs=task_specs,
        tasks=dict(tasks or {}),
        settings=dict(settings or {}),
        digests={},
    )


def write_files(snapshot: Snapshot, folder: Path) -> None:
    """Writes a snapshot's files into an empty folder and waits until they are on disk. Raises OSError."""
    snapshot.adapter_config.save_pretrained(str(folder / ADAPTER))
    sync(folder / ADAPTER_CONFIG)
    digests = {
        ADAPTER_CONFIG: sha256_of(folder / ADAPTER_CONFIG),
        ADAPTER_TENSORS: write_synced(
            folder / ADAPTER_TENSORS, tensor_pieces(snapshot.adapter, {"format": "pt"})
        ),
        OPTIMIZER: write_synced(folder / OPTIMIZER, tensor_pieces(snapshot.optimizer)),
        ROLLOUTS: write_synced(folder / ROLLOUTS, [snapshot.waiting.rollouts]),
        RULE: write_synced(folder / RULE, [snapshot.waiting.rule]),
    }
    state = msgspec.structs.replace(snapshot.state, digests=digests)
    write_synced(folder / STATE, [_as_json(state)])
    sync(folder / ADAPTER)


def add_evaluation(checkpoint: Checkpoint, snapshot: Snapshot) -> None:
    """Writes a later evaluation of the same policy, in the same round, into its checkpoint. Raises OSError,
    leaving the checkpoint unchanged."""
    before = checkpoint.state
    state = msgspec.structs.replace(snapshot.state, settings=before.settings, digests=before.digests)
    replace_file(checkpoint.folder / STATE, _as_json(state))
    sync(checkpoint.folder)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verifies every digest and returns the checkpoint.

    Raises DamagedCheckpoint naming the first file that is missing or changed, and CheckpointError for what
    does not count as damage: another version's format, or a disk that cannot be read now.
    """
    state = read_state(folder)
    try:
        for name, digest in state.digests.items():
            if sha256_of(folder / name) != digest:
                raise DamagedCheckpoint(f"checkpoint {folder.name} is damaged: {name} has changed")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder.name} is damaged: {error}") from error
    except OSError as error:
        raise unreadable(folder, error) from error
    return Checkpoint(folder, state)


@contextmanager
def reading(folder: Path) -> Generator[None]:
    """Turns errors of reading a checkpoint's files, which were whole a moment ago, into DamagedCheckpoint."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder.name} is damaged: {error}") from error


def restore(checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> Waiting:
    """Restores adapter, optimizer and RNG, and returns what waits to be trained on. Raises
    CheckpointError."""
    from safetensors.torch import load_file

    if checkpoint.state.base_fingerprint != policy.base.fingerprint:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder.name} belongs to another base ({checkpoint.state.base_model})",
            hint="use the --model it was trained with, or --fresh",
        )
    policy.load_adapter(checkpoint.adapter)
    waiting = read_waiting(checkpoint)
    with reading(checkpoint.folder):
        tensors = load_file(str(checkpoint.folder / OPTIMIZER))
    torch.set_rng_state(tensors.pop(RNG))
    _restore_optimizer(policy, optimizer, tensors)
    policy.version = checkpoint.state.policy_version
    return waiting


def read_waiting(checkpoint: Checkpoint) -> Waiting:
    """Returns the saved rollouts and lessons that wait to be trained on. Checkpoints of earlier versions may
    have no rule, and may have groups of others (exchange.bin), which are ignored. Raises CheckpointError if a
    file cannot be read."""
    names = (ROLLOUTS, RULE) if RULE in checkpoint.state.digests else (ROLLOUTS,)
    with reading(checkpoint.folder):
        return Waiting(*((checkpoint.folder / name).read_bytes() for name in names))


def check_has_adapter(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a pipeline that trains all weights: its checkpoints contain none of them."""
    from safetensors import safe_open

    path = str(checkpoint.folder / ADAPTER_TENSORS)
    with reading(checkpoint.folder), safe_open(path, "pt") as file:
        names = file.keys()
    if not names:
        raise CheckpointError(
            f"{checkpoint.folder.name} has no adapter: it is from a pipeline that trains all weights "
            "(pipeline.trainable=full), and each member has those of its own layers",
            hint="the weights are in the members' step-*-layers-*/, under the names of the whole model",
        )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Tensor]:
    """Returns the optimizer's tensors by `exp_avg/<parameter>`. A parameter without a step yet has none."""
    return {
        f"{key}/{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def tensor_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yields the file's header, then each tensor's bytes. The tensors must be contiguous and on the CPU.

    Layout: length of the header (u64, little-endian), header (JSON), data
    (https://github.com/huggingface/safetensors, "Format").
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield tensors[name].view(-1).view(torch.uint8).numpy().data


def _as_json(state: State) -> bytes:
    return json.dumps(msgspec.to_builtins(state), indent=1).encode()


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def _restore_optimizer(policy: Policy, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    names = {name: index for index, name in enumerate(policy.trainable())}
    state: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        key, _, name = full.partition("/")
        if name not in names:
            raise CheckpointError(
                f"the optimizer state names an unknown parameter {name!r}", hint="use --fresh"
            )
        state.setdefault(names[name], {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
