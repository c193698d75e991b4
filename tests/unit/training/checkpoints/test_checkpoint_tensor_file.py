from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from swarmnode.machine.storage import sha256_of, write_synced
from swarmnode.training.checkpoints.checkpoint import DTYPES, tensor_pieces


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"of/{name}": torch.randint(0, 2, (3, 5)).to(dtype) for dtype, name in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(7.0), "empty": torch.zeros(0, 4), 'name with "quotes"': torch.rand(2)}
    path = tmp_path / "some.safetensors"
    digest = write_synced(path, tensor_pieces(tensors, {"format": "pt"}))
    assert digest == sha256_of(path)
    read = load_file(str(path))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    with safe_open(str(path), "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_nothing_at_all_is_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    write_synced(path, tensor_pieces({}))
    assert load_file(str(path)) == {}


def test_the_bytes_are_the_tensors_own_memory() -> None:
    tensor = torch.zeros(4)
    *_, piece = tensor_pieces({"a": tensor})
    tensor.fill_(1.0)
    assert bytes(piece) == bytes(torch.ones(4).numpy().data), "large tensors are not copied to be written"


def test_a_tensor_that_cannot_be_viewed_is_an_error_and_not_wrong_numbers() -> None:
    with pytest.raises(RuntimeError):
        list(tensor_pieces({"a": torch.zeros(2, 3).t()}))
