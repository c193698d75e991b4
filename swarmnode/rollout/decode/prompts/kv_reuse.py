"""Keys and values of conversations between two turns, so that earlier turns are not computed again."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.rollout.decode.cached_attention import ContinuedAttention
from swarmnode.rollout.decode.decoder import Decoder, Lookback
from swarmnode.rollout.decode.running_rows import DecodePolicy
from swarmnode.rollout.decode.slots import cache_size
from swarmnode.rollout.decode.weights import Layers

BASE = object()
"""Mark of the model without any adapter."""

KEPT_TOKENS = 1 << 16
"""The most tokens whose keys and values are kept for a next turn: 64 conversations of a thousand. A token
takes 2 * layers * kv_heads * head_dim numbers, 112 KiB in Qwen3-0.6B."""

# ---- the conversations that are kept ----


@dataclass(slots=True, eq=False)
class KeptConversation:
    """A conversation that has stopped and may continue."""

    mark: object
    """Mark of the policy that computed `cache`. Its weights may be gone."""
    packed_ids: bytes
    """Tokens, including the newest, packed so that a prefix is quickly recognized."""
    cache: Tensor
    """Keys and values of all tokens except the newest: [2 * layers, kv_heads, tokens - 1, d]."""
    waiting: int = 1
    """Number of conversations that have exactly these tokens. Samples of a group often begin alike."""

    @property
    def computed(self) -> int:
        """Number of tokens that have keys and values."""
        return self.cache.shape[2]


class KeptStore:
    """The kept conversations, least recently used first. At most `most_tokens` tokens in all."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._kept: list[KeptConversation] = []

    @property
    def tokens(self) -> int:
        """Number of tokens whose keys and values are kept."""
        return sum(kept.computed for kept in self._kept)

    def add(self, policy: DecodePolicy, token_ids: Sequence[int], cache: Tensor) -> None:
        """Keeps a copy of a conversation, in place of the one that it continues. `cache` is as in
        `KeptConversation`."""
        mark, packed, before = _mark(policy), _packed(token_ids), _packed(token_ids[:-1])
        if (continued := self._longest(mark, before)) is not None:
            continued.waiting -= 1
            if not continued.waiting:
                self._kept.remove(continued)
        if (same := self._longest(mark, packed)) is not None and same.packed_ids == packed:
            same.waiting += 1
            self._use(same)
        elif cache.shape[2] <= self._most_tokens:
            self._kept.append(KeptConversation(mark, packed, cache.clone()))
            self._let_the_oldest_go()

    def find(self, policy: DecodePolicy, token_ids: Sequence[int]) -> KeptConversation | None:
        """Returns the longest conversation that these tokens continue. It stays: they may come again, with
        more."""
        found = self._longest(_mark(policy), _packed(token_ids[:-1]))
        if found is not None:
            self._use(found)
        return found

    def forget_others(self, live: Iterable[DecodePolicy]) -> None:
        """Forgets the conversations of policies that are not among these. The base's stay: it can always be
        requested."""
        marks = {BASE, *map(_mark, live)}
        self._kept = [kept for kept in self._kept if kept.mark in marks]

    def _longest(self, mark: object, packed: bytes) -> KeptConversation | None:
        found = (kept for kept in self._kept if kept.mark is mark and packed.startswith(kept.packed_ids))
        return max(found, key=lambda kept: kept.computed, default=None)

    def _use(self, kept: KeptConversation) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)

    def _let_the_oldest_go(self) -> None:
        surplus = self.tokens - self._most_tokens
        while surplus > 0:
            surplus -= self._kept.pop(0).computed


def _packed(token_ids: Sequence[int]) -> bytes:
    """Returns the tokens packed in the same number of bytes each, so that byte prefixes are token
    prefixes."""
    return array("q", token_ids).tobytes()


def _mark(policy: DecodePolicy) -> object:
    """Returns the mark of a policy: equal marks compute the same keys and values. There is one base, under
    any name."""
    return BASE if policy.is_base else policy.mark


# ---- how they continue ----


def continue_batch(
    decoder: Decoder, layers: Layers, sequences: Sequence[Sequence[int]], kept: Sequence[KeptConversation]
) -> tuple[list[Tensor], Tensor]:
    """Runs one forward pass over the new tokens of each sequence. Returns the keys and values of each whole
    sequence, laid out as in a band of one row, and the hidden states [sequences, hidden] of their last
    tokens."""
    device = decoder.weights.embedding.device
    new = [ids[one.computed :] for ids, one in zip(sequences, kept, strict=True)]
    caches = [_widened(decoder, one, len(ids)) for ids, one in zip(sequences, kept, strict=True)]
    positions = [p for ids, one in zip(sequences, kept, strict=True) for p in range(one.computed, len(ids))]
    positions_N = torch.tensor(positions, device=device)
    places = [(cache, len(tokens)) for cache, tokens in zip(caches, new, strict=True)]

    def of_kind(kind: Lookback) -> ContinuedAttention:
        return ContinuedAttention(decoder.heads, kind.rotary.at(positions_N), places, kind.window)

    tokens_N = torch.tensor([token for tokens in new for token in tokens], device=device)
    ends = torch.tensor([len(tokens) for tokens in new], device=device).cumsum(0) - 1
    return caches, decoder.forward(layers, tokens_N, decoder.attention(of_kind), ends)


def _widened(decoder: Decoder, kept: KeptConversation, columns: int) -> Tensor:
    """Returns a copy of a kept cache with room for more: [2 * layers, 1, kv_heads, columns, d]."""
    cache = kept.cache.new_empty(cache_size(decoder.heads.shape, 1, columns))
    cache[:, 0, :, : kept.computed].copy_(kept.cache)
    return cache
