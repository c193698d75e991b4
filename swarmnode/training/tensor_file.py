"""Tensors as the bytes of a safetensors file, one tensor at a time.

checkpoint -> [tensor_pieces] -> storage.write_synced -> disk -> safetensors reads it

The library's own `save` builds the whole file in memory and holds the interpreter's lock meanwhile: a writer
in the background would stop the training that it is meant to leave alone. Here every piece is a view of a
tensor's memory, and both hashing and writing one let the lock go.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

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
"""Bytes. The header is filled up with spaces, and wide numbers come first: so every tensor is aligned."""


def tensor_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The file's header, then each tensor's bytes. The tensors must be contiguous and on the CPU.

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
