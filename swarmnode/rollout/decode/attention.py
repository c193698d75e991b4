"""Attention of new tokens: over their own prompt (prefill), or over the cache (decode).

decoder.py -> [attention] -> heads.py, bands.py (keys and values of everything in flight)
                   |
                   v  one call for a band and layer of a decode step on a CPU: native/decode.py
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.native.decode import CachedRows, split_heads
from swarmnode.native.tensors import fits
from swarmnode.rollout.decode.bands import Band, cache_size, rounded_up
from swarmnode.rollout.decode.decoder import Attention
from swarmnode.rollout.decode.heads import Heads
from swarmnode.rollout.decode.matrix import native_on_cpu
from swarmnode.rollout.decode.weights import Shape


class PromptAttention:
    """Causal attention within prompts, padded on the right to one width. Keeps their keys and values.

    No mask is needed: padding comes after every token that could look at it.
    """

    def __init__(self, heads: Heads, rotation_WE: Tensor, prompts: int, dtype: torch.dtype) -> None:
        self._heads, self._rotation = heads, rotation_WE
        size = cache_size(heads.shape, prompts, len(rotation_WE))
        self.cache = torch.empty(size, dtype=dtype, device=rotation_WE.device)
        """Keys and values, laid out as in the bands."""

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        keys, values = self.cache[2 * layer], self.cache[2 * layer + 1]
        if fits(fused):
            queries = split_heads(self._heads.layout, fused, qk_norm, self._rotation, keys, values)
        else:
            new_queries, new_keys, new_values = self._heads.split(fused, qk_norm, self._rotation)
            keys.copy_(new_keys.transpose(1, 2))
            values.copy_(new_values.transpose(1, 2))
            queries = new_queries.flatten(2, 3).transpose(1, 2).to(values.dtype)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=self._heads.shape.group > 1
        )
        return attended.transpose(1, 2).reshape(len(fused), -1)


class Scratch:
    """Float32 memory that is used again and again: fresh memory is several times as dear as a conversion."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, device=device)

    def floats(self, table: Tensor) -> Tensor:
        """`table` in float32: itself, or a copy that is good until the next call."""
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
) -> Attention:
    """One new token for each sequence of some bands, which lie in the batch one band after another."""
    if all(fits(band.cache) for band in bands):
        return KernelAttention(heads, bands, positions, rotation)
    return CacheAttention(heads, bands, tick, positions, rotation, scratch)


class KernelAttention:
    """`cache_attention` by the kernel for it."""

    def __init__(self, heads: Heads, bands: Sequence[Band], positions: Tensor, rotation: Tensor) -> None:
        self._sizes = [len(band.rows) for band in bands]
        self._parts = [
            CachedRows(heads.layout, band.cache, *own)
            for band, *own in zip(
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
    ) -> None:
        self._heads, self._rotation = heads, rotation
        self._sizes = [len(band.rows) for band in bands]
        self._parts = [
            BandAttention(heads.shape, band, band.longest(tick), own, scratch)
            for band, own in zip(bands, positions.split(self._sizes), strict=True)
        ]

    def __call__(self, layer: int, fused: Tensor, qk_norm: Tensor | None) -> Tensor:
        queries, keys, values = (new[0] for new in self._heads.split(fused, qk_norm, self._rotation))
        if len(self._parts) == 1:
            return self._parts[0](layer, queries, keys, values)
        pieces = zip(*(new.split(self._sizes) for new in (queries, keys, values)), strict=True)
        return torch.cat([part(layer, *own) for part, own in zip(self._parts, pieces, strict=True)])


class BandAttention:
    """One new token for each sequence of a band. Writes its key and value first."""

    def __init__(self, shape: Shape, band: Band, columns: int, positions: Tensor, scratch: Scratch) -> None:
        rows = len(band.rows)
        self._scale = shape.head_dim**-0.5
        self._scratch = scratch
        self._lines, self._newest = band.lines, band.lines_at(positions)
        self._tables = band.tables(columns)
        dtype = self._tables[0].dtype
        # The fused kernel is made for many queries: on a CPU two batched products take half the time. Keys
        # are converted for it, because a product in bfloat16 would round the scores. Values are not: their
        # sum is rounded anyway, and fused kernels round the shares of it as well.
        self._fused = positions.device.type != "cpu" and dtype != torch.float32
        self._native = native_on_cpu(dtype)
        # A product in bfloat16 is compiled for its sizes the first time, which costs as much as ten of them.
        # Few sizes occur when they are rounded up: what is beyond the sequences has no share.
        self._shares: Tensor | None = None
        if self._native and not self._fused and dtype != torch.float32:
            self._padded = band.tables(rounded_up(columns, 8), rounded_up(rows))
            padded = self._padded[0].shape
            self._shares = self._padded[0].new_zeros(padded[0], shape.group, padded[1])
            self._own_shares = self._shares[: rows * shape.kv_heads, :, :columns]
        bias = _bias(positions, columns, dtype if self._fused else torch.float32)
        # One row of bias per key head, broadcast over the queries that share it.
        self._bias = bias[:, None, None].expand(-1, shape.kv_heads, -1, -1).flatten(0, 1)
        self._queries = (rows * shape.kv_heads, shape.group, shape.head_dim)
        self._attended = (rows, shape.heads * shape.head_dim)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._write(2 * layer, keys)
        self._write(2 * layer + 1, values)
        keys, values = self._tables[2 * layer], self._tables[2 * layer + 1]
        queries = queries.reshape(self._queries)
        if self._fused:
            # Rows act as heads.
            attended = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=self._bias[None]
            )
        else:
            attended = self._two_products(layer, queries, keys, values)
        return attended.view(self._attended)

    def _two_products(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys = self._scratch.floats(keys).transpose(1, 2)
        shares = torch.baddbmm(self._bias, queries.float(), keys, alpha=self._scale).softmax(-1)
        if self._shares is None:
            # Values follow keys in the scratch memory: the scores are done.
            return torch.bmm(shares, self._scratch.floats(values)).to(values.dtype)
        self._own_shares.copy_(shares)
        return torch.bmm(self._shares, self._padded[2 * layer + 1])[: len(queries)]

    def _write(self, table: int, new: Tensor) -> None:
        lines = self._lines[table]
        lines.index_copy_(0, self._newest, new.to(lines.dtype).reshape(-1, new.shape[-1]))


def _bias(positions: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns]: 0 up to the position of each row, else -inf."""
    column = torch.arange(columns, device=positions.device)
    bias = torch.zeros(len(positions), columns, dtype=dtype, device=positions.device)
    return bias.masked_fill_(column > positions[:, None], float("-inf"))
