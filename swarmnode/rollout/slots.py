"""Keys, values and sampled tokens of every sequence in flight, as rows of one table with a common clock.

prefill.py -> place --> [slots] <-> attention.py (writes and reads keys and values)
sampler.py -> append -->   |
                           v harvest -> embedded.py

All rows write the same column at the same time: a prompt is placed so that it ends at the newest column, and
padding is on the left, hidden by a bias. One slice then writes the keys of a whole batch, one slice reads the
window from the earliest living start to the newest column, and no index is built per step. Time is counted in
ticks, which only grow; `tick - origin` is the column, so moving the contents changes nothing but `origin`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.rollout.weights import Shape

COLUMN_STEP = 16
"""Columns are allocated in multiples of this."""

ROOM = 32
"""New columns beyond the longest prompt, before a table first has to grow. Tight tables are read faster."""


class Slots:
    """At most `max_rows` sequences. Memory grows with what is in flight and is kept."""

    def __init__(self, shape: Shape, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = 0
        """Rows below this take part in a step. Some of them may be dead: computed along, read by nobody."""
        self.tick = 0
        """When the newest tokens were sampled. Their keys and values are not yet in the table."""
        self._shape = shape
        self._max_rows = max_rows
        self._device = device
        self._starts: dict[int, int] = {}  # of living rows: the tick of the first prompt token
        self._low_tick = 0
        self._holes: list[int] = []
        self._origin = 0
        self._row_starts = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._cache = torch.zeros(cache_size(shape, 0, 0), dtype=dtype, device=device)
        self._bias = torch.zeros(0, 0, dtype=dtype, device=device)
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 0, device=device)

    @property
    def alive(self) -> int:
        return len(self._starts)

    @property
    def free(self) -> int:
        return self._max_rows - len(self._starts)

    # What one step of the decoder reads and writes

    def newest_tokens(self) -> Tensor:
        """The tokens to feed, [rows]."""
        return self._tokens[self._column, : self.rows]

    def positions(self, limit: int) -> Tensor:
        """Their positions, [rows]. Those of dead rows run on and are held below `limit`."""
        return torch.rsub(self._row_starts[: self.rows], self.tick).clamp_(max=limit - 1)

    def newest(self) -> Sequence[Tensor]:
        """Where their keys and values belong: [rows, kv_heads, d] for each table of the cache."""
        return self._cache.narrow(1, 0, self.rows).select(3, self._column).unbind(0)

    def window(self) -> tuple[Sequence[Tensor], Tensor]:
        """Living keys and values, [rows * kv_heads, window, d] per table, and their bias [rows, window]."""
        low, width = self._window()
        cache = self._cache.narrow(1, 0, self.rows).flatten(1, 2).narrow(2, low, width)
        return cache.unbind(0), self._bias[: self.rows].narrow(1, low, width)

    def append(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Advance the clock by what was sampled, [rows] each."""
        if self._column + 1 == self._columns:
            self._make_room_after()
        self.tick += 1
        self._tokens[self._column, : self.rows] = tokens
        self._logprobs[self._column, : self.rows] = logprobs

    # Sequences come and go

    def claim(self, count: int) -> list[int]:
        """Take `count` rows (at most `free`), dead ones first."""
        reused, self._holes = self._holes[:count], self._holes[count:]
        added = range(self.rows, self.rows + count - len(reused))
        self.rows += len(added)
        if self.rows > len(self._bias):
            self._lay_out(min(self._max_rows, max(self.rows, 2 * len(self._bias))), self._columns, shift=0)
        return [*reused, *added]

    def place(self, rows: Sequence[int], lengths: Sequence[int], cache: Tensor) -> None:
        """Let prompts end at the newest column. `cache` is that of the prompts, padded on the left."""
        width = cache.shape[3]
        self._make_room_before(width)
        end = self._column + 1
        index = torch.tensor(rows, device=self._device)
        self._cache.narrow(3, end - width, width).index_copy_(1, index, cache)
        starts = torch.tensor([self.tick + 1 - length for length in lengths], device=self._device)
        self._row_starts.index_copy_(0, index, starts)
        ticks = torch.arange(self._columns, device=self._device) + self._origin
        bias = self._bias.new_zeros(len(rows), self._columns)
        self._bias.index_copy_(0, index, bias.masked_fill_(ticks < starts[:, None], float("-inf")))
        self._starts.update(zip(rows, (self.tick + 1 - length for length in lengths), strict=True))
        self._low_tick = min(self._starts.values())

    def harvest(self, rows: Sequence[int], since: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities of `rows` from tick `since` to the newest."""
        index = torch.tensor(rows, device=self._device)
        span = slice(since - self._origin, self._column + 1)
        tokens, logprobs = self._tokens[span], self._logprobs[span]
        return tokens.index_select(1, index).T.tolist(), logprobs.index_select(1, index).T.tolist()

    def release(self, rows: Sequence[int]) -> None:
        """Let rows go. They stay in the batch until claimed again or closed up."""
        for row in rows:
            del self._starts[row]
        self._holes += rows
        if self._starts:
            self._low_tick = min(self._starts.values())
        else:
            self.rows, self._holes = 0, []

    def close_up(self) -> list[int]:
        """Move the living rows together; row i is the former row `result[i]`."""
        kept = sorted(self._starts)
        index = torch.tensor(kept, device=self._device)
        low, width = self._window()
        living = self._cache.narrow(3, low, width)
        living[:, : len(kept)] = living[:, index]
        for table, dim in ((self._bias, 0), (self._row_starts, 0), (self._tokens, 1), (self._logprobs, 1)):
            table.narrow(dim, 0, len(kept)).copy_(table.index_select(dim, index))
        self._starts = {row: self._starts[former] for row, former in enumerate(kept)}
        self.rows, self._holes = len(kept), []
        return kept

    def scrub(self) -> None:
        """Forget everything, numbers included: a NaN left behind would pass through a bias of -inf."""
        self.rows, self._starts, self._holes = 0, {}, []
        self._cache.zero_()

    # The layout

    @property
    def _column(self) -> int:
        return self.tick - self._origin

    @property
    def _columns(self) -> int:
        return self._bias.shape[1]

    def _window(self) -> tuple[int, int]:
        """First column and number of columns from the earliest living start to the newest token."""
        if not self._starts:
            return 0, 0
        return self._low_tick - self._origin, self.tick + 1 - self._low_tick

    def _make_room_before(self, width: int) -> None:
        if not self._starts:
            self._origin = self.tick + 1 - width
            if self._columns <= width:
                self._lay_out(len(self._bias), _rounded_up(width + ROOM), shift=0)
        elif (shift := width - (self._column + 1)) > 0:
            self._lay_out(len(self._bias), max(self._columns, _rounded_up(width + ROOM)), shift)

    def _make_room_after(self) -> None:
        low, _ = self._window()
        self._lay_out(len(self._bias), self._columns * (1 if 2 * low >= self._columns else 2), shift=-low)

    def _lay_out(self, rows: int, columns: int, shift: int) -> None:
        """Make tables of a new size with the living window moved by `shift` columns."""
        low, width = self._window()

        def moved(table: Tensor, size: tuple[int, ...], row_dim: int, column_dim: int) -> Tensor:
            target = table.new_zeros(size)
            live = table.narrow(column_dim, low, width)
            target.narrow(column_dim, low + shift, width).narrow(row_dim, 0, live.shape[row_dim]).copy_(live)
            return target

        self._cache = moved(self._cache, cache_size(self._shape, rows, columns), 1, 3)
        self._bias = moved(self._bias, (rows, columns), 0, 1)
        self._bias[:, : low + shift] = float("-inf")
        self._tokens = moved(self._tokens, (columns, rows), 1, 0)
        self._logprobs = moved(self._logprobs, (columns, rows), 1, 0)
        self._origin -= shift


def cache_size(shape: Shape, rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """A table of keys and one of values for each layer: [2 * layers, rows, kv_heads, columns, d]."""
    return (2 * shape.layers, rows, shape.kv_heads, columns, shape.head_dim)


def _rounded_up(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP
