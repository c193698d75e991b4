"""Block-diagonal attention: many sequences in one row of tokens, none of which sees another.

packing -> layout.py (what lies where) -> [attention] -> training/forward.py
                                              |
                                     cpu_kernels.py, or torch

Every layer except attention treats tokens one by one, so a packed row needs no padding there, and a prompt
that several completions share appears only once. For attention the sequences are separated: on a GPU by the
variable-length flash kernel, elsewhere into a few boxes, each with sequences of similar length, padded on the
right, for one call of SDPA. Under causal attention no real token sees such a pad, and no [T, T] mask is ever
built. With a C compiler, short sequences need neither boxes nor pads: a kernel (cpu_kernels.py) takes them as
they lie.

For a shared prompt, only keys and values are repeated, once per completion. Its queries are computed once:
what they see does not depend on the completion. Packing bounds the repeats (`packing.MOST_KEYS_PER_TOKEN`),
so nothing needs to be split into chunks or recomputed here.

The function is registered with transformers under our own name and set once on a model. It gets a
`PackedLayout` through the forward's keywords; without one it is transformers' own SDPA, so the same model
object generates, evaluates and trains, in several threads at once.

Shapes: T tokens, H query heads, G key heads, D or E head size, P slots of tokens in boxes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from swarmnode.cpu_kernels import kernels
from swarmnode.errors import ModelError
from swarmnode.model.layout import PackedLayout, TokenSlots
from swarmnode.model.layout import packed_layout as packed_layout

PACKED_ATTENTION = "swarmnode_packed"
"""Name under which transformers knows our function. Never saved: saved configs omit the attention."""

REPLACED = "sdpa"
"""The implementation that ours equals without packing."""


def packed_attention(
    plain: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    windows_seen: set[int | None] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers calls it: [B, H, T, D] in, [B, T, H, D] out.

    `plain` takes every call without a layout. With one, B is 1 and causal attention stays inside each
    sequence, and inside the layer's window if it has one. Raises ModelError for anything it does not compute;
    transformers' SDPA would silently ignore a cap of the scores.
    """
    if others.get("softcap") is not None:
        raise ModelError("packed attention caps no scores, and neither does what it stands in for")
    if packed_layout is None:
        return plain(
            module, query, key, value, attention_mask,
            scaling=scaling, sliding_window=sliding_window, **others,
        )  # fmt: skip
    if others.get("position_bias") is not None or others.get("is_causal") is False or others.get("dropout"):
        raise ModelError("packed attention is causal and knows no position bias and no dropout")
    if query.shape[2] != key.shape[2] or query.shape[2] != packed_layout.position_ids_1T.shape[1]:
        raise ModelError("packed attention needs the queries and keys of one whole packed row, and no cache")
    if windows_seen is not None:
        windows_seen.add(sliding_window)
    query_THD, key_TGD, value_TGD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    settings = AttentionSettings(scaling, sliding_window, grouped=query.shape[1] != key.shape[1])
    suits = query.is_cuda and flash_suits(
        torch.cuda.get_device_capability(query.device), query.dtype, query.shape[-1], value.shape[-1]
    )
    attend = by_flash if suits else by_boxes
    return attend(query_THD, key_TGD, value_TGD, packed_layout, settings)[None], None


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """The settings of a layer's attention."""

    scaling: float | None
    window: int | None
    grouped: bool
    """True if several query heads share one key head."""


def flash_suits(capability: tuple[int, int], dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Returns True if torch's variable-length flash kernel takes such tensors on such an NVIDIA card."""
    return (
        torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and capability >= (8, 0)
        and dtype in (torch.float16, torch.bfloat16)
        and key_dim == value_dim <= 256
        and key_dim % 8 == 0
    )


def by_flash(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    layout: PackedLayout,
    settings: AttentionSettings,
    kernel: Callable[..., Any] = varlen_attn,
) -> Tensor:
    """Computes attention of H query heads over G key heads by torch's variable-length kernel, [T, H, D].

    If a sequence has more keys than queries, the kernel's causal mask lets the last query see the last key
    (as FlashAttention does since version 2.1): the queries are the sequence's last.
    """
    if layout.keys is not None:
        key_TGD, value_TGD = (_TokensToSlots.apply(tensor, layout.keys) for tensor in (key_TGD, value_TGD))
    # The kernel counts the keys left of the query; transformers also counts the query's own.
    left = -1 if settings.window is None else settings.window - 1
    return kernel(
        query_THD.contiguous(), key_TGD.contiguous(), value_TGD.contiguous(),
        layout.query_ends, layout.key_ends, max(layout.lengths), layout.longest_sequence,
        scale=settings.scaling, window_size=(left, 0), enable_gqa=settings.grouped,
    )  # fmt: skip


def by_boxes(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, layout: PackedLayout, settings: AttentionSettings
) -> Tensor:
    """Computes attention as `by_flash` does, on any device and for any dtype: by the C kernel if all
    sequences are short, otherwise box by box by torch's SDPA."""
    if kernel_suits(query_THD, value_TGD, layout):
        scale = query_THD.shape[-1] ** -0.5 if settings.scaling is None else settings.scaling
        return by_kernel(query_THD, key_TGD, value_TGD, layout, settings.window, scale)
    boxed = layout.boxed
    queries = _TokensToSlots.apply(query_THD, boxed.queries).split([b.rows * b.queries for b in boxed.boxes])
    keys, values = (
        _TokensToSlots.apply(tensor, boxed.keys).split([b.rows * b.keys for b in boxed.boxes])
        for tensor in (key_TGD, value_TGD)
    )
    found = [
        _one_box(number, layout, settings, *tensors)
        for number, tensors in enumerate(zip(queries, keys, values, strict=True))
    ]
    return _SlotsToTokens.apply(torch.cat(found) if len(found) > 1 else found[0], boxed.queries)


def _one_box(
    number: int,
    layout: PackedLayout,
    settings: AttentionSettings,
    query_PHD: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
) -> Tensor:
    query, key, value = (
        tensor.unflatten(0, (layout.boxed.boxes[number].rows, -1)).transpose(1, 2)
        for tensor in (query_PHD, key_PGD, value_PGD)
    )
    dtype = query.dtype
    if query.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        # torch's CPU kernel takes 1.5 to 20 times as long for a backward pass in half precision as in single.
        query, key, value = query.float(), key.float(), value.float()
    mask = layout.mask(number, settings.window, query.dtype)
    found_RHQD = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=settings.scaling,
        enable_gqa=settings.grouped,
    )
    return found_RHQD.transpose(1, 2).flatten(0, 1).to(dtype)


class _TokensToSlots(torch.autograd.Function):
    """[T, ...] -> [P, ...]. Pads get exactly zero gradient: nobody reads their queries, and no real query
    sees their keys. So the backward pass is a plain gather, where indexing would add up; only the gradients
    of shared tokens are added, slot by slot in a fixed order (on a CPU)."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, slots: TokenSlots) -> Tensor:
        ctx.slots = slots
        return values_T.index_select(0, slots.token_of_slot_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_P: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots: TokenSlots = ctx.slots
        gradient_T = gradient_P.index_select(0, slots.slot_of_token_T)
        if slots.again is not None:
            again, tokens = slots.again
            gradient_T.index_add_(0, tokens, gradient_P.index_select(0, again))
        return gradient_T, None


class _SlotsToTokens(torch.autograd.Function):
    """[P, ...] -> [T, ...], for slots that no two tokens share: values computed for the pads are dropped."""

    @staticmethod
    def forward(ctx: Any, values_P: Tensor, slots: TokenSlots) -> Tensor:
        ctx.slots = slots
        return values_P.index_select(0, slots.slot_of_token_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots: TokenSlots = ctx.slots
        gradient_P = gradient_T.new_zeros(len(slots.token_of_slot_P), *gradient_T.shape[1:])
        return gradient_P.index_copy_(0, slots.slot_of_token_T, gradient_T), None


# ---- by the C kernel ----

MOST_KEYS = 768
"""The most keys of a sequence that our kernel takes. Forward and backward in float32 take 0.7 of torch's time
from 128 to 512 keys, the same at 1024, and more beyond: torch's kernel is made for those. In bfloat16, which
both multiply in float32, it is half."""


def kernel_suits(query_THE: Tensor, value_TGE: Tensor, layout: PackedLayout) -> bool:
    """Returns True if the kernel can compute a row, and does so faster than torch."""
    return (
        layout.longest_sequence <= MOST_KEYS
        and value_TGE.shape[2] == query_THE.shape[2]
        and kernels().fits(query_THE)
    )


def by_kernel(
    query_THE: Tensor,
    key_TGE: Tensor,
    value_TGE: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float,
) -> Tensor:
    """Computes causal attention inside each sequence of the layout, [T, H, E]."""
    return cast(Tensor, _ByKernel.apply(query_THE, key_TGE, value_TGE, layout.sequences, window, scale))


class _ByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, *row: Any) -> Tensor:
        ctx.row = row
        out_THE, sums_TH = kernels().packed_attention(query_THE, key_TGE, value_TGE, *row)
        ctx.save_for_backward(query_THE, key_TGE, value_TGE, out_THE, sums_TH)
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THE: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query_THE, key_TGE, value_TGE, out_THE, sums_TH = ctx.saved_tensors
        gradients = kernels().packed_attention_gradient(
            dout_THE, query_THE, key_TGE, value_TGE, out_THE, sums_TH, *ctx.row
        )
        return *gradients, None, None, None
