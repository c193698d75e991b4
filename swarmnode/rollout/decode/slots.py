"""The sequences in flight: their rows, the bands that hold their keys and values, and their sampled
tokens."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from swarmnode.rollout.decode.weights import Shape

# ---- keys and values of sequences of similar length, side by side in one table ----

GROWTH = 2
"""Ratio between the widths of adjacent bands, and growth factor of a band's places."""

FULL = 0.75
"""Share of a band's width above which sequences do not enter it, and leave it together with one that must:
they would have to leave soon, and moving many at once costs little more than moving one."""

NARROWEST_ON_CPU = 64
NARROWEST_ON_GPU = 512
"""Width of the first band on a GPU, which reads so fast that launching the products of one more band costs
more."""


class Band:
    """Sequences of up to `width` tokens. The table grows with them."""

    def __init__(
        self, shape: Shape, width: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.width = width
        self.rows: list[int] = []
        """Row of the sequence in place 0, 1, ..."""
        self.starts: list[int] = []
        """Tick of each sequence's first prompt token."""
        self._shape = shape
        self._max_rows = max_rows
        self._places: dict[int, int] = {}  # by row
        # Fresh memory on a CPU costs as much as several steps. On a GPU, torch reuses it for the next band.
        self._keeps_memory = device.type == "cpu"
        self._cache = torch.zeros(cache_size(shape, 0, width), dtype=dtype, device=device)
        self._lines = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def longest(self, tick: int) -> int:
        """Returns the number of tokens of the longest sequence, including that of `tick`."""
        return tick + 1 - min(self.starts)

    @property
    def cache(self) -> Tensor:
        """Keys and values as in `cache_size`, with some free places after those of `rows`."""
        return self._cache

    @property
    def lines(self) -> Sequence[Tensor]:
        """The tables of the cache as lines [places * kv_heads * width, d]."""
        return self._cache.flatten(1, 3).unbind(0)

    def lines_at(self, positions: Tensor) -> Tensor:
        """Returns the lines that hold these positions, one of each sequence: [rows * kv_heads]."""
        return (self._lines[: len(self.rows)] + positions[:, None]).flatten()

    def tables(self, columns: int) -> Tensor:
        """Returns the first columns of all sequences, [2 * layers, rows * kv_heads, columns, d]. Columns
        beyond the longest hold stale numbers. A narrower band returns fewer columns."""
        columns = min(columns, self.width)
        return self._cache.narrow(1, 0, len(self.rows)).flatten(1, 2).narrow(2, 0, columns)

    def add(self, rows: Sequence[int], starts: Sequence[int], cache: Tensor) -> None:
        """Adds sequences. `cache` holds their keys and values, from column 0; values beyond their ends do not
        matter."""
        first, count = len(self.rows), len(rows)
        if first + count > self._cache.shape[1]:
            self._grow(first + count)
        columns = min(self.width, cache.shape[3])
        self._cache.narrow(1, first, count).narrow(3, 0, columns).copy_(cache.narrow(3, 0, columns))
        self._places.update(zip(rows, range(first, first + count), strict=True))
        self.rows += rows
        self.starts += starts

    def overgrown(self, tick: int) -> list[int]:
        """Returns the rows that have to leave before the token of `tick` is written: none, or all that nearly
        fill the band."""
        if not self.rows or self.longest(tick) <= self.width:
            return []
        limit = FULL * self.width
        return [row for row, start in zip(self.rows, self.starts, strict=True) if tick + 1 - start > limit]

    def take(self, rows: Sequence[int], columns: int) -> tuple[list[int], Tensor]:
        """Removes sequences. Returns their starts, and the first columns of their keys and values, to be
        copied before the band changes again."""
        places = [self._places[row] for row in rows]
        starts = [self.starts[place] for place in places]
        cache = self._cache.narrow(3, 0, columns)
        everybody = places == list(range(len(self.rows)))
        cache = cache.narrow(1, 0, len(places)) if everybody else cache.index_select(1, self._index(places))
        self.remove(rows)
        if everybody:  # They enter a wider band: the memory plan does not count both tables.
            self._free()
        return starts, cache

    def cache_of(self, row: int, until_tick: int) -> Tensor:
        """Returns the keys and values of one sequence before a tick."""
        place = self._places[row]
        return self._cache[:, place, :, : until_tick - self.starts[place]]

    def remove(self, rows: Iterable[int]) -> None:
        """Removes sequences. The last ones fill their places."""
        gone = {self._places.pop(row) for row in rows}
        kept = len(self.rows) - len(gone)
        holes = sorted(place for place in gone if place < kept)
        movers = [place for place in range(kept, len(self.rows)) if place not in gone]
        if holes:
            moved = self._cache.index_select(1, self._index(movers))
            self._cache.index_copy_(1, self._index(holes), moved)
        for hole, mover in zip(holes, movers, strict=True):
            row = self.rows[hole] = self.rows[mover]
            self.starts[hole] = self.starts[mover]
            self._places[row] = hole
        del self.rows[kept:], self.starts[kept:]
        if not kept and not self._keeps_memory:
            self._free()

    def rename(self, names: Mapping[int, int]) -> None:
        """Renames row r to `names[r]`."""
        self.rows = [names[row] for row in self.rows]
        self._places = {row: place for place, row in enumerate(self.rows)}

    def _free(self) -> None:
        self._cache = self._cache.new_zeros(cache_size(self._shape, 0, self.width))

    def _grow(self, rows: int) -> None:
        former = self._cache
        places = min(self._max_rows, max(rows, GROWTH * former.shape[1]))
        self._cache = former.new_zeros(cache_size(self._shape, places, self.width))
        self._cache.narrow(1, 0, former.shape[1]).copy_(former)
        heads = torch.arange(places * self._shape.kv_heads, device=former.device)
        self._lines = (heads * self.width).view(places, -1)

    def _index(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._cache.device)


def band_widths(narrowest: int, max_length: int) -> list[int]:
    """Returns geometric widths up to `max_length`.

    >>> band_widths(64, 200)
    [64, 128, 200]
    >>> band_widths(64, 8)
    [8]
    """
    widths: list[int] = []
    while narrowest < max_length:
        widths.append(narrowest)
        narrowest *= GROWTH
    return [*widths, max_length]


def rounded_up(count: int, step: int = 1) -> int:
    """Returns `count` rounded up to a multiple of `step`, or of a sixteenth of a power of two: hardly more,
    and with few distinct results.

    >>> [rounded_up(count) for count in (7, 33, 40, 41, 65)]
    [7, 34, 40, 42, 68]
    """
    step = max(step, 1 << max(0, (count - 1).bit_length() - 5))
    return -(-count // step) * step


def cache_size(shape: Shape, rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """Returns the size of a cache, with a table of keys and one of values per layer: [2 * layers, rows,
    kv_heads, columns, d]."""
    return (2 * shape.layers, rows, shape.kv_heads, columns, shape.head_dim)


# ---- sampled tokens, by tick ----

LINES = 64
"""Initial number of lines. They are small compared to the keys and values."""


class History:
    """Lines of `rows` numbers, one per tick. A line is dropped once no living row sampled in it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._first_tick = 0
        self._tokens = torch.zeros(LINES, rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(LINES, rows, device=device)

    def append(self, tick: int, tokens: Tensor, logprobs: Tensor, oldest_tick: int) -> None:
        """Appends the samples of the first rows at `tick`. Lines before `oldest_tick` may be dropped."""
        if tick - self._first_tick == len(self._tokens):
            self._make_room(tick, oldest_tick)
        line = tick - self._first_tick
        self._tokens[line, : len(tokens)] = tokens
        self._logprobs[line, : len(logprobs)] = logprobs

    def tokens(self, tick: int, rows: Tensor) -> Tensor:
        """Returns the tokens that these rows sampled at `tick`."""
        return self._tokens[tick - self._first_tick].index_select(0, rows)

    def harvest(self, rows: Tensor, since: int, until: int) -> tuple[list[list[int]], list[list[float]]]:
        """Returns tokens and log-probabilities of rows from tick `since` up to and including `until`."""
        span = slice(since - self._first_tick, until + 1 - self._first_tick)
        tokens, logprobs = self._tokens[span], self._logprobs[span]
        return tokens.index_select(1, rows).T.tolist(), logprobs.index_select(1, rows).T.tolist()

    def keep(self, rows: Tensor) -> None:
        """Moves row `rows[i]` to row i."""
        for table in (self._tokens, self._logprobs):
            table.narrow(1, 0, len(rows)).copy_(table.index_select(1, rows))

    def _make_room(self, tick: int, oldest_tick: int) -> None:
        """Moves the needed lines to the front, of a longer table if they fill more than half of it."""
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


# ---- all sequences in flight, by row ----


class Slots:
    """Rows for at most `max_rows` sequences of at most `max_length` tokens. Memory grows with the sequences
    in flight."""

    def __init__(
        self, shape: Shape, max_rows: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = 0
        """Rows below this are sampled. Some of them may be dead: nobody reads their tokens."""
        self.tick = 0
        """Tick of the newest tokens. Their keys and values are not in a band yet."""
        self._max_rows = max_rows
        self._device = device
        narrowest = NARROWEST_ON_CPU if device.type == "cpu" else NARROWEST_ON_GPU
        self._bands = [
            Band(shape, width, max_rows, dtype, device) for width in band_widths(narrowest, max_length)
        ]
        self._band_of: dict[int, Band] = {}
        self._first_ticks: dict[int, int] = {}  # of living rows: the tick of their first token
        self._holes: list[int] = []
        self._history = History(max_rows, device)
        self._order: Tensor | None = None
        self._starts: Tensor | None = None

    @property
    def alive(self) -> int:
        return len(self._band_of)

    @property
    def free(self) -> int:
        return self._max_rows - self.alive

    # Read and written by one step of the decoder. The order changes only between steps.

    @property
    def bands(self) -> list[Band]:
        """Bands that hold at least one sequence."""
        return [band for band in self._bands if band.rows]

    @property
    def rows_in_order(self) -> list[int]:
        """Living rows, band after band."""
        return [row for band in self._bands for row in band.rows]

    @property
    def order(self) -> Tensor:
        """The rows of `rows_in_order` as a tensor on the device."""
        if self._order is None:
            self._order = self._index(self.rows_in_order)
        return self._order

    def newest_tokens(self) -> Tensor:
        """Returns the tokens to feed, in the order of `order`."""
        return self._history.tokens(self.tick, self.order)

    def positions(self) -> Tensor:
        """Returns the positions of the tokens to feed, in the order of `order`."""
        if self._starts is None:
            self._starts = self._index([start for band in self._bands for start in band.starts])
        return torch.rsub(self._starts, self.tick)

    def make_room(self) -> None:
        """Moves sequences to a wider band if their own is too narrow for the newest token."""
        for index, band in enumerate(self._bands):
            if rows := band.overgrown(self.tick):
                starts, cache = band.take(rows, band.width)
                self._enter(self._bands[index + 1], rows, starts, cache)

    def append(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Advances the clock by the sampled tokens and log-probabilities, [rows] each."""
        self.tick += 1
        self._history.append(self.tick, tokens, logprobs, min(self._first_ticks.values()))

    # Adding and removing sequences

    def claim(self, count: int) -> list[int]:
        """Takes `count` rows (at most `free`), dead ones first."""
        reused, self._holes = self._holes[:count], self._holes[count:]
        added = range(self.rows, self.rows + count - len(reused))
        self.rows += len(added)
        return [*reused, *added]

    def place(
        self, rows: Sequence[int], lengths: Sequence[int], cache: Tensor, sources: Sequence[int]
    ) -> None:
        """Starts sequences whose tokens before the next one are computed. `cache` holds some prompts, padded
        on the right; that of `rows[i]` is in place `sources[i]`."""
        by_band: dict[int, list[int]] = {}
        for member, length in enumerate(lengths):
            by_band.setdefault(self._band_for(length), []).append(member)
        for band, members in by_band.items():
            starts = [self.tick + 1 - lengths[member] for member in members]
            own = cache.index_select(1, self._index([sources[member] for member in members]))
            self._enter(self._bands[band], [rows[member] for member in members], starts, own)
        self._first_ticks.update(dict.fromkeys(rows, self.tick + 1))

    def harvest(self, rows: Sequence[int], since: int) -> tuple[list[list[int]], list[list[float]]]:
        """Returns tokens and log-probabilities of `rows` from tick `since` to the newest."""
        return self._history.harvest(self._index(rows), since, self.tick)

    def cache_of(self, row: int) -> Tensor:
        """Returns the keys and values of a row up to the token before its newest, [2 * layers, kv_heads,
        columns, d], to be copied before the band changes again."""
        return self._band_of[row].cache_of(row, self.tick)

    def release(self, rows: Sequence[int]) -> None:
        """Releases rows. They continue to be sampled until claimed again or closed up."""
        leaving: dict[int, list[int]] = {}
        for row in rows:
            leaving.setdefault(self._band_of.pop(row).width, []).append(row)
            del self._first_ticks[row]
        for band in self._bands:
            band.remove(leaving.get(band.width, ()))
        self._holes += rows
        if not self._band_of:
            self.rows, self._holes = 0, []
        self._order = self._starts = None

    def close_up(self) -> list[int]:
        """Moves the living rows to the front; row i is the former row `result[i]`. Moves no keys or
        values."""
        kept = sorted(self._band_of)
        names = {former: row for row, former in enumerate(kept)}
        self._history.keep(self._index(kept))
        for band in self._bands:
            band.rename(names)
        self._band_of = {names[row]: band for row, band in self._band_of.items()}
        self._first_ticks = {names[row]: tick for row, tick in self._first_ticks.items()}
        self.rows, self._holes, self._order = len(kept), [], None
        return kept

    def _band_for(self, length: int) -> int:
        """Returns the narrowest band in which a sequence can stay for a while."""
        roomy = (place for place, band in enumerate(self._bands) if length <= FULL * band.width)
        return next(roomy, len(self._bands) - 1)

    def _enter(self, band: Band, rows: Sequence[int], starts: Sequence[int], cache: Tensor) -> None:
        band.add(rows, starts, cache)
        self._band_of.update(dict.fromkeys(rows, band))
        self._order = self._starts = None

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)
