"""Each distinct prompt is computed once, in batches, and shared by all requests that wait with it.

embedded.py -> [prefill] -> decoder.py
                   |
                   v  keys, values and last hidden state -> slots.py

The samples of one GRPO group have one prompt, and rows become free one at a time. So when a prompt is needed,
those needed next are computed with it, up to `BATCH_TOKENS`; each is kept until its last request has started.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.rollout.attention import PromptAttention
from swarmnode.rollout.decoder import Decoder

BATCH_TOKENS = 2048
"""Tokens of one forward pass over prompts, with padding: enough to fill a processor, few enough to keep."""

PADDING = 16
"""Prompts of one batch differ in length by at most this."""

LONG_PROMPT = 512
"""From this length on only prompts of equal length share a batch: it needs no mask, which is quadratic."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts computed together, padded on the left to one width."""

    cache: Tensor
    """Their keys and values, laid out as in the slots."""
    hidden: Tensor
    """[prompts, hidden] of their last tokens."""


@dataclass(slots=True, eq=False)
class Prompt:
    """One distinct prompt among the waiting requests, and where its computed state is."""

    ids: tuple[int, ...]
    waiting: int = 0
    batch: PromptBatch | None = None
    place: int = 0
    """Its index in `batch`."""


class PromptStore:
    """The prompts of the waiting requests, in the order of their first request."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        self._decoder = decoder
        self._dtype = dtype
        self._device = device
        self._prompts: dict[tuple[int, ...], Prompt] = {}
        self._missing: dict[tuple[int, ...], Prompt] = {}

    def expect(self, ids: tuple[int, ...]) -> None:
        """One more request with this prompt waits."""
        if (prompt := self._prompts.get(ids)) is None:
            prompt = self._prompts[ids] = self._missing[ids] = Prompt(ids)
        prompt.waiting += 1

    def leave(self, ids: tuple[int, ...]) -> Prompt:
        """One request fewer waits with this prompt: it starts now, or was aborted."""
        prompt = self._prompts[ids]
        prompt.waiting -= 1
        if prompt.waiting == 0:
            del self._prompts[ids]
            self._missing.pop(ids, None)
        return prompt

    def compute(self, prompts: Iterable[Prompt]) -> None:
        """Make sure that these are computed; if one is not, compute some of those that come next as well."""
        needed = {prompt.ids: prompt for prompt in prompts if prompt.batch is None}
        if not needed:
            return
        tokens = sum(len(ids) for ids in needed)
        for ids, prompt in self._missing.items():
            if ids not in needed:
                tokens += len(ids)
                if tokens > BATCH_TOKENS:
                    break
                needed[ids] = prompt
        for batch in _batches(needed.values()):
            self._compute_batch(batch)
        for ids in needed:
            self._missing.pop(ids, None)

    def _compute_batch(self, prompts: Sequence[Prompt]) -> None:
        lengths = [len(prompt.ids) for prompt in prompts]
        width = max(lengths)
        padded = [(0,) * (width - len(prompt.ids)) + prompt.ids for prompt in prompts]
        tokens = torch.tensor(padded, device=self._device)
        starts = width - torch.tensor(lengths, device=self._device)
        positions = (torch.arange(width, device=self._device) - starts[:, None]).clamp_(min=0)
        shape = self._decoder.weights.shape
        attention = PromptAttention(shape, lengths, width, self._dtype, self._device)
        ends = torch.arange(1, len(prompts) + 1, device=self._device) * width - 1
        hidden = self._decoder.forward(tokens.flatten(), positions.flatten(), attention, wanted=ends)
        batch = PromptBatch(attention.cache, hidden)
        for place, prompt in enumerate(prompts):
            prompt.batch, prompt.place = batch, place


def _batches(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts of similar length together, longest first, each batch within `BATCH_TOKENS` (or one prompt)."""
    batch: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda prompt: -len(prompt.ids)):
        longest = len(batch[0].ids) if batch else len(prompt.ids)
        padding = longest - len(prompt.ids)
        fits = (len(batch) + 1) * longest <= BATCH_TOKENS and padding <= (
            PADDING if longest < LONG_PROMPT else 0
        )
        if batch and not fits:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
