"""The forward pass of a dense decoder over a flat list of tokens. Attention is the caller's.

weights.py -> [decoder] <- attention.py (over prompts, or over the cache)
                 |
                 v  hidden states, logits -> sampler.py

Tokens of all sequences lie one after another, shape [N]; only attention knows which belong together, and
where in its sequence each one is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from swarmnode.rollout.decode.activation import gated
from swarmnode.rollout.decode.heads import Heads, Rotary
from swarmnode.rollout.decode.matrix import Matrix
from swarmnode.rollout.decode.weights import FusedWeights, Layers


class Attention(Protocol):
    """Attends within the sequences of one batch."""

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        """The product with a layer's `qkv`, [N, kv_heads * (group + 2) * d], and the scales of its norm ->
        attended [N, heads * d]."""
        ...


@dataclass(frozen=True, slots=True)
class Lookback:
    """How layers of one kind attend: how far back, and by which rotations."""

    window: int | None
    """Tokens that are seen, the newest included; None: all."""
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
        """The layout of queries, keys and values, which attention needs."""
        self._norm = weights.norm

    def reserve(self, length: int) -> None:
        """Be ready for positions below `length`."""
        for lookback in self._lookbacks:
            lookback.rotary.reserve(length)

    def attention(self, of_kind: Callable[[Lookback], Attention]) -> Attention:
        """The attention of all layers, from what `of_kind` makes of each kind of them."""
        first, *others = [of_kind(lookback) for lookback in self._lookbacks]
        return AttentionByLayer([first, *others], self.weights.kind_of_layer) if others else first

    def forward(
        self, layers: Layers, tokens_N: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Hidden states before the final norm: [N, hidden], or [len(wanted), hidden] of those wanted."""
        hidden = F.embedding(tokens_N, self.weights.embedding)
        if self.weights.embedding_scale is not None:
            hidden.mul_(self.weights.embedding_scale)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            fused = layer.qkv(self._norm(hidden, layer.attention_norm))
            attended = attention(index, fused, layer.qk_norm)
            if index == last and wanted is not None:
                # Nobody attends to the last layer, so the rest of it is computed only where it is read.
                hidden, attended = hidden[wanted], attended[wanted]
            self._add(hidden, layer.out, attended, layer.out_norm)
            gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))
            self._add(hidden, layer.down, gated(gate_up, self.weights.activation), layer.down_norm)
        return hidden

    def logits(self, hidden_N: Tensor) -> Tensor:
        """Next-token logits [N, vocab] in float32."""
        normal = self._norm(hidden_N, self.weights.final_norm)
        logits = self.weights.head(normal).float()
        cap = self.weights.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _add(self, hidden: Tensor, matrix: Matrix, x: Tensor, norm: Tensor | None) -> None:
        """hidden += x @ matrix, normed before where there is a norm."""
        if norm is None:
            matrix.add_(hidden, x)
        else:
            hidden.add_(self._norm(matrix(x), norm))
