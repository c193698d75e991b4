"""Attention inside the sequences of a packed row by the C kernel: nothing is padded, gathered or kept.

attention -> layout.py (what lies where) -> [kernel_attention] -> native/packed_attention.py

Shapes: T tokens, H query heads, G key heads, E head size.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarmnode.model.layout import PackedLayout
from swarmnode.native.packed_attention import packed_attention, packed_attention_gradient
from swarmnode.native.tensors import fits

MOST_KEYS = 768
"""Keys of the longest sequence that our kernel takes. Forward and backward in float32 take 0.7 of torch's
time from 128 to 512 keys, as long at 1024, and longer beyond: torch's kernel is made for those."""


def kernel_suits(query_THE: Tensor, value_TGE: Tensor, layout: PackedLayout, dropout: float) -> bool:
    """Whether a row can be computed here, and sooner than by torch."""
    return (
        layout.longest_sequence <= MOST_KEYS
        and value_TGE.shape[2] == query_THE.shape[2]
        and dropout == 0
        and not torch.is_autocast_enabled("cpu")
        and fits(query_THE)
    )


def by_kernel(
    query_THE: Tensor,
    key_TGE: Tensor,
    value_TGE: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Causal attention inside each sequence, and inside the window; [T, H, E]."""
    scale = query_THE.shape[-1] ** -0.5 if scale is None else scale
    return cast(Tensor, _Attention.apply(query_THE, key_TGE, value_TGE, layout, window, scale))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THE: Tensor,
        key_TGE: Tensor,
        value_TGE: Tensor,
        layout: PackedLayout,
        window: int | None,
        scale: float,
    ) -> Tensor:
        ctx.layout, ctx.window, ctx.scale = layout, window, scale
        out_THE, sums_TH = packed_attention(query_THE, key_TGE, value_TGE, layout.sequences, window, scale)
        ctx.save_for_backward(query_THE, key_TGE, value_TGE, out_THE, sums_TH)
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THE: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query_THE, key_TGE, value_TGE, out_THE, sums_TH = ctx.saved_tensors
        gradients = packed_attention_gradient(
            dout_THE, query_THE, key_TGE, value_TGE, out_THE, sums_TH,
            ctx.layout.sequences, ctx.window, ctx.scale,
        )  # fmt: skip
        return *gradients, None, None, None
