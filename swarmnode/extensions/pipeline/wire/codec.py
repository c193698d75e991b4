"""Converts activations and gradients to bytes and back, at several GB of float32 per second and core.

stage_worker.py -> [encode] -> member_streams.py -> incoming_streams.py -> [decode] -> stage_worker.py

| codec | bytes an element | error of an element x |
|-------|------------------|-----------------------|
| none  | those of its dtype | none |
| fp16  | 2 | abs(x) / 2048, at least 2^-25; beyond 65504 it is clamped to that |

A tensor arrives in the dtype in which it was sent; a stage computes in its own dtype (stage_worker.py). A
number takes two bytes on the wire: float32 is sent as fp16, and shorter types unchanged (`codec_for`).
Tensors with NaN or infinity are refused at both ends: at the sender they are a fault to stop at instead of
sending on. Numbers are little-endian, as on every machine that torch runs on.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName, Dtype, TensorHeader
from swarmnode.extensions.pipeline.wire.refusals import Refusal

FP16_MAX = 65504.0

_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor ready to be sent. The payload may share memory with the tensor: do not write to the tensor
    before the message is answered."""

    header: TensorHeader
    payload: memoryview


def codec_for(dtype: torch.dtype) -> CodecName:
    """Return the codec for a stage that computes in `dtype`.

    >>> codec_for(torch.float32), codec_for(torch.bfloat16)
    ('fp16', 'none')
    """
    return "fp16" if dtype == torch.float32 else "none"


def encode(tensor: Tensor, codec: CodecName) -> Encoded:
    """Encode a tensor of rank 1 to 3 in float32, bfloat16 or float16, on any device.

    Raises Rejected: not_finite; ValueError for a dtype, rank or size that cannot be sent.

    >>> sent = encode(torch.ones(2, 3), "fp16")
    >>> sent.header.payload_bytes, decode(sent.header, sent.payload).tolist()
    (12, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    """
    values = tensor.detach().cpu().contiguous()
    _check_travels(values)
    largest = _finite_bound(values)
    if codec == "fp16":
        # Almost no tensor needs clamping, so this usually saves a pass.
        values = (values if largest <= FP16_MAX else values.clamp(-FP16_MAX, FP16_MAX)).to(torch.float16)
    header = TensorHeader(dtype=_NAMES[values.dtype], shape=tuple(values.shape))
    return Encoded(header, values.view(-1).view(torch.uint8).numpy().data)


def decode(header: TensorHeader, data: bytearray | memoryview) -> Tensor:
    """Return the tensor that a header describes, on the CPU and sharing memory with `data`. Raises Rejected:
    malformed, not_finite."""
    if len(data) != header.payload_bytes:
        raise Rejected(Refusal.MALFORMED, f"{len(data)} bytes of payload, not {header.payload_bytes}")
    values = torch.frombuffer(data, dtype=_DTYPES[header.dtype])
    _finite_bound(values)
    return values.view(header.shape)


def _check_travels(values: Tensor) -> None:
    if values.dtype not in _NAMES:
        raise ValueError(f"{values.dtype} does not travel, only {', '.join(_DTYPES)}")
    if not 1 <= values.dim() <= 3 or values.numel() == 0:
        raise ValueError(f"a tensor of shape {tuple(values.shape)} does not travel")


def _finite_bound(values: Tensor) -> float:
    """Return the largest magnitude. Raises Rejected: not_finite."""
    # aminmax takes one pass and no memory. If there is a NaN, both results are NaN.
    low, high = torch.aminmax(values)
    largest = max(-float(low), float(high))
    if not math.isfinite(largest) or not math.isfinite(float(low)):
        raise Rejected(Refusal.NOT_FINITE)
    return largest
