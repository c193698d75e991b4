"""Attention inside the sequences of a packed row, on tensors.

tensors.py -> [packed_attention] <- model/kernel_attention.py

Shapes: T tokens, H query heads, G key heads, E head size, R runs, S key slots (`PackedLayout`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.native.tensors import expect, expect_rows, kernel

WIDTH, QUERIES = 32, 4
"""Block sizes, the same as in kernels/blocks.h."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which tokens ask, and which they see."""

    query_ends: Tensor
    """0 and the running sum of the runs' lengths, int64 [R + 1]."""
    key_ends: Tensor
    """The same of the whole sequences, whose last tokens are the run's."""
    key_tokens: Tensor
    """The tokens of all sequences, one after the other, int64 [S]."""
    longest: int
    """Tokens of the longest sequence."""
    tokens: int
    """T"""

    def __post_init__(self) -> None:
        """Raise ValueError for what leads a kernel out of T tokens. Checked once for all layers."""
        queries, keys = self.query_ends.diff(), self.key_ends.diff()
        runs = len(queries)
        expect(self.query_ends, (runs + 1,), torch.int64)
        expect(self.key_ends, (runs + 1,), torch.int64)
        expect(self.key_tokens, (int(self.key_ends[-1]),), torch.int64)
        inside = not len(self.key_tokens) or (
            int(self.key_tokens.min()) >= 0 and int(self.key_tokens.max()) < self.tokens
        )
        if (
            not inside
            or int(self.query_ends[0]) != 0
            or int(self.key_ends[0]) != 0
            or int(self.query_ends[-1]) != self.tokens
            or bool((queries < 0).any())
            or bool((keys < queries).any())
            or (runs and int(keys.max()) > self.longest)
        ):
            raise ValueError(f"these sequences are not in a row of {self.tokens} tokens")


def packed_attention(
    query_THE: Tensor,
    key_TGE: Tensor,
    value_TGE: Tensor,
    sequences: Sequences,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """[T, H, E], and the logarithms of the sums that the gradient needs, [T, H] in float32."""
    query_THE, key_TGE, value_TGE = map(_by_token, (query_THE, key_TGE, value_TGE))
    tokens, all_heads, size = query_THE.shape
    groups = key_TGE.shape[1]
    _check(query_THE, key_TGE, value_TGE, sequences)
    out_THE = query_THE.new_empty(query_THE.shape)
    sums_TH = query_THE.new_empty(tokens, all_heads, dtype=torch.float32)
    scratch = _scratch(sequences.longest, size, blocks=1, tables=2)
    kernel("packed_attention", query_THE.dtype)(
        *_by_stride(query_THE, key_TGE, value_TGE),
        *_addresses(sequences), window or 0, scale,
        out_THE.data_ptr(), sums_TH.data_ptr(), scratch.data_ptr(),
        len(sequences.query_ends) - 1, groups, all_heads // groups, size, sequences.longest,
    )  # fmt: skip
    return out_THE, sums_TH


def packed_attention_gradient(
    dout_THE: Tensor,
    query_THE: Tensor,
    key_TGE: Tensor,
    value_TGE: Tensor,
    out_THE: Tensor,
    sums_TH: Tensor,
    sequences: Sequences,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, in their type."""
    query_THE, key_TGE, value_TGE = map(_by_token, (query_THE, key_TGE, value_TGE))
    all_heads, size = query_THE.shape[1:]
    groups = key_TGE.shape[1]
    _check(query_THE, key_TGE, value_TGE, sequences)
    dout_THE = dout_THE.contiguous()
    for tensor in (dout_THE, out_THE):
        expect(tensor, tuple(query_THE.shape), query_THE.dtype)
    expect(sums_TH, tuple(query_THE.shape[:2]), torch.float32)
    dquery_THE = query_THE.new_empty(query_THE.shape)
    dkey_TGE, dvalue_TGE = (key_TGE.new_zeros(key_TGE.shape, dtype=torch.float32) for _ in range(2))
    scratch = _scratch(sequences.longest, size, blocks=2, tables=5)
    kernel("packed_attention_gradient", query_THE.dtype)(
        dout_THE.data_ptr(),
        *_by_stride(query_THE, key_TGE, value_TGE),
        out_THE.data_ptr(), sums_TH.data_ptr(), *_addresses(sequences), window or 0, scale,
        dquery_THE.data_ptr(), dkey_TGE.data_ptr(), dvalue_TGE.data_ptr(), scratch.data_ptr(),
        len(sequences.query_ends) - 1, groups, all_heads // groups, size, sequences.longest,
    )  # fmt: skip
    return dquery_THE, dkey_TGE.to(key_TGE.dtype), dvalue_TGE.to(value_TGE.dtype)


def _check(query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, sequences: Sequences) -> None:
    tokens, all_heads, size = query_THE.shape
    groups = key_TGE.shape[1]
    if tokens != sequences.tokens or groups < 1 or all_heads % groups:
        raise ValueError(f"{tokens} tokens, {all_heads} and {groups} heads for {sequences.tokens} tokens")
    expect_rows(query_THE, (tokens, all_heads, size))
    for tensor in (key_TGE, value_TGE):
        expect_rows(tensor, (tokens, groups, size), query_THE.dtype)


def _by_token(tensor_THE: Tensor) -> Tensor:
    """The numbers of a token lie together."""
    size = tensor_THE.shape[2]
    return tensor_THE if tensor_THE.stride()[1:] == (size, 1) else tensor_THE.contiguous()


def _by_stride(*tensors: Tensor) -> list[int]:
    """Address and stride of each."""
    return [number for tensor in tensors for number in (tensor.data_ptr(), tensor.stride(0))]


def _scratch(keys: int, size: int, *, blocks: int, tables: int) -> Tensor:
    """Float32 memory: blocks of rows over the keys, three over a head, and tables of keys by head."""
    long, wide = -(-keys // WIDTH) * WIDTH, -(-size // WIDTH) * WIDTH
    return torch.empty(blocks * QUERIES * long + 3 * QUERIES * wide + tables * wide * long)


def _addresses(sequences: Sequences) -> tuple[int, int, int]:
    return sequences.query_ends.data_ptr(), sequences.key_ends.data_ptr(), sequences.key_tokens.data_ptr()
