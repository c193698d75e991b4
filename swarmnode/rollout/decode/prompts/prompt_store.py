"""The prompts of waiting requests, each computed once, in batches, and shared by all its requests.

embedded.py (requests) -> [PromptStore] -> decoder.py (new prompts), kv_reuse.py (further turns)
                               |
                               +-> keys, values and last hidden states -> slots.py

The samples of one GRPO group share a prompt, and rows become free one at a time. So when a prompt is needed,
those needed next are computed with it, up to `BATCH_TOKENS`. Prompts that no request waits for any more are
kept, the latest ones, up to the same number of tokens: under refill, the rest of a group comes a little
later. The tokens that a resumed request had sampled are part of its prompt. A new policy invalidates
everything computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from swarmnode.rollout.decode.cached_attention import PromptAttention
from swarmnode.rollout.decode.decoder import Decoder
from swarmnode.rollout.decode.prompts.kv_reuse import KeptStore, continue_batch
from swarmnode.rollout.decode.prompts.pass_batches import BATCH_TOKENS, alike, within
from swarmnode.rollout.decode.running_rows import DecodePolicy
from swarmnode.rollout.decode.slots import cache_size
from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import Request

PromptKey = tuple[int | None, tuple[int, ...]]
"""Key of a prompt: policy version and token ids."""

PolicyOf = Callable[[int | None], DecodePolicy]
"""Returns the policy of a requested version. None: the newest one."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts computed together, padded on the right to one width."""

    cache: Tensor
    """Keys and values, laid out as in the bands."""
    hidden: Tensor
    """Hidden states [prompts, hidden] of the last tokens."""


@dataclass(slots=True, eq=False)
class StoredPrompt:
    """A distinct prompt of the waiting requests, and the place of its computed state."""

    ids: tuple[int, ...]
    version: int | None
    """Policy version that it is computed for. None: the newest when it starts."""
    waiting: int = 0
    batch: PromptBatch | None = None
    place: int = 0
    """Index in `batch`."""
    kept_tokens: int = 0
    """Number of leading tokens whose keys and values were kept from an earlier turn."""


class PromptStore:
    """The prompts of the waiting requests, in the order of their first request, and the latest ones that
    left."""

    def __init__(self, decoder: Decoder, kept: KeptStore) -> None:
        self.kept = kept
        """Conversations that prompts may continue."""
        self._decoder = decoder
        self._prompts: dict[PromptKey, StoredPrompt] = {}
        self._left: dict[PromptKey, StoredPrompt] = {}  # no request waits for them; the last one left last

    def expect(self, request: Request) -> None:
        """Counts one more waiting request with this prompt."""
        version, ids = key = _key(request)
        if (prompt := self._prompts.get(key)) is None:
            prompt = self._prompts[key] = self._left.pop(key, None) or StoredPrompt(ids, version)
        prompt.waiting += 1

    def leave(self, request: Request) -> StoredPrompt:
        """Counts one fewer waiting request with this prompt: it starts now, or was aborted."""
        prompt = self._prompts[_key(request)]
        prompt.waiting -= 1
        if prompt.waiting == 0:
            del self._prompts[_key(request)]
            if not request.sampled:
                # No other request continues this one's sampled tokens.
                self._left[_key(request)] = prompt
                self._keep_last(BATCH_TOKENS)
        return prompt

    def forget(self) -> None:
        """Discards all computed prompts: the policies have changed."""
        self._left.clear()
        for prompt in self._prompts.values():
            prompt.batch, prompt.kept_tokens = None, 0

    def compute(self, prompts: Iterable[StoredPrompt], policy_of: PolicyOf) -> None:
        """Computes these prompts unless they are computed already. If one is missing, some of the next ones
        are computed with it."""
        needed = list(dict.fromkeys(prompt for prompt in prompts if prompt.batch is None))
        if not needed:
            return
        by_version: dict[int | None, list[StoredPrompt]] = {}
        for prompt in [*needed, *self._next(needed)]:
            by_version.setdefault(prompt.version, []).append(prompt)
        for version, same in by_version.items():
            policy = policy_of(version)
            fresh = self._continue(same, policy)
            for batch in alike([len(prompt.ids) for prompt in fresh]):
                self._compute_batch([fresh[index] for index in batch], policy.layers)

    def _continue(self, prompts: Sequence[StoredPrompt], policy: DecodePolicy) -> list[StoredPrompt]:
        """Computes the prompts that continue a kept conversation. Returns the others."""
        found = [(prompt, self.kept.find(policy, prompt.ids)) for prompt in prompts]
        going_on = [(prompt, kept) for prompt, kept in found if kept is not None]
        for some in within(going_on, [len(prompt.ids) - kept.computed for prompt, kept in going_on]):
            sequences = [prompt.ids for prompt, _ in some]
            caches, hidden = continue_batch(
                self._decoder, policy.layers, sequences, [kept for _, kept in some]
            )
            for (prompt, kept), cache, last in zip(some, caches, hidden.split(1), strict=True):
                prompt.batch, prompt.place = PromptBatch(cache, last), 0
                prompt.kept_tokens = kept.computed
        return [prompt for prompt, kept in found if kept is None]

    def _next(self, needed: Sequence[StoredPrompt]) -> Iterator[StoredPrompt]:
        """Yields the prompts to compute ahead of time. Ones computed ahead before count towards the limit."""
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
        """Forgets the prompts that left first, until at most `most_tokens` tokens remain."""
        tokens = sum(len(prompt.ids) for prompt in self._left.values())
        for key, prompt in list(self._left.items()):
            if tokens <= most_tokens:
                return
            tokens -= len(prompt.ids)
            del self._left[key]

    def _compute_batch(self, prompts: Sequence[StoredPrompt], layers: Layers) -> None:
        batch = compute_batch(self._decoder, layers, [prompt.ids for prompt in prompts])
        for place, prompt in enumerate(prompts):
            prompt.batch, prompt.place = batch, place


def compute_batch(decoder: Decoder, layers: Layers, sequences: Sequence[Sequence[int]]) -> PromptBatch:
    """Runs one forward pass over whole sequences."""
    embedding = decoder.weights.embedding
    device = embedding.device
    width = max(map(len, sequences))
    tokens = torch.tensor([(*ids, *[0] * (width - len(ids))) for ids in sequences], device=device)
    size = cache_size(decoder.heads.shape, len(sequences), width)
    cache = torch.empty(size, dtype=embedding.dtype, device=device)
    attention = decoder.attention(
        lambda kind: PromptAttention(decoder.heads, kind.rotary.until(width), cache, kind.window)
    )
    last = [start + len(ids) - 1 for start, ids in zip(count(0, width), sequences, strict=False)]
    hidden = decoder.forward(layers, tokens.flatten(), attention, torch.tensor(last, device=device))
    return PromptBatch(cache, hidden)


def _key(request: Request) -> PromptKey:
    return request.version, request.prompt_ids + request.sampled.token_ids
