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
    """A table [most stop tokens of a row, rows], with the engine's EOS tokens on top."""

    def __init__(self, eos_token_ids: Sequence[int], rows: int, device: torch.device) -> None:
        self._eos_count = len(eos_token_ids)
        self._table = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)[:, None].repeat(1, rows)

    def write(self, rows: Tensor, sampling: Sequence[SamplingParams]) -> None:
        own = max(len(params.stop_token_ids) for params in sampling)
        room = len(self._table) - self._eos_count
        if own > room:
            self._table = F.pad(self._table, (0, 0, 0, own - room), value=NO_TOKEN)
            room = own
        if room:
            padded = [
                (*params.stop_token_ids, *[NO_TOKEN] * (room - len(params.stop_token_ids)))
                for params in sampling
            ]
            self._table[self._eos_count :, rows] = torch.tensor(padded, device=rows.device).T

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        self._table[:, : len(rows)] = self._table[:, rows]

    def hit(self, tokens: Tensor) -> list[int]:
        """Rows whose newest token is one of theirs."""
        return (self._table[:, : len(tokens)] == tokens).nonzero()[:, 1].tolist()
