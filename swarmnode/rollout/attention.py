"""Attention of new tokens: over their own prompt (prefill), or over the cache (decode).

decoder.py -> [attention] -> slots.py (keys and values of everything in flight)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.rollout.slots import Slots, cache_size
from swarmnode.rollout.weights import Shape


class PromptAttention:
    """Causal attention within prompts, padded on the left to one width. Keeps their keys and values."""

    def __init__(
        self, shape: Shape, lengths: list[int], width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._prompts, self._width, self._shape = len(lengths), width, shape
        self._bias = None
        if min(lengths) < width:
            self._bias = _left_padded_bias(torch.tensor(lengths, device=device), width).to(dtype)
        self.cache = torch.empty(cache_size(shape, len(lengths), width), dtype=dtype, device=device)
        """Keys and values, laid out as in the slots."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = (self._prompts, self._width, -1, self._shape.head_dim)
        cached_keys, cached_values = self.cache[2 * layer], self.cache[2 * layer + 1]
        cached_keys.copy_(keys.view(batch).transpose(1, 2))
        cached_values.copy_(values.view(batch).transpose(1, 2))
        attended = F.scaled_dot_product_attention(
            queries.reshape(batch).transpose(1, 2),
            cached_keys,
            cached_values,
            attn_mask=self._bias,
            is_causal=self._bias is None,
            enable_gqa=self._shape.group > 1,
        )
        return attended.transpose(1, 2).reshape(self._prompts * self._width, -1)


class CacheAttention:
    """One new token per row of the slots over that row's window. Writes the token's key and value first."""

    def __init__(self, shape: Shape, slots: Slots) -> None:
        self._scale = shape.head_dim**-0.5
        self._newest = slots.newest()
        self._window, bias = slots.window()
        # One row of bias per key head, broadcast over the queries that share it.
        self._bias = bias[:, None, None].expand(-1, shape.kv_heads, -1, -1).flatten(0, 1)
        self._queries = (slots.rows * shape.kv_heads, shape.group, shape.head_dim)
        self._attended = (slots.rows, shape.heads * shape.head_dim)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._newest[2 * layer].copy_(keys)
        self._newest[2 * layer + 1].copy_(values)
        keys, values = self._window[2 * layer], self._window[2 * layer + 1]
        queries = queries.view(self._queries)
        if queries.dtype == torch.float32:
            # Two batched products beat the fused kernel two to one on a CPU: it is made for many queries.
            scores = torch.baddbmm(self._bias, queries, keys.transpose(1, 2), alpha=self._scale)
            attended = torch.bmm(scores.softmax(-1), values)
        else:
            # Not in bfloat16, where the scores would be rounded in between. Rows act as heads.
            attended = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=self._bias[None]
            )
        return attended.view(self._attended)


def _left_padded_bias(lengths: Tensor, width: int) -> Tensor:
    """[P, 1, width, width]: 0 where a query may look, else -inf. Padding looks at itself, or it is NaN."""
    column = torch.arange(width, device=lengths.device)
    causal = column[None, :] <= column[:, None]
    real = column >= width - lengths[:, None]
    visible = (causal & real[:, None, :]) | torch.eye(width, dtype=torch.bool, device=lengths.device)
    bias = torch.zeros(visible.shape, device=lengths.device).masked_fill_(~visible, float("-inf"))
    return bias[:, None]
