"""The kernels of a decode step on tensors: heads of a fused product, attention over a cache, sampling.

passes.py -> [decode_kernels] -> native_record.py

Only for tensors that `fits`. Shapes: N rows, one token each; P prompts of W
tokens; K key heads with G queries each, of size E; V vocabulary.
"""

import torch
from torch import Tensor

from swarmnode.cpu_kernels import HeadLayout, Streams, expect
from swarmnode.extensions.native.passes import kernel

SCORES_TOGETHER = 16
"""Scores computed together: COLUMNS of kernels/attention.h."""


class CachedRows:
    """Sequences in a cache with one new token each: the `StepRows` of the kernel."""

    def __init__(
        self,
        heads: HeadLayout,
        cache: Tensor,
        positions_N: Tensor,
        rotation_NE: Tensor,
        window: int | None = None,
    ) -> None:
        """`cache` [2 * layers, places, K, columns, E]: a table of keys and one of values for each layer;
        row i is in place i, and its new token comes to column `positions[i]`. `rotation` has the cosine and
        sine of each pair of neighbours. With a `window` only so many of the last columns are read, the new
        one included."""
        self.count = len(positions_N)
        lowest, highest = (int(found) for found in positions_N.aminmax())
        expect(cache, (cache.shape[0], cache.shape[1], heads.kv_heads, cache.shape[3], heads.size))
        expect(positions_N, (self.count,), torch.int64)
        expect(rotation_NE, (self.count, heads.size), torch.float32)
        if lowest < 0 or highest >= cache.shape[3] or self.count > cache.shape[1] or heads.size % 2:
            raise ValueError(
                f"{self.count} rows at {lowest} to {highest} are not in a cache of {tuple(cache.shape)}"
            )
        if (window is not None and window < 1) or (heads.cap is not None and not heads.cap > 0):
            raise ValueError(f"nothing is seen through a window of {window} or under a cap of {heads.cap}")
        self._heads, self._cache, self._window = heads, cache, window or 0
        self._space = rotation_NE.new_empty(
            heads.size + heads.group * (heads.size + highest + SCORES_TOGETHER)
        )
        # Referred to: a kernel knows only where their memory is.
        self._kept = positions_N, rotation_NE
        self._table_bytes = cache.stride(0) * cache.element_size()
        self._kernel = kernel("attend", cache.dtype)

    def attend(self, layer: int, fused_ND: Tensor, scale: Tensor | None, attended_ND: Tensor) -> None:
        heads, cache = self._heads, self._cache
        expect(fused_ND, (self.count, heads.fused), cache.dtype)
        expect(attended_ND, (self.count, heads.kv_heads * heads.group * heads.size), cache.dtype)
        if not 0 <= 2 * layer < len(cache):
            raise ValueError(f"layer {layer} has no tables among {len(cache)}")
        keys = cache.data_ptr() + 2 * layer * self._table_bytes
        positions_N, rotation_NE = self._kept
        self._kernel(
            fused_ND.data_ptr(), _scale(scale, heads), heads.eps, rotation_NE.data_ptr(),
            positions_N.data_ptr(), keys, keys + self._table_bytes, attended_ND.data_ptr(),
            self._space.data_ptr(), self.count, heads.kv_heads, heads.group, cache.shape[3], heads.size,
            heads.scale, heads.cap or 0.0, self._window,
        )  # fmt: skip


def split_heads(
    heads: HeadLayout,
    fused_ND: Tensor,
    scale: Tensor | None,
    rotation_WE: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Returns queries [P, K * G, W, E] of whole prompts, whose tokens lie one after another; writes their
    keys and values to `keys` and `values` [P, K, W, E]."""
    prompts, _, width, _ = keys.shape
    expect(keys, (prompts, heads.kv_heads, width, heads.size), fused_ND.dtype)
    expect(values, tuple(keys.shape), fused_ND.dtype)
    expect(fused_ND, (prompts * width, heads.fused))
    expect(rotation_WE, (width, heads.size), torch.float32)
    queries = keys.new_empty(prompts, heads.kv_heads * heads.group, width, heads.size)
    space = rotation_WE.new_empty(heads.size)
    kernel("split_heads", fused_ND.dtype)(
        fused_ND.data_ptr(), _scale(scale, heads), heads.eps, rotation_WE.data_ptr(), queries.data_ptr(),
        keys.data_ptr(), values.data_ptr(), space.data_ptr(), prompts, heads.kv_heads, heads.group, width,
        heads.size,
    )  # fmt: skip
    return queries


def sample(
    logits_NV: Tensor, temperature_N: Tensor, greedy_N: Tensor, streams: Streams
) -> tuple[Tensor, Tensor]:
    """Returns tokens and their log-probabilities: the highest logit of a row with `greedy` not 0, else the
    winner of the race with the next noise of the row's stream."""
    rows, vocab = logits_NV.shape
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    words, offsets, windows = streams.words, streams.offsets, streams.windows
    for settings in (temperature_N, greedy_N):
        expect(settings, (rows,), torch.float32)
    expect(words, (2, words.shape[1]), torch.int32)
    expect(offsets[0], (rows,), torch.int64)
    expect(offsets[1], (rows,), torch.int64)
    if windows < 1 or windows & (windows - 1) or windows + vocab > words.shape[1] or vocab < 1:
        raise ValueError(f"there are no {windows} windows of {vocab} words in {tuple(words.shape)}")
    tokens, logprobs = offsets.new_empty(rows), temperature_N.new_empty(rows)
    first = words.data_ptr()
    kernel("sample", logits_NV.dtype)(
        logits_NV.data_ptr(), logits_NV.stride(0), temperature_N.data_ptr(), greedy_N.data_ptr(), first,
        first + words.stride(0) * words.element_size(), streams.unit, windows, offsets.data_ptr(),
        offsets.stride(0), *streams.steps, tokens.data_ptr(), logprobs.data_ptr(), rows, vocab,
    )  # fmt: skip
    return tokens, logprobs


def _scale(scale: Tensor | None, heads: HeadLayout) -> int | None:
    if scale is None:
        return None
    expect(scale, (heads.group + 1, heads.size), torch.float32)
    return scale.data_ptr()
