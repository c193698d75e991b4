"""Attention inside boxes of short sequences, by batched products.

attention -> layout.py (what lies where) -> [box_attention]

torch's SDPA on a CPU is made for long sequences, and its backward pass is slow in half precision. Where
sequences are short their probabilities can be kept, and all of it is six products, one of them in float32:

    p = softmax(scale q k^T)       o = p v           dv = p^T do
    ds = p (dp - sum(p dp))        dp = do v^T       dq = scale ds k       dk = scale ds^T q

Scores and softmax are in float32 at least, p and ds in the type of the tokens. The query heads that share a
key head are further queries of one product. In bfloat16 the units of a CPU multiply; in float32 the C kernel
takes less time and keeps nothing, so there this is for machines that cannot compile it. Shapes: T tokens, H
query heads, G key heads, P slots of a token and key head (`PackedLayout.grouped`), X = H / G * E, B rows of a
box times G, Q queries times H / G, K keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarmnode.model.layout import PackedLayout, RowMask, TokenSlots

KEPT_BYTES = 512
"""Most bytes of probabilities for a token and head: 256 keys in bfloat16, 128 in float32. Of longer sequences
SDPA makes as much in the same time and keeps nothing. With the 16 heads of Qwen3-0.6B that is 8 KiB at most,
beside the 40 KiB that a layer keeps of a token anyway."""

CACHED_SCORES = 2**19
"""Scores that are worked on at a time: all passes but the first should find them in a cache."""


def suits(query_THE: Tensor, layout: PackedLayout, dropout: float) -> bool:
    """Returns True if a row is computed here: on a CPU, with short sequences, without dropout and
    autocast."""
    plain = query_THE.device.type == "cpu" and dropout == 0 and not torch.is_autocast_enabled("cpu")
    return plain and max(box.keys for box in layout.boxes) * query_THE.element_size() <= KEPT_BYTES


def by_products(query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, mask: RowMask) -> Tensor:
    """Attention as the mask says; [T, H, E]."""
    return cast(Tensor, _ShortBoxes.apply(query_THE, key_TGE, value_TGE, mask))


class _ShortBoxes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, mask: RowMask) -> Tensor:
        layout, ctx.groups = mask.layout, key_TGE.shape[1]
        ctx.layout, ctx.scale = layout, mask.scale
        slots, key_slots = layout.grouped(ctx.groups)
        query_PX = _of_groups(query_THE, ctx.groups).index_select(0, slots.token_of_slot_P)
        key_PE, value_PE = (
            _of_groups(tensor, ctx.groups).index_select(0, key_slots.token_of_slot_P)
            for tensor in (key_TGE, value_TGE)
        )
        heads = query_THE.shape[1] // ctx.groups
        found_PX = query_PX.new_empty(len(query_PX), heads * value_TGE.shape[2])
        kept: list[Tensor] = []
        for part in _parts(layout, ctx.groups, heads):
            value_BKE = part.of_keys(value_PE)
            query_BQE = part.of_queries(query_PX, query_THE.shape[2])
            scores_BQK = _scores(
                query_BQE, part.of_keys(key_PE), _mask(layout, part, mask.window, query_PX), mask.scale
            )
            kept.append(torch.softmax(scores_BQK, -1).to(value_BKE.dtype))
            torch.bmm(kept[-1], value_BKE, out=part.of_queries(found_PX, value_PE.shape[1]))
        ctx.save_for_backward(query_PX, key_PE, value_PE, *kept)
        return _to_tokens(found_PX, slots).view(*query_THE.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_THE: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query_PX, key_PE, value_PE, *kept = ctx.saved_tensors
        slots, key_slots = ctx.layout.grouped(ctx.groups)
        gradient_TX = _of_groups(gradient_THE, ctx.groups)
        gradient_PX = gradient_TX.new_zeros(len(query_PX), gradient_TX.shape[1])
        gradient_PX.index_copy_(0, slots.slot_of_token_T, gradient_TX)
        dquery_PX, dkey_PE, dvalue_PE = (torch.empty_like(tensor) for tensor in (query_PX, key_PE, value_PE))
        heads = query_PX.shape[1] // key_PE.shape[1]
        for part, p_BQK in zip(_parts(ctx.layout, ctx.groups, heads), kept, strict=True):
            query, dquery = (part.of_queries(tensor, key_PE.shape[1]) for tensor in (query_PX, dquery_PX))
            gradient = part.of_queries(gradient_PX, value_PE.shape[1])
            key, value, dkey, dvalue = (
                part.of_keys(tensor) for tensor in (key_PE, value_PE, dkey_PE, dvalue_PE)
            )
            torch.bmm(p_BQK.transpose(1, 2), gradient, out=dvalue)
            dp_BQK = torch.bmm(gradient, value.transpose(1, 2))
            ds_BQK = torch.ops.aten._softmax_backward_data(dp_BQK, p_BQK, -1, p_BQK.dtype).mul_(ctx.scale)
            torch.bmm(ds_BQK, key, out=dquery)
            torch.bmm(ds_BQK.transpose(1, 2), query, out=dkey)
        count = len(gradient_THE)
        return (
            _to_tokens(dquery_PX, slots).view(count, -1, key_PE.shape[1]),
            _to_tokens(dkey_PE, key_slots).view(count, ctx.groups, -1),
            _to_tokens(dvalue_PE, key_slots).view(count, ctx.groups, -1),
            None,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring rows of a box."""

    box: int
    rows: slice
    matrices: int
    """Number of matrices: one for each row and key head."""
    queries: slice
    """Slice of its queries among the P query slots."""
    keys: slice

    def of_queries(self, tensor_PX: Tensor, width: int) -> Tensor:
        """Returns its queries, [B, Q, width]."""
        return tensor_PX[self.queries].view(self.matrices, -1, width)

    def of_keys(self, tensor_PE: Tensor) -> Tensor:
        """Returns its keys, [B, K, E]."""
        return tensor_PE[self.keys].view(self.matrices, -1, tensor_PE.shape[1])


def _parts(layout: PackedLayout, groups: int, heads: int) -> Iterator[_Part]:
    """Returns all boxes in as few parts as keep their scores in the cache. `heads`: query heads of a key
    head."""
    query = key = 0
    for number, box in enumerate(layout.boxes):
        step = max(1, CACHED_SCORES // (groups * heads * box.queries * box.keys))
        for first in range(0, box.rows, step):
            rows = slice(first, min(first + step, box.rows))
            matrices = (rows.stop - rows.start) * groups
            next_query, next_key = query + matrices * box.queries, key + matrices * box.keys
            yield _Part(number, rows, matrices, slice(query, next_query), slice(key, next_key))
            query, key = next_query, next_key


def _scores(query_BQE: Tensor, key_BKE: Tensor, mask_RQK: Tensor, scale: float) -> Tensor:
    """Returns scale q k^T + mask, in the mask's type; its R rows are those of the part, or one for all."""
    exact = mask_RQK.dtype
    scores_BQK = torch.bmm(query_BQE.to(exact).mul(scale), key_BKE.to(exact).transpose(1, 2))
    rows, queries, keys = mask_RQK.shape
    by_row = scores_BQK.view(rows, -1, queries, query_BQE.shape[1] // queries, keys)
    by_row.add_(mask_RQK[:, None, :, None])
    return scores_BQK


def _mask(layout: PackedLayout, part: _Part, window: int | None, like: Tensor) -> Tensor:
    """Returns the mask [rows of the part or 1, queries, keys], in the type that scores are computed in."""
    exact = like.dtype if like.dtype is torch.float64 else torch.float32
    mask_RHQK = layout.mask(part.box, window, exact)
    if mask_RHQK is None:
        box = layout.boxes[part.box]
        hidden = torch.full((1, box.queries, box.keys), -torch.inf, dtype=exact, device=like.device)
        return hidden.triu_(1)
    return mask_RHQK[:, 0] if len(mask_RHQK) == 1 else mask_RHQK[part.rows, 0]


def _of_groups(tensor_THE: Tensor, groups: int) -> Tensor:
    """Returns [T * G, X]: each token's numbers for each key head."""
    return tensor_THE.reshape(len(tensor_THE) * groups, -1)


def _to_tokens(tensor_PX: Tensor, slots: TokenSlots) -> Tensor:
    """Returns the sum of each token's slots."""
    tensor_TX = tensor_PX.index_select(0, slots.slot_of_token_T)
    if slots.again is not None:
        again, tokens = slots.again
        tensor_TX.index_add_(0, tokens, tensor_PX.index_select(0, again))
    return tensor_TX
