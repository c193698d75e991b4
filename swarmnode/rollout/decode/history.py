"""What was sampled since the oldest sequence in flight began: a line of numbers per tick.

sampler.py -> append --> [history] -> newest tokens -> decoder.py
                             |
                             v  harvest, when a sequence ends -> slots.py -> embedded.py
"""

import torch
from torch import Tensor

LINES = 64
"""Lines at first. They are few numbers beside the keys and values."""


class History:
    """Lines of `rows` numbers. A line is dropped when nobody is left who sampled in it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._first_tick = 0
        self._tokens = torch.zeros(LINES, rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(LINES, rows, device=device)

    def append(self, tick: int, tokens: Tensor, logprobs: Tensor, oldest_tick: int) -> None:
        """What the first rows sampled at `tick`. Lines before `oldest_tick` are not needed any more."""
        if tick - self._first_tick == len(self._tokens):
            self._make_room(tick, oldest_tick)
        line = tick - self._first_tick
        self._tokens[line, : len(tokens)] = tokens
        self._logprobs[line, : len(logprobs)] = logprobs

    def tokens(self, tick: int, rows: Tensor) -> Tensor:
        """What these rows sampled at `tick`."""
        return self._tokens[tick - self._first_tick].index_select(0, rows)

    def harvest(self, rows: Tensor, since: int, until: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities of rows from tick `since` to and with `until`."""
        span = slice(since - self._first_tick, until + 1 - self._first_tick)
        tokens, logprobs = self._tokens[span], self._logprobs[span]
        return tokens.index_select(1, rows).T.tolist(), logprobs.index_select(1, rows).T.tolist()

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        for table in (self._tokens, self._logprobs):
            table.narrow(1, 0, len(rows)).copy_(table.index_select(1, rows))

    def _make_room(self, tick: int, oldest_tick: int) -> None:
        """Move the lines that are needed to the front, of a longer table if they are more than half of it."""
        needed = tick - oldest_tick
        lines = len(self._tokens) * (2 if 2 * needed > len(self._tokens) else 1)
        start = oldest_tick - self._first_tick
        self._tokens = _moved(self._tokens, start, needed, lines)
        self._logprobs = _moved(self._logprobs, start, needed, lines)
        self._first_tick = oldest_tick


def _moved(table: Tensor, start: int, count: int, lines: int) -> Tensor:
    target = table.new_zeros(lines, table.shape[1])
    target[:count] = table.narrow(0, start, count)
    return target
