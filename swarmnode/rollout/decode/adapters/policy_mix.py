"""Rows of several policies in one batch: only matrices are applied per policy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarmnode.rollout.decode.decoder import Attention, Decoder
from swarmnode.rollout.decode.matrix import MixedMatrix
from swarmnode.rollout.decode.weights import Layers


@dataclass(frozen=True, slots=True)
class PolicyMix:
    """The order of a batch's rows by policy."""

    layers: Layers
    order: Tensor
    """Indices of the rows in the decoder's order."""
    place: Tensor
    """Places of rows 0, 1, ... in the decoder's order."""

    @classmethod
    def of(cls, layers_of_rows: Sequence[Layers], device: torch.device) -> "PolicyMix":
        """Returns the mix in which row i runs `layers_of_rows[i]`."""
        members: dict[int, list[int]] = {}
        for row, layers in enumerate(layers_of_rows):
            members.setdefault(id(layers), []).append(row)
        order = torch.tensor([row for rows in members.values() for row in rows], device=device)
        policies = [layers_of_rows[rows[0]] for rows in members.values()]
        return cls(_mixed(policies, [len(rows) for rows in members.values()]), order, order.argsort())

    def forward(self, decoder: Decoder, tokens_N: Tensor, attention: Attention) -> Tensor:
        """Runs `Decoder.forward` for rows in their own order."""

        def reordered(layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
            return attention(layer, fused[self.place], qk_norm)[self.order]

        hidden = decoder.forward(self.layers, tokens_N[self.order], reordered)
        return hidden[self.place]


def _mixed(policies: Sequence[Layers], sizes: Sequence[int]) -> Layers:
    """Returns the layers of a batch whose first `sizes[0]` rows are of the first policy, and so on."""
    return [
        replace(
            same_layer[0],
            qkv=MixedMatrix([layer.qkv for layer in same_layer], sizes),
            out=MixedMatrix([layer.out for layer in same_layer], sizes),
            gate_up=MixedMatrix([layer.gate_up for layer in same_layer], sizes),
            down=MixedMatrix([layer.down for layer in same_layer], sizes),
        )
        for same_layer in zip(*policies, strict=True)
    ]
