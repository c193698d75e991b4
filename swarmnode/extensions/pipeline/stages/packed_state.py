"""The learned state of a stage as bytes: for checkpoints, for copies at neighbours, and for newcomers.

stage_worker.py (StageWorker.state) -> [pack_state] -> disk or a peer -> [unpack_state] ->
    StageWorker.load_state

Tensors have the same names as in the whole model, so the states of one partition's stages can be used to
build the stages of any other. The bytes are a safetensors file. The adapters of all stages together have the
names of PEFT's adapter file.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnode.errors import CheckpointError
from swarmnode.training.checkpoints.checkpoint import tensor_pieces

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""Names of Adam's tensors for a parameter, stored as `exp_avg/<parameter>`, as in checkpoint.py."""


def pack_state(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as a safetensors file in memory. Their order is fixed, so equal tensors have equal
    digests.

    >>> digest_of(pack_state({"model.norm.weight": torch.ones(2)}))[:8]
    '2188e211'
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return b"".join(tensor_pieces(on_cpu))


def unpack_state(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a state, which may come from a peer. Raises CheckpointError if it is not a
    safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        # TypeError and RuntimeError: shapes that torch cannot represent.
        raise CheckpointError(f"a stage's state is no safetensors file: {error}") from error


def matching_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the wanted tensors from `tensors`. Raises CheckpointError if one is missing, has another shape
    or is not finite."""
    for name, ours in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"no state holds {name}", hint="the states of all stages are needed")
        if tensor.shape != ours.shape or not tensor.is_floating_point():
            raise CheckpointError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, this stage's is {list(ours.shape)}",
                hint="start over, or use the settings it was trained with",
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} is not finite", hint="use an earlier state or another peer's")
    return {name: tensors[name] for name in wanted}


def matching_moments(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> dict[int, dict[str, Tensor]]:
    """Return Adam's moments from `tensors`, by the index of their parameter. A parameter without any moments
    starts from scratch.

    Raises CheckpointError if some moments of a parameter are missing, have another shape or have values that
    Adam cannot produce.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for index, (name, ours) in enumerate(wanted.items()):
        moments = {key: tensors[f"{key}/{name}"] for key in MOMENTS if f"{key}/{name}" in tensors}
        if not moments:
            continue
        shapes = {"step": torch.Size(()), "exp_avg": ours.shape, "exp_avg_sq": ours.shape}
        if {key: tensor.shape for key, tensor in moments.items()} != shapes:
            raise CheckpointError(
                f"the optimizer's tensors of {name} do not fit", hint="start it from scratch"
            )
        signs = (1 if key == "exp_avg" else moment.min() >= 0 for key, moment in moments.items())
        if not all(bool(torch.isfinite(moment).all()) for moment in moments.values()) or not all(signs):
            raise CheckpointError(f"the optimizer's tensors of {name} are none of Adam's")
        found[index] = moments
    return found


def digest_of(data: bytes | bytearray) -> str:
    """Return the digest of a packed state: SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()
