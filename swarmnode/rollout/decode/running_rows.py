"""The rows of a torch engine: running requests with their policies, and the tokens that end them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.types import Span


@dataclass(frozen=True, slots=True, eq=False)
class DecodePolicy:
    """One policy in the form it is sampled in. Two are never equal, since version numbers may repeat."""

    version: int
    layers: Layers
    """Layers of the policy. Empty: the engine has a single model, which changes in place."""
    is_base: bool
    """True for the base model without any adapter."""
    mark: object = field(default_factory=object)
    """Identity that outlives this policy: it holds no weights, and no other policy shares it."""


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A request with a row. Its clock is the engine's: one token per tick."""

    request: Request
    policy: DecodePolicy
    first_tick: int
    """Tick at which its first token in this row is sampled."""
    kept_tokens: int = 0
    """Number of leading tokens whose keys and values were kept from an earlier turn."""
    kv: Literal["fresh", "stale"] = "fresh"
    closed: tuple[Span, ...] = ()
    """Spans of the row's earlier policies."""

    @property
    def last_tick(self) -> int:
        """The tick at which its token budget is used up."""
        left = self.request.sampling.max_tokens - len(self.request.sampled)
        return self.first_tick + left - 1

    def spans(self, tick: int) -> tuple[Span, ...]:
        """Returns the spans sampled in this row, up to and including `tick`."""
        before = len(self.request.sampled)
        start = self.closed[-1].end if self.closed else before
        end = before + tick + 1 - self.first_tick
        if end == start:
            return self.closed
        return (*self.closed, Span(self.policy.version, start, end, self.kv))

    def kept_under(self, policy: DecodePolicy, tick: int) -> "RunningRow":
        """Returns the row continuing under another policy after `tick`, with its present keys and values."""
        return replace(self, policy=policy, kv="stale", closed=self.spans(tick))


# ---- the tokens that end each row ----

NO_TOKEN = -1


class StopTokens:
    """A table [most stop tokens of a row, rows]: each row's own stop tokens and, unless it ignores them, the
    engine's EOS tokens."""

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
        """Moves row `rows[i]` to row i."""
        self._table[:, : len(rows)] = self._table[:, rows]

    def hit(self, tokens: Tensor) -> list[int]:
        """Returns the rows whose newest token is one of their stop tokens."""
        # One copy from a GPU: `nonzero` there would also wait for the number of its results.
        hits: list[bool] = (self._table[:, : len(tokens)] == tokens).any(0).tolist()
        return [row for row, hit in enumerate(hits) if hit]
