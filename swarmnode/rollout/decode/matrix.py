"""A weight matrix prepared for multiplication: plain, packed for a CPU, or of several policies in one
batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.cpu_kernels import kernels

PACKED_FOR_ROWS = 64
"""Batch size that oneDNN arranges weights for. The arrangement suits any other size as well."""


SMALL_MATRIX = 1 << 16
"""The largest float32 matrix that MKL multiplies as fast without packing: measured from 1 to 1000 rows."""


class Matrix(Protocol):
    """Computes y = x @ weight.T + bias."""

    def __call__(self, x_N: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: [N, in] -> [N, out]."""
        ...

    def add_(self, residual_N: Tensor, x_N: Tensor) -> None:
        """Computes residual += x @ weight.T + bias, in place."""
        ...


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A matrix whose `weight` is [out, in]."""

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
    """A matrix whose `weight` is in oneDNN's own order, which nothing else can read."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_N: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_N, self.weight, self.bias, "none", [], "")

    def add_(self, residual_N: Tensor, x_N: Tensor) -> None:
        residual_N.add_(self(x_N))


@dataclass(frozen=True, slots=True)
class MixedMatrix:
    """One matrix of several policies: `parts[i]` multiplies the next `sizes[i]` rows of the batch."""

    parts: Sequence[Matrix]
    sizes: Sequence[int]

    def __call__(self, x_N: Tensor) -> Tensor:
        return torch.cat([part(x) for part, x in zip(self.parts, x_N.split(self.sizes), strict=True)])

    def add_(self, residual_N: Tensor, x_N: Tensor) -> None:
        slices = zip(self.parts, residual_N.split(self.sizes), x_N.split(self.sizes), strict=True)
        for part, residual, x in slices:
            part.add_(residual, x)


def matrix(weight: Tensor, bias: Tensor | None) -> PlainMatrix | PackedMatrix:
    """Returns the fastest matrix for `weight` [out, in] on its device."""
    if not _packable(weight):
        return PlainMatrix(weight, bias)
    return PackedMatrix(torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS), bias)


def native_on_cpu(dtype: torch.dtype) -> bool:
    """Returns True if this CPU multiplies matrices of this type at full speed."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def _packable(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    small = weight.dtype == torch.float32 and weight.numel() <= SMALL_MATRIX
    return on_cpu and native_on_cpu(weight.dtype) and not small


# ---- root-mean-square norms ----


class RmsNorm:
    """Norms over the last dimension, where tensors lie on `device`."""

    def __init__(self, eps: float, device: torch.device) -> None:
        self._eps = eps
        self._eps_tensor = torch.tensor(eps, device=device)
        self._on_cpu = device.type == "cpu"

    def placed(self, scale: Tensor) -> Tensor:
        """Returns a scale in the form that `__call__` takes: in float32 on a CPU, on a GPU in the type that
        the norm is computed in."""
        return scale.float() if self._on_cpu else scale

    def __call__(self, x_ND: Tensor, scale_D: Tensor) -> Tensor:
        """Returns the normed x in its own type; the norm is computed in float32."""
        if not self._on_cpu:
            if scale_D.dtype != x_ND.dtype:
                return F.rms_norm(x_ND.to(scale_D.dtype), x_ND.shape[-1:], scale_D, self._eps).to(x_ND.dtype)
            return F.rms_norm(x_ND, x_ND.shape[-1:], scale_D, self._eps)
        if kernels().fits(x_ND):
            return kernels().rms_norm(x_ND, scale_D, self._eps)
        exact = x_ND.float()
        per_rms = self.per_rms(exact)
        normed = exact * per_rms if exact is x_ND else exact.mul_(per_rms)
        return normed.mul_(scale_D).to(x_ND.dtype)

    def per_rms(self, x: Tensor) -> Tensor:
        """Returns 1 / sqrt(mean(x^2) + eps) of float32 numbers: [..., D] -> [..., 1]."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self._eps_tensor, length, length, value=1 / x.shape[-1]).rsqrt_()
