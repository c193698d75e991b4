"""Each distinct prompt is computed once, in batches, and shared by all requests that wait with it.

embedded.py -> [prefill] -> decoder.py
                   |
                   v  keys, values and last hidden state -> slots.py

The samples of one GRPO group have one prompt, and rows become free one at a time. So when a prompt is needed,
those needed next are computed with it, up to `BATCH_TOKENS`. The last prompts that nobody waits with any more
are kept while they have no more tokens than that: under refill, the rest of a group comes a little later.
What a resumed request had sampled is part of its prompt. A new policy makes everything computed worthless.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from swarmnode.rollout.decode.attention import PromptAttention
from swarmnode.rollout.decode.bands import cache_size
from swarmnode.rollout.decode.batches import BATCH_TOKENS, alike
from swarmnode.rollout.decode.decoder import Decoder
from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import Request

PromptKey = tuple[int | None, tuple[int, ...]]
"""Version and token ids."""

LayersOf = Callable[[int | None], Layers]
"""The layers of a version that a request asks for; None: of the newest one."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts computed together, padded on the right to one width."""

    cache: Tensor
    """Their keys and values, laid out as in the bands."""
    hidden: Tensor
    """[prompts, hidden] of their last tokens."""


@dataclass(slots=True, eq=False)
class Prompt:
    """One distinct prompt among the waiting requests, and where its computed state is."""

    ids: tuple[int, ...]
    version: int | None
    """The policy it is for; None: the newest when it starts."""
    waiting: int = 0
    batch: PromptBatch | None = None
    place: int = 0
    """Its index in `batch`."""


class PromptStore:
    """The prompts of the waiting requests, in the order of their first request, and the last before them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._prompts: dict[PromptKey, Prompt] = {}
        self._left: dict[PromptKey, Prompt] = {}  # nobody waits with them; the last one left last

    def expect(self, request: Request) -> None:
        """One more request with this prompt waits."""
        version, ids = key = _key(request)
        if (prompt := self._prompts.get(key)) is None:
            prompt = self._prompts[key] = self._left.pop(key, None) or Prompt(ids, version)
        prompt.waiting += 1

    def leave(self, request: Request) -> Prompt:
        """One request fewer waits with this prompt: it starts now, or was aborted."""
        prompt = self._prompts[_key(request)]
        prompt.waiting -= 1
        if prompt.waiting == 0:
            self._left[_key(request)] = self._prompts.pop(_key(request))
            self._keep_last(BATCH_TOKENS)
        return prompt

    def forget(self) -> None:
        """Let nothing computed so far be used: the policies have changed."""
        self._left.clear()
        for prompt in self._prompts.values():
            prompt.batch = None

    def compute(self, prompts: Iterable[Prompt], layers_of: LayersOf) -> None:
        """Make sure that these are computed; if one is not, compute some of those that come next as well."""
        needed = list(dict.fromkeys(prompt for prompt in prompts if prompt.batch is None))
        if not needed:
            return
        by_version: dict[int | None, list[Prompt]] = {}
        for prompt in [*needed, *self._next(needed)]:
            by_version.setdefault(prompt.version, []).append(prompt)
        for version, same in by_version.items():
            for batch in alike([len(prompt.ids) for prompt in same]):
                self._compute_batch([same[index] for index in batch], layers_of(version))

    def _next(self, needed: Sequence[Prompt]) -> Iterator[Prompt]:
        """Prompts to compute ahead of their time. What was computed so before counts as well."""
        known = [prompt for prompt in self._prompts.values() if prompt.batch is not None]
        tokens = sum(len(prompt.ids) for prompt in (*needed, *known))
        chosen = set(needed)
        for prompt in self._prompts.values():
            if prompt.batch is None and prompt not in chosen:
                tokens += len(prompt.ids)
                if tokens > BATCH_TOKENS:
                    return
                yield prompt

    def _keep_last(self, most_tokens: int) -> None:
        """Forget the prompts that left first."""
        tokens = sum(len(prompt.ids) for prompt in self._left.values())
        for key, prompt in list(self._left.items()):
            if tokens <= most_tokens:
                return
            tokens -= len(prompt.ids)
            del self._left[key]

    def _compute_batch(self, prompts: Sequence[Prompt], layers: Layers) -> None:
        batch = compute_batch(self._decoder, layers, [prompt.ids for prompt in prompts])
        for place, prompt in enumerate(prompts):
            prompt.batch, prompt.place = batch, place


def compute_batch(
    decoder: Decoder, layers: Layers, sequences: Sequence[Sequence[int]], tails: Sequence[int] | None = None
) -> PromptBatch:
    """One forward pass over whole sequences. `hidden` is of the last token of each, or, flat, of the last
    `tails[i]` tokens of each."""
    embedding = decoder.weights.embedding
    device = embedding.device
    width = max(map(len, sequences))
    tokens = torch.tensor([(*ids, *[0] * (width - len(ids))) for ids in sequences], device=device)
    size = cache_size(decoder.heads.shape, len(sequences), width)
    cache = torch.empty(size, dtype=embedding.dtype, device=device)
    attention = decoder.attention(
        lambda kind: PromptAttention(decoder.heads, kind.rotary.until(width), cache, kind.window)
    )
    ends = [start + len(ids) for start, ids in zip(count(0, width), sequences, strict=False)]
    wanted = [
        place
        for end, tail in zip(ends, tails or [1] * len(sequences), strict=True)
        for place in range(end - tail, end)
    ]
    hidden = decoder.forward(layers, tokens.flatten(), attention, torch.tensor(wanted, device=device))
    return PromptBatch(cache, hidden)


def _key(request: Request) -> PromptKey:
    return request.version, request.prompt_ids + request.sampled.token_ids
