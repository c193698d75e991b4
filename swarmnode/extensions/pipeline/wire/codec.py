"""Activations and gradients to bytes and back, smaller if wanted, at 1 to 6 GB of float32 a second and core.

stage_worker.py -> [encode] -> Payload -> frames.py -> wire -> frames.py -> [decode] -> stage_worker.py

| codec | bytes an element | error of an element x |
|-------|------------------|-----------------------|
| none  | those of its dtype | none |
| fp16  | 2 | abs(x) / 2048, at least 2^-25; beyond 65504 it is clamped to that |
| int8  | 1 + 4 / block | largest of its block / 254 (and rounding to its dtype) |

These are the schemes of hivemind's FLOAT16 and BLOCKWISE_8BIT (absolute maximum of a block, linear), written
again: a node does not import hivemind, whose 8-bit codecs need bitsandbytes or fail on numpy 2.4. Dettmers
et al., "8-bit Optimizers via Block-wise Quantization", section 2, has the reason for blocks: an outlier costs
the precision of its neighbours only. bfloat16 gains nothing from fp16, which is for float32.

A tensor with NaN or an infinity is refused at both ends: at ours it is a fault to stop at, not to send on.
Numbers are little-endian, as every machine that torch runs on.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.frames import Payload, as_payload
from swarmnode.extensions.pipeline.wire.hop_messages import (
    MAX_INT8_BLOCK,
    CodecName,
    Dtype,
    TensorHeader,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal

INT8_BLOCK = 64
"""Default elements per scale: 6 % more bytes. A language model's hidden states have a few huge channels, and
they take the precision of their whole block: with two of 1024 channels 100 times the rest, that rest has a
relative error of 8 % in blocks of 64, 16 % at 256 and 42 % at hivemind's 4096."""

INT8_STEPS = 127
FP16_MAX = 65504.0

_PIECE = 64 * 1024
"""Elements quantised at a time: they stay in the cache between the passes, which is twice as fast."""

_SMALLEST_MAX = 2.0**-100
"""A block whose largest element is below this becomes zeros: its scale has no inverse in float32."""

_LARGEST_MAX = 3.4e38
"""float32 ends a little above; clamped to this, the largest step times 127 cannot overflow."""

_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor ready to be sent. The payload may share the memory of the tensor: do not write into it before
    the message that carries it is answered."""

    header: TensorHeader
    payload: Payload


def encode(tensor: Tensor, codec: CodecName, *, block: int = INT8_BLOCK) -> Encoded:
    """Encode a tensor of rank 1 to 3 in float32, bfloat16 or float16, on any device.

    Raises Rejected: not_finite; ValueError for a dtype, rank or size that cannot be sent.

    >>> sent = encode(torch.ones(2, 3), "fp16")
    >>> sent.header.payload_bytes, decode(sent.header, sent.payload.data).tolist()
    (12, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    """
    values = tensor.detach().cpu().contiguous()
    header = TensorHeader(
        codec=codec,
        dtype=_check_travels(values, block),
        shape=tuple(values.shape),
        block=block if codec == "int8" else 0,
    )
    return Encoded(header, as_payload(_bytes_of(_compress(values, codec, block))))


def decode(header: TensorHeader, data: bytearray | memoryview) -> Tensor:
    """Return the tensor that a header describes, on the CPU; for `none` it shares the memory of `data`.

    The wire has compared `data` with its checksums. Raises Rejected: malformed, not_finite.
    """
    if len(data) != header.payload_bytes:
        raise Rejected(Refusal.MALFORMED, f"{len(data)} bytes of payload, not {header.payload_bytes}")
    dtype = _DTYPES[header.dtype]
    if header.codec == "int8":
        return _dequantise(data, header, dtype).view(header.shape)
    values = torch.frombuffer(data, dtype=torch.float16 if header.codec == "fp16" else dtype)
    _finite_bound(values)
    return values.to(dtype).view(header.shape)


def _check_travels(values: Tensor, block: int) -> Dtype:
    name = _NAMES.get(values.dtype)
    if name is None:
        raise ValueError(f"{values.dtype} does not travel, only {', '.join(_DTYPES)}")
    if not 1 <= values.dim() <= 3 or values.numel() == 0 or not 1 <= block <= MAX_INT8_BLOCK:
        raise ValueError(f"a tensor of shape {tuple(values.shape)} in blocks of {block} does not travel")
    return name


def _compress(values: Tensor, codec: CodecName, block: int) -> Tensor:
    largest = _finite_bound(values)
    if codec == "int8":
        return _quantise(values.view(-1), block)
    if codec == "fp16":
        # A pass saved for almost every tensor there is.
        return (values if largest <= FP16_MAX else values.clamp(-FP16_MAX, FP16_MAX)).to(torch.float16)
    return values


def _quantise(values: Tensor, block: int) -> Tensor:
    """Return flat values as one buffer of bytes: a float32 scale for each block, then an int8 for each
    value."""
    size = values.numel()
    count = -(-size // block)
    buffer = torch.empty(4 * count + size, dtype=torch.uint8)
    scales = buffer[: 4 * count].view(torch.float32)
    steps = buffer[4 * count :].view(torch.int8)
    per_piece = max(1, _PIECE // block)
    for first in range(0, size // block, per_piece):
        last = min(first + per_piece, size // block)
        span = slice(first * block, last * block)
        _quantise_rows(values[span].view(-1, block), steps[span].view(-1, block), scales[first:last])
    if size % block:
        start = size - size % block
        _quantise_rows(values[start:].view(1, -1), steps[start:].view(1, -1), scales[-1:])
    return buffer


def _quantise_rows(rows: Tensor, steps: Tensor, scales: Tensor) -> None:
    work = rows.abs().float() if rows.dtype != torch.float32 else rows.abs()
    largest = work.amax(1).clamp_(max=_LARGEST_MAX)
    largest[largest < _SMALLEST_MAX] = 0.0
    torch.div(largest, INT8_STEPS, out=scales)
    inverse = torch.where(largest > 0, INT8_STEPS / largest, largest)
    torch.mul(rows, inverse[:, None], out=work)
    steps.copy_(work.round_())


def _dequantise(data: bytearray | memoryview, header: TensorHeader, dtype: torch.dtype) -> Tensor:
    """Invert `_quantise`. Whatever it accepts becomes finite numbers."""
    size, block, count = header.size, header.block, header.block_count
    scales = torch.frombuffer(data, dtype=torch.float32, count=count)
    steps = torch.frombuffer(data, dtype=torch.int8, offset=4 * count)
    if not bool((scales * INT8_STEPS).to(dtype).isfinite().all()) or bool((scales < 0).any()):
        raise Rejected(Refusal.NOT_FINITE, "a scale that no finite tensor has")
    if int(steps.min()) < -INT8_STEPS:
        raise Rejected(Refusal.MALFORMED, "a step of -128")
    values = torch.empty(size, dtype=dtype)
    whole = size // block
    per_piece = max(1, _PIECE // block)
    for first in range(0, whole, per_piece):
        last = min(first + per_piece, whole)
        span = slice(first * block, last * block)
        rows = steps[span].view(-1, block) * scales[first:last, None]
        values[span].view(-1, block).copy_(rows)
    if size % block:
        start = whole * block
        values[start:] = steps[start:] * scales[-1]
    return values


def _finite_bound(values: Tensor) -> float:
    """Return the largest magnitude. Raises Rejected: not_finite."""
    # Smallest and largest take one pass and no memory, and NaN is both of them.
    low, high = torch.aminmax(values)
    largest = max(-float(low), float(high))
    if not math.isfinite(largest) or not math.isfinite(float(low)):
        raise Rejected(Refusal.NOT_FINITE)
    return largest


def _bytes_of(values: Tensor) -> memoryview:
    return values.view(-1).view(torch.uint8).numpy().data
