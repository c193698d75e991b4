"""Attention of new tokens: over their own prompt (prefill), or over the cache (decode).

decoder.py -> [attention] -> bands.py (keys and values of everything in flight)
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.rollout.decode.bands import Band, cache_size, rounded_up
from swarmnode.rollout.decode.matrix import native_on_cpu
from swarmnode.rollout.decode.weights import Shape


class PromptAttention:
    """Causal attention within prompts, padded on the right to one width. Keeps their keys and values.

    No mask is needed: padding comes after every token that could look at it.
    """

    def __init__(
        self, shape: Shape, prompts: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._prompts, self._width, self._shape = prompts, width, shape
        self.cache = torch.empty(cache_size(shape, prompts, width), dtype=dtype, device=device)
        """Keys and values, laid out as in the bands."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = (self._prompts, self._width, -1, self._shape.head_dim)
        cached_keys, cached_values = self.cache[2 * layer], self.cache[2 * layer + 1]
        cached_keys.copy_(keys.view(batch).transpose(1, 2))
        cached_values.copy_(values.view(batch).transpose(1, 2))
        attended = F.scaled_dot_product_attention(
            queries.reshape(batch).transpose(1, 2).to(values.dtype),
            cached_keys,
            cached_values,
            is_causal=True,
            enable_gqa=self._shape.group > 1,
        )
        return attended.transpose(1, 2).reshape(self._prompts * self._width, -1)


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


class CacheAttention:
    """One new token for each sequence of some bands, which lie in the batch one band after another."""

    def __init__(
        self, shape: Shape, bands: Sequence[Band], tick: int, positions: Tensor, scratch: Scratch
    ) -> None:
        self._sizes = [len(band.rows) for band in bands]
        self._parts = [
            BandAttention(shape, band, band.longest(tick), own, scratch)
            for band, own in zip(bands, positions.split(self._sizes), strict=True)
        ]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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
