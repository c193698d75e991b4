"""The forward pass of a dense decoder over a flat list of tokens. Attention is the caller's.

weights.py -> [decoder] <- attention.py (over prompts, or over the cache)
                 |
                 v  hidden states, logits -> sampler.py

Tokens of all sequences lie one after another, shape [N]; only attention knows which belong together, and
where in its sequence each one is.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from swarmnode.native.passes import silu_mul
from swarmnode.native.tensors import fits
from swarmnode.rollout.decode.heads import Heads, Rotary
from swarmnode.rollout.decode.weights import FusedWeights, Layers


class Attention(Protocol):
    """Attends within the sequences of one batch."""

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        """The product with a layer's `qkv`, [N, kv_heads * (group + 2) * d], and the scales of its norm ->
        attended [N, heads * d]."""
        ...


class Decoder:
    """Runs layers of policies over one base. Holds no sequence and no policy."""

    def __init__(self, weights: FusedWeights) -> None:
        self.weights = weights
        self.rotary = Rotary(weights.inv_freq, weights.rotary_scaling)
        """For attention, as `heads` is."""
        self.heads = Heads(weights.shape, weights.norm, weights.embedding.device)
        self._norm = weights.norm

    def reserve(self, length: int) -> None:
        """Be ready for positions below `length`."""
        self.rotary.reserve(length)

    def forward(
        self, layers: Layers, tokens_N: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Hidden states before the final norm: [N, hidden], or [len(wanted), hidden] of those wanted."""
        hidden = F.embedding(tokens_N, self.weights.embedding)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            fused = layer.qkv(self._norm(hidden, layer.attention_norm))
            attended = attention(index, fused, layer.qk_norm)
            if index == last and wanted is not None:
                # Nobody attends to the last layer, so the rest of it is computed only where it is read.
                hidden, attended = hidden[wanted], attended[wanted]
            layer.out.add_(hidden, attended)
            normal = self._norm(hidden, layer.mlp_norm)
            layer.down.add_(hidden, _active(layer.gate_up(normal)))
        return hidden

    def logits(self, hidden_N: Tensor) -> Tensor:
        """Next-token logits [N, vocab] in float32."""
        normal = self._norm(hidden_N, self.weights.final_norm)
        return self.weights.head(normal).float()


def _active(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of two halves."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(gate, up) if fits(gate_up) else F.silu(gate).mul_(up)
