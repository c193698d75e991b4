"""LoRA on a CPU inside vLLM: one dense product per adapter in the batch, and none for rows without one.

compat.py installs it -> vLLM's linear layers -> [lora] -> base output + scaling * B @ A @ x

vLLM makes one object of this class per engine. Whenever the batch changes, it tells the object which adapter
slot each token uses (-1: none).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

ALL_ROWS = None


class GroupedLora(PunicaWrapperCPU):
    """Adds each adapter's output to the rows that use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: list[tuple[int, Tensor | None]] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        # Computed here instead of in each layer, because it is the same for all layers.
        self._groups = rows_by_slot(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Stacks are [slots, 1, rank, in] and [slots, 1, out, rank], one pair per slice of `y`."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._groups:
            chosen = x if rows is None else x[rows]
            start = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                narrow = linear(chosen, a[slot, 0])
                part = y[:, start : start + width]
                if rows is None:
                    part.addmm_(narrow, b[slot, 0].T, alpha=scale)
                else:
                    part.index_add_(0, rows, linear(narrow, b[slot, 0]), alpha=scale)
                start += width


def rows_by_slot(slots: Tensor) -> list[tuple[int, Tensor | None]]:
    """Returns the adapter slots in use, with the tokens that use each; `ALL_ROWS` if there is only one slot.

    >>> rows_by_slot(torch.tensor([2, -1, 2]))
    [(2, tensor([0, 2]))]
    """
    present = torch.unique(slots).tolist()
    if len(present) == 1 and present[0] >= 0:
        return [(present[0], ALL_ROWS)]
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in present if slot >= 0]
