"""Which tokens end which row.

sampler.py -> tokens -> [stops] -> embedded.py | fallback.py
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.rollout.engine import SamplingParams

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
