"""Keys and values of sequences of similar length, side by side in one table.

prefill.py -> place --> slots.py -> [bands] <-> attention.py (writes one column, reads up to the longest)

A product over a table reads as many columns for each sequence as the longest one has, and reading them is
what a step costs. So sequences lie in bands by length: a band is read up to its own longest, and who outgrows
it moves on to the next one, twice as wide: one copy for each doubling. Every sequence begins in column 0, and
the first places are taken without gaps: who leaves is replaced by the last.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from swarmnode.rollout.decode.weights import Shape

GROWTH = 2
"""Each band is this many times as wide as the one before; its places grow by this factor as well."""

FULL = 0.75
"""Sequences longer than this share of a band do not enter it, and leave it together with one that must: they
would soon have to, and moving many at once costs little more than moving one."""


class Band:
    """Sequences of up to `width` tokens. The table grows with them."""

    def __init__(
        self, shape: Shape, width: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.width = width
        self.rows: list[int] = []
        """Whose sequence is in place 0, 1, ..."""
        self.starts: list[int] = []
        """The tick of their first prompt token."""
        self._shape = shape
        self._max_rows = max_rows
        self._places: dict[int, int] = {}  # by row
        # Fresh memory on a CPU costs as much as several steps. On a GPU torch hands it on to the next band.
        self._keeps_memory = device.type == "cpu"
        self._cache = torch.zeros(cache_size(shape, 0, width), dtype=dtype, device=device)
        self._lines = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def longest(self, tick: int) -> int:
        """Tokens of the longest sequence, that of `tick` included."""
        return tick + 1 - min(self.starts)

    @property
    def cache(self) -> Tensor:
        """Keys and values as `cache_size` says, with some free places behind those of `rows`."""
        return self._cache

    @property
    def lines(self) -> Sequence[Tensor]:
        """Each table of the cache as lines [places * kv_heads * width, d]."""
        return self._cache.flatten(1, 3).unbind(0)

    def lines_at(self, positions: Tensor) -> Tensor:
        """Which lines hold these positions, one of each sequence: [rows * kv_heads]."""
        return (self._lines[: len(self.rows)] + positions[:, None]).flatten()

    def tables(self, columns: int, rows: int | None = None) -> Sequence[Tensor]:
        """The first columns of all sequences, [rows * kv_heads, columns, d] for each table of the cache. With
        more `rows` than there are, or columns than the longest has, old numbers lie there. The band may be
        narrower, and may have fewer rows."""
        rows = len(self.rows) if rows is None else min(rows, self._cache.shape[1])
        columns = min(columns, self.width)
        return self._cache.narrow(1, 0, rows).flatten(1, 2).narrow(2, 0, columns).unbind(0)

    def add(self, rows: Sequence[int], starts: Sequence[int], cache: Tensor) -> None:
        """Let sequences in. `cache` is theirs, from column 0; what lies beyond their ends does not matter."""
        first, count = len(self.rows), len(rows)
        if first + count > self._cache.shape[1]:
            self._grow(first + count)
        columns = min(self.width, cache.shape[3])
        self._cache.narrow(1, first, count).narrow(3, 0, columns).copy_(cache.narrow(3, 0, columns))
        self._places.update(zip(rows, range(first, first + count), strict=True))
        self.rows += rows
        self.starts += starts

    def overgrown(self, tick: int) -> list[int]:
        """Rows that have to leave before the token of `tick` is written: none, or all that nearly fill it."""
        if not self.rows or self.longest(tick) <= self.width:
            return []
        limit = FULL * self.width
        return [row for row, start in zip(self.rows, self.starts, strict=True) if tick + 1 - start > limit]

    def take(self, rows: Sequence[int], columns: int) -> tuple[list[int], Tensor]:
        """Let sequences go. Their starts, and the first columns of their keys and values: to be copied before
        the band changes again."""
        places = [self._places[row] for row in rows]
        starts = [self.starts[place] for place in places]
        cache = self._cache.narrow(3, 0, columns)
        everybody = places == list(range(len(self.rows)))
        cache = cache.narrow(1, 0, len(places)) if everybody else cache.index_select(1, self._index(places))
        self.remove(rows)
        return starts, cache

    def remove(self, rows: Iterable[int]) -> None:
        """Let sequences go. The last ones take their places."""
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
            self._cache = self._cache.new_zeros(cache_size(self._shape, 0, self.width))

    def rename(self, names: Mapping[int, int]) -> None:
        """Row r is called `names[r]` from now on."""
        self.rows = [names[row] for row in self.rows]
        self._places = {row: place for place, row in enumerate(self.rows)}

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
    """Geometric, up to `max_length`.

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
    """To a multiple of `step`, or of a sixteenth of a power of two: hardly more, and few different numbers.

    >>> [rounded_up(count) for count in (7, 33, 40, 41, 65)]
    [7, 34, 40, 42, 68]
    """
    step = max(step, 1 << max(0, (count - 1).bit_length() - 5))
    return -(-count // step) * step


def cache_size(shape: Shape, rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """A table of keys and one of values for each layer: [2 * layers, rows, kv_heads, columns, d]."""
    return (2 * shape.layers, rows, shape.kv_heads, columns, shape.head_dim)
