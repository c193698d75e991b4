"""Queries, keys and values out of the product with their fused matrix: split, normed if need be, and rotated.

decoder.py -> fused product -> attention.py -> [heads]
prefill.py, embedded.py -> positions --^

Here with torch's operations. On a CPU, native/decode.py does the same while it reads and writes the cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.native import decode
from swarmnode.rollout.decode.norm import RmsNorm
from swarmnode.rollout.decode.weights import Shape


class Heads:
    """How to split the fused product of a model."""

    def __init__(self, shape: Shape, norm: RmsNorm, device: torch.device) -> None:
        self.shape = shape
        scale = shape.head_dim**-0.5 if shape.score_scale is None else shape.score_scale
        self.layout = decode.HeadLayout(
            shape.kv_heads, shape.group, shape.head_dim, shape.norm_eps, scale, shape.score_cap
        )
        """The same for the kernels."""
        self._norm = norm
        self._on_cpu = device.type == "cpu"

    def split(
        self, fused_ND: Tensor, scale: Tensor | None, rotation_WE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N / W, W, kv_heads, group, d], keys and values [N / W, W, kv_heads, d] of sequences of W
        tokens. On a CPU queries and keys are in float32, whatever the type of the model."""
        group, width = self.shape.group, len(rotation_WE)
        fused = fused_ND.view(-1, width, self.shape.kv_heads, group + 2, self.shape.head_dim)
        heads = fused.narrow(3, 0, group + 1)
        # One rotation per pair of dimensions, shared by the heads.
        rotation = torch.view_as_complex(rotation_WE.view(width, 1, 1, -1, 2))
        rotated = (self._on_the_cpu if self._on_cpu else self._on_a_gpu)(heads, scale, rotation)
        return rotated.narrow(3, 0, group), rotated.select(3, group), fused.select(3, group + 1)

    def _on_the_cpu(self, heads: Tensor, scale: Tensor | None, rotation: Tensor) -> Tensor:
        """Normed and rotated, in float32."""
        heads = heads.float()
        per_rms = None if scale is None else self._norm.per_rms(heads)
        if scale is not None:
            heads = heads * scale
        _pairs(heads).mul_(rotation)
        return heads if per_rms is None else heads.mul_(per_rms)

    def _on_a_gpu(self, heads: Tensor, scale: Tensor | None, rotation: Tensor) -> Tensor:
        """Normed and rotated; the rotation is formed in float32."""
        dtype = heads.dtype
        if scale is not None:
            heads = F.rms_norm(heads.to(scale.dtype), heads.shape[-1:], None, self.shape.norm_eps) * scale
        rotated = torch.view_as_real(_pairs(heads.float()) * rotation)
        return rotated.view(heads.shape).to(dtype)


def _pairs(heads: Tensor) -> Tensor:
    """Neighbours as complex numbers."""
    return torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))


class Rotary:
    """Rotations e^(i * position * frequency), from a table that grows to the longest sequence asked for."""

    def __init__(self, inv_freq: Tensor, scaling: float) -> None:
        self._inv_freq = inv_freq
        self._scaling = scaling
        self._table = inv_freq.new_empty(0, 2 * len(inv_freq))

    def reserve(self, length: int) -> None:
        """Extend the table to positions below `length`."""
        if length <= len(self._table):
            return
        positions = torch.arange(max(length, 2 * len(self._table)), device=self._inv_freq.device)
        angles = positions.float()[:, None] * self._inv_freq
        # Cosine and sine as `transformers` computes them, so that both agree to the last bit.
        self._table = (torch.stack([angles.cos(), angles.sin()], dim=-1) * self._scaling).flatten(1)

    def at(self, positions_N: Tensor) -> Tensor:
        """[N, head_dim] float32: the cosine and sine of each pair of neighbours."""
        return F.embedding(positions_N, self._table)

    def until(self, length: int) -> Tensor:
        """The same for the positions 0, 1, ..., length - 1."""
        return self._table[:length]
