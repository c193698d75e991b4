"""The forward pass of a dense decoder over a flat list of tokens. Callers supply the attention.

weights.py -> [Decoder] -> fused product -> cached_attention.py (over prompts, or over the cache) -> [Heads]
                 |                               ^
                 |       embedded.py: positions -+- [Rotary]
                 v  hidden states, logits -> sampler.py

Tokens of all sequences lie one after another, shape [N]; only attention knows which ones belong together, and
each one's position in its sequence.

`Heads` turns the product with a layer's fused matrix into queries, keys and values: split, normed if the
family does so, and rotated. It uses torch's operations; on a CPU, a kernel (cpu_kernels.py) does the same
while it reads and writes the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.cpu_kernels import HeadLayout, kernels
from swarmnode.rollout.decode.matrix import Matrix, RmsNorm
from swarmnode.rollout.decode.weights import FusedWeights, Layers, Shape


class Attention(Protocol):
    """Attends within the sequences of one batch."""

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        """Returns attention [N, heads * d] for a layer's product with `qkv`, [N, kv_heads * (group + 2) * d],
        and the scales of its norm."""
        ...


class Rotary:
    """Rotations e^(i * position * frequency), from a table that grows to the longest sequence asked for."""

    def __init__(self, inv_freq: Tensor, scaling: float) -> None:
        self._inv_freq = inv_freq
        self._scaling = scaling
        self._table = inv_freq.new_empty(0, 2 * len(inv_freq))

    def reserve(self, length: int) -> None:
        """Extends the table to positions below `length`."""
        if length <= len(self._table):
            return
        positions = torch.arange(max(length, 2 * len(self._table)), device=self._inv_freq.device)
        angles = positions.float()[:, None] * self._inv_freq
        # Cosine and sine as `transformers` computes them, so that both agree to the last bit.
        self._table = (torch.stack([angles.cos(), angles.sin()], dim=-1) * self._scaling).flatten(1)

    def at(self, positions_N: Tensor) -> Tensor:
        """Returns [N, head_dim] in float32: cosine and sine of each pair of neighbours, at these
        positions."""
        return F.embedding(positions_N, self._table)

    def until(self, length: int) -> Tensor:
        """Returns the rotations of positions 0, 1, ..., length - 1, as `at` does."""
        return self._table[:length]


@dataclass(frozen=True, slots=True)
class Lookback:
    """The attention of one kind of layers: its window and its rotations."""

    window: int | None
    """Number of visible tokens, including the newest. None: all."""
    rotary: Rotary


@dataclass(frozen=True, slots=True)
class AttentionByLayer:
    """An `Attention` for layers of several kinds."""

    of_kinds: Sequence[Attention]
    kind_of_layer: Sequence[int]

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        return self.of_kinds[self.kind_of_layer[layer]](layer, fused, qk_norm)


class Decoder:
    """Runs layers of policies over one base. Holds no sequence and no policy."""

    def __init__(self, weights: FusedWeights) -> None:
        self.weights = weights
        self._lookbacks = [
            Lookback(kind.window, Rotary(kind.inv_freq, kind.rotary_scaling)) for kind in weights.kinds
        ]
        self.heads = Heads(weights.shape, weights.norm, weights.embedding.device)
        """The layout of queries, keys and values, for attention."""
        self._norm = weights.norm

    def reserve(self, length: int) -> None:
        """Extends the tables to positions below `length`."""
        for lookback in self._lookbacks:
            lookback.rotary.reserve(length)

    def attention(self, of_kind: Callable[[Lookback], Attention]) -> Attention:
        """Returns the attention of all layers, built by `of_kind` for each kind of layers."""
        first, *others = [of_kind(lookback) for lookback in self._lookbacks]
        return AttentionByLayer([first, *others], self.weights.kind_of_layer) if others else first

    def forward(
        self, layers: Layers, tokens_N: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Returns hidden states before the final norm: [N, hidden], or [len(wanted), hidden] for the `wanted`
        rows."""
        hidden = F.embedding(tokens_N, self.weights.embedding)
        if self.weights.embedding_scale is not None:
            hidden.mul_(self.weights.embedding_scale)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            fused = layer.qkv(self._norm(hidden, layer.attention_norm))
            attended = attention(index, fused, layer.qk_norm)
            if index == last and wanted is not None:
                # Nobody attends to the last layer, so the rest of it is computed only for the wanted rows.
                hidden, attended = hidden[wanted], attended[wanted]
            self._add(hidden, layer.out, attended, layer.out_norm)
            gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))
            self._add(hidden, layer.down, gated(gate_up, self.weights.activation), layer.down_norm)
        return hidden

    def logits(self, hidden_N: Tensor) -> Tensor:
        """Returns next-token logits [N, vocab] in float32."""
        normal = self._norm(hidden_N, self.weights.final_norm)
        logits = self.weights.head(normal).float()
        cap = self.weights.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _add(self, hidden: Tensor, matrix: Matrix, x: Tensor, norm: Tensor | None) -> None:
        """Computes hidden += x @ matrix, with x normed first if there is a norm."""
        if norm is None:
            matrix.add_(hidden, x)
        else:
            hidden.add_(self._norm(matrix(x), norm))


# ---- after the fused products ----


def gated(gate_up_ND: Tensor, activation: str) -> Tensor:
    """Returns activation(gate) * up from their joint product, [N, gate and up]. `activation` is one of
    `family.ACTIVATIONS`."""
    gate, up = gate_up_ND.chunk(2, dim=-1)
    if activation == "silu":
        return kernels().silu_mul(gate, up) if kernels().fits(gate_up_ND) else F.silu(gate).mul_(up)
    if kernels().fits(gate_up_ND):
        return kernels().gelu_tanh_mul(gate, up)
    return F.gelu(gate, approximate="tanh").mul_(up)


class Heads:
    """Splits the fused qkv product of a model into heads."""

    def __init__(self, shape: Shape, norm: RmsNorm, device: torch.device) -> None:
        self.shape = shape
        self.layout = HeadLayout(
            shape.kv_heads, shape.group, shape.head_dim, shape.norm_eps, shape.scale, shape.score_cap
        )
        """The numbers and sizes of heads, in the form of the C kernels."""
        self._norm = norm
        self._on_cpu = device.type == "cpu"

    def split(
        self, fused_ND: Tensor, scale: Tensor | None, rotation: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [N / W, W, kv_heads, group, d], keys and values [N / W, W, kv_heads, d] of
        sequences of W tokens. `rotation` comes from `shared_by_heads`. On a CPU, queries and keys are in
        float32, whatever the model's type. May overwrite `fused`."""
        group = self.shape.group
        fused = fused_ND.view(-1, len(rotation), self.shape.kv_heads, group + 2, self.shape.head_dim)
        heads = fused.narrow(3, 0, group + 1)
        rotated = (self._on_the_cpu if self._on_cpu else self._on_a_gpu)(heads, scale, rotation)
        return rotated.narrow(3, 0, group), rotated.select(3, group), fused.select(3, group + 1)

    def _on_the_cpu(self, heads: Tensor, scale: Tensor | None, rotation: Tensor) -> Tensor:
        """Splits on a CPU, where queries and keys are normed and rotated in float32."""
        heads = heads.float()
        per_rms = None if scale is None else self._norm.per_rms(heads)
        if scale is not None:
            heads = heads * scale
        _pairs(heads).mul_(rotation)
        return heads if per_rms is None else heads.mul_(per_rms)

    def _on_a_gpu(self, heads: Tensor, scale: Tensor | None, rotation: Tensor) -> Tensor:
        """Splits on a GPU, in few operations: launching them takes longer than running them."""
        exact = heads.float()
        if scale is not None:
            exact = F.rms_norm(exact, exact.shape[-1:], None, self.shape.norm_eps).mul_(scale)
        _pairs(exact).mul_(rotation)
        return exact.to(heads.dtype)


def shared_by_heads(rotation_WE: Tensor) -> Tensor:
    """Returns rotations as `Heads.split` takes them: one complex number per pair of dimensions, [W, 1, 1,
    E / 2]."""
    return torch.view_as_complex(rotation_WE.view(len(rotation_WE), 1, 1, -1, 2))


def _pairs(heads: Tensor) -> Tensor:
    """Returns adjacent values as complex numbers."""
    return torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
