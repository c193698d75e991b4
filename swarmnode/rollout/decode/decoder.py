"""The forward pass of a dense decoder over a flat list of tokens. Attention is the caller's.

weights.py -> [decoder] <- attention.py (over prompts, or over the cache)
                 |
                 v  hidden states, logits -> sampler.py

Tokens of all sequences lie one after another, shape [N]; only attention knows which belong together.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.rollout.decode.weights import FusedWeights, Layer, Layers


class Attention(Protocol):
    """Attends within the sequences of one batch."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries [N, kv_heads, group, d], keys and values [N, kv_heads, d] -> attended [N, heads * d], of
        the type of the values. On a CPU queries and keys are in float32, whatever that is."""
        ...


class Decoder:
    """Runs layers of policies over one base. Holds no sequence and no policy."""

    def __init__(self, weights: FusedWeights) -> None:
        self.weights = weights
        self._rotary = Rotary(weights.inv_freq, weights.rotary_scaling)
        shape = weights.shape
        self._norm = weights.norm
        self._eps = shape.norm_eps
        self._on_cpu = weights.embedding.device.type == "cpu"
        self._fused = (-1, shape.kv_heads, shape.group + 2, shape.head_dim)
        self._pairs = (-1, shape.kv_heads, shape.group + 1, shape.head_dim // 2, 2)

    def reserve(self, length: int) -> None:
        """Be ready for positions below `length`."""
        self._rotary.reserve(length)

    def forward(
        self,
        layers: Layers,
        tokens_N: Tensor,
        positions_N: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states before the final norm: [N, hidden], or [len(wanted), hidden] of those wanted."""
        hidden = F.embedding(tokens_N, self.weights.embedding)
        rotation = self._rotary.at(positions_N)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            attended = attention(index, *self._project(layer, hidden, rotation))
            if index == last and wanted is not None:
                # Nobody attends to the last layer, so the rest of it is computed only where it is read.
                hidden, attended = hidden[wanted], attended[wanted]
            layer.out.add_(hidden, attended)
            normal = self._norm(hidden, layer.mlp_norm)
            gate, up = layer.gate_up(normal).chunk(2, dim=-1)
            layer.down.add_(hidden, F.silu(gate).mul_(up))
        return hidden

    def logits(self, hidden_N: Tensor) -> Tensor:
        """Next-token logits [N, vocab] in float32."""
        normal = self._norm(hidden_N, self.weights.final_norm)
        return self.weights.head(normal).float()

    def _project(self, layer: Layer, hidden: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normal = self._norm(hidden, layer.attention_norm)
        fused = layer.qkv(normal).view(self._fused)
        group = self.weights.shape.group
        queries_key = fused.narrow(2, 0, group + 1)
        if self._on_cpu:
            rotated = self._rotated_on_cpu(queries_key, layer.qk_norm, rotation)
        else:
            rotated = self._rotated_on_gpu(queries_key, layer.qk_norm, rotation)
        return rotated.narrow(2, 0, group), rotated.select(2, group), fused.select(2, group + 1)

    def _rotated_on_cpu(self, heads: Tensor, scale: Tensor | None, rotation: Tensor) -> Tensor:
        """Normed and rotated, in float32."""
        heads = heads.float()
        per_rms = None if scale is None else self._norm.per_rms(heads)
        if scale is not None:
            heads = heads * scale
        torch.view_as_complex(heads.view(self._pairs)).mul_(rotation)
        return heads if per_rms is None else heads.mul_(per_rms)

    def _rotated_on_gpu(self, heads: Tensor, scale: Tensor | None, rotation: Tensor) -> Tensor:
        """Normed and rotated; the rotation is formed in float32."""
        if scale is not None:
            heads = F.rms_norm(heads, (self._fused[3],), None, self._eps) * scale
        pairs = torch.view_as_complex(heads.float().view(self._pairs))
        return torch.view_as_real(pairs * rotation).view(heads.shape).to(heads.dtype)


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
        """[N, 1, 1, head_dim / 2] complex: one rotation per pair of dimensions, shared by the heads."""
        rows = F.embedding(positions_N, self._table)
        return torch.view_as_complex(rows.view(len(rows), 1, 1, -1, 2))
