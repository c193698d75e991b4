"""Every sequence in flight: its row, the band that holds its keys and values, and what it has sampled.

prefill.py -> place --> [slots] -> bands.py   (keys and values, by length) <-> attention.py
sampler.py -> append --> [slots] -> history.py (tokens and log-probabilities, by tick) -> embedded.py

A sequence has one row from its start to its end; sampler, stop tokens and history know it by that. The
decoder sees sequences band after band instead, and only living ones: `order` says whose they are. Time is
counted in ticks, which only grow; all sequences sample one token per tick.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.rollout.decode.bands import FULL, Band, band_widths
from swarmnode.rollout.decode.history import History
from swarmnode.rollout.decode.weights import Shape

NARROWEST_ON_CPU = 64
NARROWEST_ON_GPU = 512
"""Width of the first band. A GPU reads so fast that starting the products of one more band costs more."""


class Slots:
    """At most `max_rows` sequences of at most `max_length` tokens. Memory follows what is in flight."""

    def __init__(
        self, shape: Shape, max_rows: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = 0
        """Rows below this are sampled for. Some of them may be dead: nobody reads what they get."""
        self.tick = 0
        """When the newest tokens were sampled. Their keys and values are not yet in a band."""
        self._max_rows = max_rows
        self._device = device
        narrowest = NARROWEST_ON_CPU if device.type == "cpu" else NARROWEST_ON_GPU
        self._bands = [
            Band(shape, width, max_rows, dtype, device) for width in band_widths(narrowest, max_length)
        ]
        self._band_of: dict[int, Band] = {}
        self._first_ticks: dict[int, int] = {}  # of living rows: when their first token was sampled
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

    # What one step of the decoder reads and writes. Its order changes only between steps.

    @property
    def bands(self) -> list[Band]:
        """Those that hold anything."""
        return [band for band in self._bands if band.rows]

    @property
    def rows_in_order(self) -> list[int]:
        """The living rows, band after band."""
        return [row for band in self._bands for row in band.rows]

    @property
    def order(self) -> Tensor:
        """The same on the device."""
        if self._order is None:
            self._order = self._index(self.rows_in_order)
        return self._order

    def newest_tokens(self) -> Tensor:
        """The tokens to feed, in order."""
        return self._history.tokens(self.tick, self.order)

    def positions(self) -> Tensor:
        """Their positions, in order."""
        if self._starts is None:
            self._starts = self._index([start for band in self._bands for start in band.starts])
        return torch.rsub(self._starts, self.tick)

    def make_room(self) -> None:
        """Move sequences on whose band is too narrow for their newest token."""
        for index, band in enumerate(self._bands):
            if rows := band.overgrown(self.tick):
                starts, cache = band.take(rows, band.width)
                self._enter(self._bands[index + 1], rows, starts, cache)

    def append(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Advance the clock by what was sampled, [rows] each."""
        self.tick += 1
        self._history.append(self.tick, tokens, logprobs, min(self._first_ticks.values()))

    # Sequences come and go

    def claim(self, count: int) -> list[int]:
        """Take `count` rows (at most `free`), dead ones first."""
        reused, self._holes = self._holes[:count], self._holes[count:]
        added = range(self.rows, self.rows + count - len(reused))
        self.rows += len(added)
        return [*reused, *added]

    def place(
        self, rows: Sequence[int], lengths: Sequence[int], cache: Tensor, sources: Sequence[int]
    ) -> None:
        """Let sequences start whose tokens before the next one are computed. `cache` is that of some prompts,
        padded on the right; that of `rows[i]` is in place `sources[i]`."""
        by_band: dict[int, list[int]] = {}
        for member, length in enumerate(lengths):
            by_band.setdefault(self._band_for(length), []).append(member)
        for band, members in by_band.items():
            starts = [self.tick + 1 - lengths[member] for member in members]
            own = cache.index_select(1, self._index([sources[member] for member in members]))
            self._enter(self._bands[band], [rows[member] for member in members], starts, own)
        self._first_ticks.update(dict.fromkeys(rows, self.tick + 1))

    def harvest(self, rows: Sequence[int], since: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities of `rows` from tick `since` to the newest."""
        return self._history.harvest(self._index(rows), since, self.tick)

    def release(self, rows: Sequence[int]) -> None:
        """Let rows go. They are sampled for until claimed again or closed up."""
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
        """Give the living the first rows; row i is the former row `result[i]`. No key or value moves."""
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
        """The narrowest band in which a sequence can stay for a while."""
        roomy = (place for place, band in enumerate(self._bands) if length <= FULL * band.width)
        return next(roomy, len(self._bands) - 1)

    def _enter(self, band: Band, rows: Sequence[int], starts: Sequence[int], cache: Tensor) -> None:
        band.add(rows, starts, cache)
        self._band_of.update(dict.fromkeys(rows, band))
        self._order = self._starts = None

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)
