"""Keys and values at one stage, for sequences that are generated through its layers token by token.

decode_node.py (a member), chain.py (one process) -> [StageCaches] -> stage_model.py

A session belongs to one engine and has cells, one for each sequence; each column of a cell is a position. So
sequences of any lengths share a step, new sequences join with their whole prompt, and a cell is reused from
column 0 once its sequence has ended. Every step states the positions of its tokens. So sending a step again
changes nothing, and a forgotten session is noticed instead of producing wrong results.

Nothing is allocated before its bytes are counted against the owner's share of `max_bytes`. For use by one
thread only, the stage's.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.stages.tensor_checks import check_finite
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.rollout.decode.prompts.pass_batches import alike

GROWTH_COLUMNS = 64
"""Number of positions by which cells grow: the cache is copied every 64 tokens."""

SESSION_IDLE_S = 300.0
"""Time after which an unused session is dropped: its engine is gone, or will send everything again."""

MAX_SESSIONS_PER_OWNER = 64
"""Most sessions of one engine, which has one for each path that it samples along."""

SessionKey = tuple[str, int]
"""Peer id of the owner, and the owner's number of the session."""


MAX_SEQUENCES = 1024
"""Most sequences in one step, and most cells in a session."""

MAX_POSITIONS = 1 << 20

Cell = Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
Position = Annotated[int, Meta(ge=0, lt=MAX_POSITIONS)]
Positions = Annotated[tuple[Position, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class Segments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tokens that one step brings: one entry for each sequence, with the tokens of all end to end.

    Raises ValueError on construction if it contradicts itself.
    """

    cells: Annotated[tuple[Cell, ...], Meta(max_length=MAX_SEQUENCES)]
    """The cell of each sequence."""
    starts: Positions
    """Position of the first token of each sequence in this step."""
    counts: Positions
    """Number of tokens of each sequence in this step."""
    forks: Annotated[tuple[tuple[Cell, Cell, Position], ...], Meta(max_length=MAX_SEQUENCES)] = ()
    """(from, to, length): before anything else, cell `to` becomes a copy of the first `length` columns of
    cell `from`."""

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def __post_init__(self) -> None:
        rows = len(self.counts)
        if not rows or len(self.starts) != rows:
            raise ValueError(f"{rows} counts and {len(self.starts)} starts")
        if min(self.counts) < 1:
            raise ValueError("a sequence brings no token")
        if len(self.cells) != rows or len(set(self.cells)) != rows:
            raise ValueError("cells are not one for each sequence")
        if any(fork[0] == fork[1] for fork in self.forks):
            raise ValueError("a fork into its own cell")


def last_rows(hidden_ND: Tensor, segments: Segments) -> Tensor:
    """Return the last row of each sequence: after the last stage, only these are needed."""
    return hidden_ND[[end - 1 for end in accumulate(segments.counts)]]


@dataclass(slots=True)
class _Session:
    keys: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Keys [cells, G, columns, E] of each layer, numbered as in the whole model."""
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    lengths: list[int] = field(default_factory=list[int])
    """Number of columns in use, by cell."""
    columns: int = 0
    used_s: float = 0.0

    @property
    def positions(self) -> int:
        return len(self.lengths) * self.columns


class StageCaches:
    """The sessions at one stage.

    >>> caches = StageCaches(model, max_bytes=1 << 30)                                     # doctest: +SKIP
    >>> prompt = Segments(cells=(0,), starts=(0,), counts=(5,))                            # doctest: +SKIP
    >>> hidden_ND = caches.run(("engine", 1), prompt, hidden_5D)                           # doctest: +SKIP
    >>> hidden_ND = caches.run(("engine", 1), Segments((0,), (5,), (1,)), next_1D)         # doctest: +SKIP
    """

    def __init__(
        self,
        model: StageModel,
        *,
        max_bytes: int,
        owners: Collection[str] = (),
        idle_s: float = SESSION_IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owners`: peers that may have sessions, each with an equal share of `max_bytes`. Empty: any peer
        may."""
        self.model = model
        self._max_bytes = max_bytes // max(len(owners), 1)
        self._owners = owners
        self._idle_s = idle_s
        self._clock = clock
        self._layers = range(model.part.first_layer, model.part.end_layer)
        heads, width = model.key_shape
        self.position_bytes = 2 * len(self._layers) * heads * width * model.settings.dtype.itemsize
        """Bytes of one position in one cell."""
        self._sessions: dict[SessionKey, _Session] = {}

    def used_bytes(self, owner: str) -> int:
        positions = (session.positions for key, session in self._sessions.items() if key[0] == owner)
        return sum(positions) * self.position_bytes

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    def close(self, key: SessionKey) -> None:
        """Forget a session. An unknown one is ignored."""
        self._sessions.pop(key, None)

    @torch.inference_mode()
    def run(self, key: SessionKey, segments: Segments, hidden_ND: Tensor) -> Tensor:
        """Apply our own layers to hidden states [N, D] of all tokens in `segments`, end to end.

        Raises Rejected, with everything unchanged: wrong_shape, not_finite, not_a_member, unknown_work (a
        cell is shorter than a start position says), no_memory, no_slot. If the output of the layers is
        not_finite, the next step overwrites the columns that were filled.
        """
        self._check(segments, hidden_ND)
        hidden_ND = hidden_ND.to(self.model.device, self.model.settings.dtype)
        out_ND = torch.empty_like(hidden_ND)
        session = self._prepared(key, segments)
        for batch, _ in _widths(segments):
            self._run_batch(session, segments, batch, hidden_ND, out_ND)
        check_finite(out_ND, "what the own layers made of it")
        return out_ND

    def _check(self, segments: Segments, hidden_ND: Tensor) -> None:
        wanted = (segments.tokens, self.model.hidden_size)
        if tuple(hidden_ND.shape) != wanted or not hidden_ND.is_floating_point():
            raise Rejected(Refusal.WRONG_SHAPE, f"{hidden_ND.dtype} {list(hidden_ND.shape)}, not {wanted}")
        check_finite(hidden_ND, "what came in")

    # Sessions

    def _prepared(self, key: SessionKey, segments: Segments) -> _Session:
        """Return the session with room for the step, and with its forks done."""
        if self._owners and key[0] not in self._owners:
            raise Rejected(Refusal.NOT_A_MEMBER, f"{key[0]} holds no data")
        now_s = self._clock()
        for other, session in list(self._sessions.items()):
            if other != key and now_s - session.used_s > self._idle_s:
                del self._sessions[other]
        session = self._sessions.get(key) or _Session()
        self._check_reach(session, segments)
        # Padding of a batch is written too. Tokens that come to these positions later overwrite it.
        ends = (segments.starts[row] + width for batch, width in _widths(segments) for row in batch)
        targets = (*segments.cells, *(to for _, to, _ in segments.forks))
        self._make_room(key, session, max(targets) + 1, max(ends))
        session.used_s = now_s
        for source, target, length in segments.forks:
            for kept in (*session.keys.values(), *session.values.values()):
                kept[target, :, :length] = kept[source, :, :length]
            session.lengths[target] = length
        for cell, start, count in zip(segments.cells, segments.starts, segments.counts, strict=True):
            session.lengths[cell] = start + count
        return session

    def _check_reach(self, session: _Session, segments: Segments) -> None:
        lengths = dict(enumerate(session.lengths))
        for source, target, length in segments.forks:
            if lengths.get(source, 0) < length:
                raise Rejected(Refusal.UNKNOWN_WORK, f"cell {source} has no {length} positions to copy")
            lengths[target] = length
        for cell, start in zip(segments.cells, segments.starts, strict=True):
            if lengths.get(cell, 0) < start:
                raise Rejected(Refusal.UNKNOWN_WORK, f"cell {cell} does not reach position {start}")

    def _make_room(self, key: SessionKey, session: _Session, cells: int, columns: int) -> None:
        """Grow the session's cells. Raises Rejected before anything is allocated."""
        cells = max(cells, len(session.lengths))
        if columns > session.columns:
            columns = -(-columns // GROWTH_COLUMNS) * GROWTH_COLUMNS
        columns = max(columns, session.columns)
        others = sum(owner == key[0] for owner, _ in self._sessions.keys() - {key})
        if others >= MAX_SESSIONS_PER_OWNER:
            raise Rejected(Refusal.NO_SLOT, f"{key[0]} has {MAX_SESSIONS_PER_OWNER} sessions")
        more = (cells * columns - session.positions) * self.position_bytes
        if self.used_bytes(key[0]) + more > self._max_bytes:
            raise Rejected(Refusal.NO_MEMORY, f"{more} bytes more, {self._max_bytes} in all for {key[0]}")
        self._sessions[key] = session
        if not more and session.lengths:
            return
        place: dict[str, Any] = {"device": self.model.device, "dtype": self.model.settings.dtype}
        for kept in (session.keys, session.values):
            # Layer by layer, so that only one layer is held twice during the copy.
            for layer in self._layers:
                heads, width = self.model.key_shape
                grown = torch.zeros(cells, heads, columns, width, **place)
                if layer in kept:
                    grown[: len(session.lengths), :, : session.columns] = kept[layer]
                kept[layer] = grown
        session.lengths += [0] * (cells - len(session.lengths))
        session.columns = columns

    # Arithmetic

    def _run_batch(
        self,
        session: _Session,
        segments: Segments,
        batch: Sequence[int],
        hidden_ND: Tensor,
        out_ND: Tensor,
    ) -> None:
        """Run these rows of the step, padded on the right to the same width."""
        places_BT, positions_BT = _grid(segments, batch, self.model.device)
        cells = [segments.cells[row] for row in batch]
        cache = _Columns(session, cells, positions_BT, max(segments.starts[row] for row in batch))
        found_BTD = self.model.forward_cached(hidden_ND[places_BT], positions_BT, cache)
        if places_BT.shape[1] == 1:
            out_ND[places_BT[:, 0]] = found_BTD[:, 0]
            return
        for row, place_T, found_TD in zip(batch, places_BT, found_BTD, strict=True):
            count = segments.counts[row]
            out_ND[place_T[:count]] = found_TD[:count]


class _Columns:
    """The cells of one batch, as attention layers see them. Implements `stage_model.KeyValues`."""

    def __init__(
        self, session: _Session, cells: Sequence[int], positions_BT: Tensor, latest_start: int
    ) -> None:
        self._session = session
        self._positions_BT = positions_BT
        self._cells_B1 = torch.tensor(cells, device=positions_BT.device)[:, None]
        self._seen = latest_start + positions_BT.shape[1]
        # If the cells are 0, 1, 2, ..., the stored values can be used without a copy.
        self._in_order = list(cells) == list(range(len(cells)))
        self._columns_K = torch.arange(self._seen, device=positions_BT.device)

    def update(
        self, keys_BGTE: Tensor, values_BGTE: Tensor, layer_idx: int, *_: Any
    ) -> tuple[Tensor, Tensor]:
        return (
            self._kept(self._session.keys[layer_idx], keys_BGTE),
            self._kept(self._session.values[layer_idx], values_BGTE),
        )

    def mask(self, window: int | None) -> Tensor:
        positions_B1T1 = self._positions_BT[:, None, :, None]
        sees = self._columns_K <= positions_B1T1
        if window is not None:
            sees &= self._columns_K > positions_B1T1 - window
        return sees

    def _kept(self, kept: Tensor, new_BGTE: Tensor) -> Tensor:
        kept[self._cells_B1, :, self._positions_BT] = new_BGTE.transpose(1, 2)
        rows = kept[: len(self._cells_B1)] if self._in_order else kept[self._cells_B1[:, 0]]
        return rows[:, :, : self._seen]


def _widths(segments: Segments) -> Iterator[tuple[list[int], int]]:
    """Yield rows that are computed together, with the token count of the longest: first single tokens, then
    prompts."""
    single = [row for row, count in enumerate(segments.counts) if count == 1]
    if single:
        yield single, 1
    longer = [row for row, count in enumerate(segments.counts) if count > 1]
    for batch in alike([segments.counts[row] for row in longer]):
        rows = [longer[place] for place in batch]
        yield rows, segments.counts[rows[0]]


def _grid(segments: Segments, batch: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of a batch's tokens in the end-to-end order, and their positions, both [B, T].
    Padding repeats the last token of a row, at positions after it."""
    begins = list(accumulate(segments.counts, initial=0))
    width = max(segments.counts[row] for row in batch)
    offsets_T = torch.arange(width, device=device)
    table = [(begins[row], segments.starts[row], segments.counts[row] - 1) for row in batch]
    begin_B1, start_B1, last_B1 = torch.tensor(table, device=device).T[:, :, None]
    return begin_B1 + torch.minimum(offsets_T, last_B1), start_B1 + offsets_T
