"""Attention of new tokens: over their own prompt (prefill), over the cache (decode), or over both (a prompt
whose beginning is in the cache already).

decoder.py -> [attention] -> decoder.py, slots.py (keys and values of everything in flight), kv_reuse.py
                   |
                   v  one call for a band and layer of a decode step on a CPU:
                   cpu_kernels.py
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.cpu_kernels import kernels
from swarmnode.rollout.decode.decoder import Attention, Heads, shared_by_heads
from swarmnode.rollout.decode.slots import Band, rounded_up
from swarmnode.rollout.decode.weights import Shape

MASK_COLUMNS = 16
"""Number of which a GPU's fused attention wants a mask's columns to be a multiple."""

SCORES_AT_ONCE = 1 << 24
"""The most capped scores of prompts held at a time, in numbers: 64 MiB."""


class PromptAttention:
    """Causal attention within prompts, padded on the right to one width. Keeps their keys and values.

    Padding needs no mask: it comes after every token that could attend to it.
    """

    def __init__(self, heads: Heads, rotation_WE: Tensor, cache: Tensor, window: int | None = None) -> None:
        """Keys and values are written to `cache`, laid out as in the bands; `window` is as in `LayerKind`."""
        self._heads, self._rotation, self._cache = heads, rotation_WE, cache
        width = len(rotation_WE)
        self._mask = None if window is None or width <= window else _band_mask(width, window, cache.device)
        """Mask of the visible keys, [W, W]. None: all up to the token itself."""

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        keys, values = self._cache[2 * layer], self._cache[2 * layer + 1]
        if kernels().fits(fused):
            queries = kernels().split_heads(self._heads.layout, fused, qk_norm, self._rotation, keys, values)
        else:
            rotation = shared_by_heads(self._rotation)
            new_queries, new_keys, new_values = self._heads.split(fused, qk_norm, rotation)
            keys.copy_(new_keys.transpose(1, 2))
            values.copy_(new_values.transpose(1, 2))
            queries = new_queries.flatten(2, 3).transpose(1, 2).to(values.dtype)
        attended = _causal_attention(queries, keys, values, self._mask, self._heads.shape)
        return attended.transpose(1, 2).reshape(len(fused), -1)


class ContinuedAttention:
    """Causal attention of the last tokens of some sequences, whose earlier tokens have keys and values."""

    def __init__(
        self,
        heads: Heads,
        rotation_NE: Tensor,
        places: Sequence[tuple[Tensor, int]],
        window: int | None = None,
    ) -> None:
        """`places` holds, for each sequence, its cache, laid out as in a band of one row, and the number of
        its new tokens; `window` is as in `LayerKind`."""
        self._heads, self._rotation = heads, rotation_NE
        self._caches = [cache for cache, _ in places]
        self._counts = [count for _, count in places]
        self._first = [_first_seen(cache.shape[3] - count, window) for cache, count in places]
        self._masks = [
            _seen(cache.shape[3], count, first, window, rotation_NE.device)
            for (cache, count), first in zip(places, self._first, strict=True)
        ]

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        queries, keys, values = self._split(fused, qk_norm)
        shape = self._heads.shape
        attended = fused.new_empty(len(fused), shape.heads * shape.head_dim)
        pieces = zip(*(new.split(self._counts, 2) for new in (queries, keys, values)), strict=True)
        targets = attended.split(self._counts)
        rows = zip(pieces, self._caches, self._counts, self._first, self._masks, targets, strict=True)
        for (own_queries, own_keys, own_values), cache, count, first, mask, target in rows:
            tables = cache[2 * layer : 2 * layer + 2]
            tables[0, :, :, -count:].copy_(own_keys)
            tables[1, :, :, -count:].copy_(own_values)
            seen = tables[:, :, :, first:]
            found = _causal_attention(own_queries, seen[0], seen[1], mask, shape)
            target.view(count, shape.heads, shape.head_dim).copy_(found[0].transpose(0, 1))
        return attended

    def _split(self, fused: Tensor, qk_norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [1, H, N, E], keys and values [1, K, N, E] of all new tokens."""
        shape = self._heads.shape
        if kernels().fits(fused):
            keys, values = fused.new_empty(2, 1, shape.kv_heads, len(fused), shape.head_dim)
            layout = self._heads.layout
            return kernels().split_heads(layout, fused, qk_norm, self._rotation, keys, values), keys, values
        queries, keys, values = self._heads.split(fused, qk_norm, shared_by_heads(self._rotation))
        in_heads = queries.flatten(2, 3).transpose(1, 2).to(values.dtype)
        return in_heads, keys.transpose(1, 2), values.transpose(1, 2)


def _first_seen(before: int, window: int | None) -> int:
    """Returns the first column that any token after `before` others can see."""
    return 0 if window is None else max(0, before + 1 - window)


def _seen(columns: int, count: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Returns [count, columns - first]: True where one of the last `count` tokens sees a column from `first`
    on."""
    own = torch.arange(columns - count, columns, device=device)[:, None]
    column = torch.arange(first, columns, device=device)
    seen = column <= own
    return seen if window is None else seen & (column > own - window)


def _causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, shape: Shape
) -> Tensor:
    """Computes causal attention [P, H, W, E]. With a `mask` there may be fewer queries than keys."""
    if shape.score_cap is not None:
        return _capped_attention(queries, keys, values, mask, shape)
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=shape.score_scale,
        enable_gqa=shape.group > 1,
    )


def _capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, shape: Shape
) -> Tensor:
    """Computes `_causal_attention` with capped scores, a few queries at a time, because no fused kernel of
    torch can cap."""
    width = keys.shape[2]
    mask = torch.ones(width, width, dtype=torch.bool, device=keys.device).tril_() if mask is None else mask
    exact = keys.float().repeat_interleave(shape.group, 1).transpose(2, 3)
    own_values = values.repeat_interleave(shape.group, 1)
    pieces: list[Tensor] = []
    some = max(1, SCORES_AT_ONCE // (queries.shape[0] * shape.heads * width))
    for own_queries, own_mask in zip(queries.split(some, 2), mask.split(some), strict=True):
        scores = _capped(own_queries.float() @ exact * shape.scale, shape.score_cap)
        shares = scores.masked_fill_(~own_mask, float("-inf")).softmax(-1)
        pieces.append(shares.to(values.dtype) @ own_values)
    return torch.cat(pieces, 2)


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    """Returns cap tanh(score / cap), overwriting the scores."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _band_mask(width: int, window: int, device: torch.device) -> Tensor:
    """Returns [W, W]: True for the token itself and the earlier ones within `window`."""
    seen = torch.ones(width, width, dtype=torch.bool, device=device)
    return seen.tril_().triu_(1 - window)


class Scratch:
    """Reusable float32 memory: fresh memory costs several times as much as a conversion."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, device=device)

    def floats(self, table: Tensor) -> Tensor:
        """Returns `table` in float32: itself, or a copy that is valid until the next call."""
        if table.dtype == torch.float32:
            return table
        if table.numel() > self._memory.numel():
            self._memory = self._memory.new_empty(2 * table.numel())
        return self._memory[: table.numel()].view(table.shape).copy_(table)


def cache_attention(
    heads: Heads,
    bands: Sequence[Band],
    tick: int,
    positions: Tensor,
    rotation: Tensor,
    scratch: Scratch,
    window: int | None = None,
) -> Attention:
    """Returns attention of one new token for each sequence of some bands, which lie in the batch one band
    after another. `window` is as in `LayerKind`."""
    if all(kernels().fits(band.cache) for band in bands):
        return KernelAttention(heads, bands, positions, rotation, window)
    return CacheAttention(heads, bands, tick, positions, rotation, scratch, window)


class KernelAttention:
    """`cache_attention` by its C kernel."""

    def __init__(
        self,
        heads: Heads,
        bands: Sequence[Band],
        positions: Tensor,
        rotation: Tensor,
        window: int | None = None,
    ) -> None:
        self._sizes = [len(band.rows) for band in bands]
        self._parts = [
            kernels().cached_rows(heads.layout, band.cache, own_positions, own_rotation, window)
            for band, own_positions, own_rotation in zip(
                bands, positions.split(self._sizes), rotation.split(self._sizes), strict=True
            )
        ]
        self._width = heads.shape.heads * heads.shape.head_dim

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        attended = fused.new_empty(len(fused), self._width)
        if len(self._parts) == 1:
            self._parts[0].attend(layer, fused, qk_norm, attended)
            return attended
        pieces = zip(self._parts, fused.split(self._sizes), attended.split(self._sizes), strict=True)
        for part, own_fused, own_attended in pieces:
            part.attend(layer, own_fused, qk_norm, own_attended)
        return attended


class CacheAttention:
    """`cache_attention` by torch's operations."""

    def __init__(
        self,
        heads: Heads,
        bands: Sequence[Band],
        tick: int,
        positions: Tensor,
        rotation: Tensor,
        scratch: Scratch,
        window: int | None = None,
    ) -> None:
        self._heads, self._rotation = heads, shared_by_heads(rotation)
        self._sizes = [len(band.rows) for band in bands]
        self._parts = [
            BandAttention(heads.shape, band, band.longest(tick), own, scratch, window)
            for band, own in zip(bands, positions.split(self._sizes), strict=True)
        ]

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        heads = self._heads.split(fused, qk_norm, self._rotation)
        if len(self._parts) == 1:
            return self._parts[0](layer, *heads)
        pieces = zip(*(new.split(self._sizes, 1) for new in heads), strict=True)
        return torch.cat([part(layer, *own) for part, own in zip(self._parts, pieces, strict=True)])


class BandAttention:
    """Attention of one new token for each sequence of a band. Writes its key and value first."""

    def __init__(
        self,
        shape: Shape,
        band: Band,
        columns: int,
        positions: Tensor,
        scratch: Scratch,
        window: int | None = None,
    ) -> None:
        rows = len(band.rows)
        self._scale, self._cap = shape.scale, shape.score_cap
        self._scratch = scratch
        self._lines, self._newest = band.lines, band.lines_at(positions)
        dtype = band.cache.dtype
        # The fused kernel is made for many queries: on a CPU, two batched products in float32 take half the
        # time.
        can_fuse = positions.device.type != "cpu" and dtype != torch.float32
        self._fused = can_fuse and shape.score_cap is None
        if self._fused:
            # A mask of another width would be copied to a multiple in every layer.
            columns = min(rounded_up(columns, MASK_COLUMNS), band.width)
        tables = band.tables(columns)
        # Rows act as heads of the fused attention.
        self._tables = (tables.unsqueeze(1) if self._fused else tables).unbind(0)
        bias = _bias(positions, columns, window, dtype if self._fused else torch.float32)
        # One row of bias per key head, broadcast over the queries that share it.
        self._bias = bias[:, None, None].expand(-1, shape.kv_heads, -1, -1).flatten(0, 1)
        self._queries = (rows * shape.kv_heads, shape.group, shape.head_dim)
        if self._fused:
            self._bias, self._queries = self._bias[None], (1, *self._queries)
        self._attended = (rows, shape.heads * shape.head_dim)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._write(2 * layer, keys)
        self._write(2 * layer + 1, values)
        keys, values = self._tables[2 * layer], self._tables[2 * layer + 1]
        queries = queries.reshape(self._queries)
        if self._fused:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=self._bias, scale=self._scale
            )
        else:
            attended = self._two_products(queries, keys, values)
        return attended.view(self._attended)

    def _two_products(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys = self._scratch.floats(keys).transpose(1, 2)
        if self._cap is None:
            scores = torch.baddbmm(self._bias, queries.float(), keys, alpha=self._scale)
        else:
            scores = _capped(torch.bmm(queries.float(), keys) * self._scale, self._cap).add_(self._bias)
        # Values overwrite keys in the scratch memory: the scores are done.
        return torch.bmm(scores.softmax(-1), self._scratch.floats(values)).to(values.dtype)

    def _write(self, table: int, new: Tensor) -> None:
        lines = self._lines[table]
        new = new if new.dtype is lines.dtype else new.to(lines.dtype)
        lines.index_copy_(0, self._newest, new.reshape(-1, new.shape[-1]))


def _bias(positions: Tensor, columns: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Returns [rows, columns]: 0 up to the position of each row and within the window, otherwise -inf."""
    column, own = torch.arange(columns, device=positions.device), positions[:, None]
    bias = torch.zeros(len(positions), columns, dtype=dtype, device=positions.device)
    bias.masked_fill_(column > own, float("-inf"))
    return bias if window is None else bias.masked_fill_(column <= own - window, float("-inf"))
