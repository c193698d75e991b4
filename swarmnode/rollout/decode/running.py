"""The rows of a torch engine: what runs in them, which tokens end them, and which sequences share a pass.

torch_engine.py -> [Running] -> the spans of an Output
sampler.py -> tokens -> [StopTokens] -> torch_engine.py: which rows have ended
embedded.py, scoring.py -> lengths -> [alike] -> which sequences share a forward pass

Spans change when a policy does, never per token: until then a row is one open span that grows with the clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.types import Span

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class DecodePolicy:
    """One policy as it is sampled from. Two are never equal: version numbers may come again."""

    version: int
    layers: Layers
    """Empty where the engine has a single model, which changes in place."""
    is_base: bool
    """Whether it is the base model without any adapter."""
    mark: object = field(default_factory=object)
    """Remembers this policy when it is gone: holds no weights, and is no other's."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request that has a row. Its clock is that of the engine: one tick, one token."""

    request: Request
    policy: DecodePolicy
    first_tick: int
    """When its first token since it has this row is sampled."""
    kept_tokens: int = 0
    """Tokens before its first one whose keys and values were still there from a turn before."""
    kv: Literal["fresh", "stale"] = "fresh"
    closed: tuple[Span, ...] = ()
    """Spans since it has this row, of the policies before this one."""

    @property
    def last_tick(self) -> int:
        """When its token budget is used up."""
        left = self.request.sampling.max_tokens - len(self.request.sampled)
        return self.first_tick + left - 1

    def spans(self, tick: int) -> tuple[Span, ...]:
        """What was sampled since it has this row, up to and with `tick`."""
        before = len(self.request.sampled)
        start = self.closed[-1].end if self.closed else before
        end = before + tick + 1 - self.first_tick
        if end == start:
            return self.closed
        return (*self.closed, Span(self.policy.version, start, end, self.kv))

    def kept_under(self, policy: DecodePolicy, tick: int) -> "Running":
        """It goes on under another policy after `tick`, with the keys and values it has."""
        return replace(self, policy=policy, kv="stale", closed=self.spans(tick))


# ---- which tokens end which row ----

NO_TOKEN = -1


class StopTokens:
    """A table [most stop tokens of a row, rows]: its own and, unless it ignores them, the engine's EOS."""

    def __init__(self, eos_token_ids: Sequence[int], rows: int, device: torch.device) -> None:
        self._eos = tuple(eos_token_ids)
        self._table = torch.full((len(self._eos), rows), NO_TOKEN, dtype=torch.int64, device=device)

    def write(self, rows: Tensor, sampling: Sequence[SamplingParams]) -> None:
        stops = [params.stop_token_ids + (() if params.ignore_eos else self._eos) for params in sampling]
        longest = max(map(len, stops))
        if longest > len(self._table):
            self._table = F.pad(self._table, (0, 0, 0, longest - len(self._table)), value=NO_TOKEN)
        padded = [(*ids, *[NO_TOKEN] * (len(self._table) - len(ids))) for ids in stops]
        self._table[:, rows] = torch.tensor(padded, dtype=torch.int64, device=rows.device).T

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        self._table[:, : len(rows)] = self._table[:, rows]

    def hit(self, tokens: Tensor) -> list[int]:
        """Rows whose newest token is one of theirs."""
        return (self._table[:, : len(tokens)] == tokens).nonzero()[:, 1].tolist()


# ---- which sequences share a forward pass, when none of them has keys and values yet ----

BATCH_TOKENS = 2048
"""Tokens of one forward pass over whole sequences, with padding: enough to fill a processor, few enough to
keep."""

PADDING = 16
"""Sequences of one batch differ in length by at most this."""

LONG = 512
"""From this length on only sequences of equal length share a batch: it needs no mask, which is quadratic."""

KEPT_TOKENS = 1 << 16
"""Most tokens whose keys and values are kept for a next turn: 64 conversations of a thousand. A token takes
2 * layers * kv_heads * head_dim numbers, 112 KiB in Qwen3-0.6B."""

LOGITS_AT_ONCE = 1 << 24
"""Logits held at once: 64 MiB in float32."""


def alike(lengths: Sequence[int], padding: int = PADDING) -> Iterator[list[int]]:
    """Indices of sequences of similar length, longest first, each batch within `BATCH_TOKENS` (or of one).

    >>> list(alike([3, 700, 5, 40]))
    [[1], [3], [2, 0]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[batch[0]] if batch else lengths[index]
        allowed = padding if longest < LONG else 0
        if batch and ((len(batch) + 1) * longest > BATCH_TOKENS or longest - lengths[index] > allowed):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def within(items: Sequence[T], tokens: Sequence[int]) -> Iterator[list[T]]:
    """The items in their order, cut into batches within `BATCH_TOKENS` (or of one).

    >>> list(within("abc", [2000, 40, 2009]))
    [['a', 'b'], ['c']]
    """
    batch: list[T] = []
    total = 0
    for item, count in zip(items, tokens, strict=True):
        if batch and total + count > BATCH_TOKENS:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += count
    if batch:
        yield batch
