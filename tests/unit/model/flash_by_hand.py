"""Packed attention as it is defined: the reference of the tests of all ways to compute it."""

from itertools import pairwise

import torch
from torch import Tensor


def flash_by_hand(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, starts_k: Tensor, longest: int, longest_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What torch's documentation says that its kernel computes, sequence by sequence; with fewer queries than
    keys, what FlashAttention's says: the last query stands at the last key."""
    assert starts.dtype == starts_k.dtype == torch.int32 and window_size[1] == 0
    assert longest == starts.diff().max() and longest_k == starts_k.diff().max()
    assert starts[-1] == len(query) and starts_k[-1] == len(key) == len(value)
    group = query.shape[1] // key.shape[1]
    assert enable_gqa == (group > 1)
    out: list[Tensor] = []
    for (start, end), (start_k, end_k) in zip(
        pairwise(starts.tolist()), pairwise(starts_k.tolist()), strict=True
    ):
        at = torch.arange(end_k - start_k)
        distance = at[len(at) - (end - start) :, None] - at
        left = len(at) if window_size[0] == -1 else window_size[0]
        hidden = (distance < 0) | (distance > left)
        heads: list[Tensor] = []
        for head in range(query.shape[1]):
            scores = query[start:end, head] @ key[start_k:end_k, head // group].T * scale
            heads.append(
                scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[start_k:end_k, head // group]
            )
        out.append(torch.stack(heads, dim=1))
    return torch.cat(out)
