"""Reads the tensors of a member's own layers, and no other tensors, from a model's folder.

models folder -> [WeightFolder] -> whole_model.py, stage_model.py

The folder is laid out as transformers saves it: config.json and safetensors, in one file or in several files
with an index. Files are mapped instead of read, so only a few header bytes of other layers enter memory.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(slots=True)
class WeightFolder:
    """The safetensors files of one model, and the tensors in each."""

    folder: Path
    file_of: Mapping[str, str]
    """By tensor name, the file in the folder that holds the tensor."""

    @classmethod
    def open(cls, folder: Path) -> "WeightFolder":
        """Open a folder by its index, or by the header of its only file. Raises ModelError if it has
        neither."""
        index = folder / INDEX_FILE
        if index.exists():
            return cls(folder, _index(index))
        with _opened(folder / SINGLE_FILE) as file:
            return cls(folder, dict.fromkeys(file.keys(), SINGLE_FILE))

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of these tensors on the CPU, in their stored dtype.

        They are copied because a tensor that points into the mapping would keep the whole file mapped. Raises
        ModelError if the folder does not have one of the tensors.
        """
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._file_with(name)].append(name)
        found: dict[str, Tensor] = {}
        for file_name, wanted in by_file.items():
            with _opened(self.folder / file_name) as file:
                for name in wanted:
                    found[name] = _tensor(file, name, file_name).clone()
        return found

    def leading(self, name: str, count: int) -> Tensor:
        """Return the first values of a tensor, flattened: at least `count`, or all if it has fewer.

        Raises ModelError if the folder does not have the tensor.
        """
        with _opened(self.folder / self._file_with(name)) as file:
            part = file.get_slice(name)
            row = math.prod(part.get_shape()[1:])
            return part[: -(-count // max(row, 1))].clone().flatten()

    def _file_with(self, name: str) -> str:
        if name not in self.file_of:
            raise ModelError(f"{self.folder} holds no {name}", hint="the folder is incomplete")
        return self.file_of[name]


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}", hint="a stage is loaded from safetensors files"
        ) from error


def _tensor(file: Any, name: str, file_name: str) -> Tensor:
    from safetensors import SafetensorError

    try:
        tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{file_name} holds no {name}: {error}", hint="its index is wrong") from error
    if not torch.is_floating_point(tensor):
        raise ModelError(f"{name} is stored as {tensor.dtype}", hint="quantized models cannot be cut")
    return tensor


def _index(path: Path) -> dict[str, str]:
    try:
        files: Any = json.loads(path.read_text())["weight_map"]
        file_of = {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not an index of safetensors files: {error}") from error
    outside = [file for file in file_of.values() if Path(file).name != file]
    if outside:
        raise ModelError(f"{path} names {outside[0]}, which is not a file beside it")
    return file_of
