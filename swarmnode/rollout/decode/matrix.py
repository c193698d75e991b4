"""A weight matrix, ready to be multiplied with: plain, packed for a CPU, or of several policies in one batch.

weights.py -> [matrix] <- decoder.py
mixing.py ------^

On a CPU the weights are packed once, when a policy is merged, into the order in which oneDNN reads them.
Measured on an EPYC with AVX-512, from 3 to 2048 rows: float32 products take half the time of MKL's, those in
bfloat16 70 to 95 %. But a call of oneDNN costs 12 us whatever its size, and one of MKL 2 us: a small matrix
in float32 is left as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FOR_ROWS = 64
"""The batch size oneDNN arranges weights for. The arrangement suits any other size as well."""


SMALL_MATRIX = 1 << 16
"""Numbers of a float32 matrix that MKL multiplies with as fast: measured from 1 to 1000 rows."""


class Matrix(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x_N: Tensor) -> Tensor:
        """[N, in] -> [N, out]"""
        ...

    def add_(self, residual_N: Tensor, x_N: Tensor) -> None:
        """residual += x @ weight.T + bias, in place."""
        ...


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """`weight` is [out, in]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_N: Tensor) -> Tensor:
        return F.linear(x_N, self.weight, self.bias)

    def add_(self, residual_N: Tensor, x_N: Tensor) -> None:
        residual_N.addmm_(x_N, self.weight.T)
        if self.bias is not None:
            residual_N.add_(self.bias)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`weight` is in the order of oneDNN, which nothing else can read."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_N: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_N, self.weight, self.bias, "none", [], "")

    def add_(self, residual_N: Tensor, x_N: Tensor) -> None:
        residual_N.add_(self(x_N))


@dataclass(frozen=True, slots=True)
class MixedMatrix:
    """The same matrix of several policies: `parts[i]` is for the next `sizes[i]` rows of the batch."""

    parts: Sequence[Matrix]
    sizes: Sequence[int]

    def __call__(self, x_N: Tensor) -> Tensor:
        return torch.cat([part(x) for part, x in zip(self.parts, x_N.split(self.sizes), strict=True)])

    def add_(self, residual_N: Tensor, x_N: Tensor) -> None:
        slices = zip(self.parts, residual_N.split(self.sizes), x_N.split(self.sizes), strict=True)
        for part, residual, x in slices:
            part.add_(residual, x)


def matrix(weight: Tensor, bias: Tensor | None) -> PlainMatrix | PackedMatrix:
    """The fastest way to multiply with `weight` [out, in] where it lies."""
    if not _packable(weight):
        return PlainMatrix(weight, bias)
    return PackedMatrix(torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS), bias)


def native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of this type at full speed."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def _packable(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    small = weight.dtype == torch.float32 and weight.numel() <= SMALL_MATRIX
    return on_cpu and native_on_cpu(weight.dtype) and not small
