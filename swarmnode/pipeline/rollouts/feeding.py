"""What the stages still have to be told of each sequence, so that its next token can be sampled.

engine.py: rows and their tokens -> [Feeder] -> Feed -> chain.py -> hidden state of each row's newest token

One rule covers everything: a sequence has tokens, `fed` of them are in a cell at each stage of its way, and
the others are brought. A new prompt, a resumed answer, one token more, and all of it again after a node was
lost: the difference is only in `fed`. Sequences with one prompt share it: the first brings it, the others
get a copy of its columns and bring their own rest, its last token at least.
"""

import logging
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from swarmnode.errors import EngineError
from swarmnode.pipeline.rollouts.chain import Chain, Feed, Stop, Stopped
from swarmnode.pipeline.rollouts.stage_cache import Segments
from swarmnode.pipeline.rollouts.ways import ChoosePath, StagePath, Way

log = logging.getLogger(__name__)

MAX_FAILURES = 16
"""Feeds of one step that may fail before the step is given up: several nodes can be lost at once."""


@dataclass(slots=True)
class RecoveryCounts:
    """Since the engine was made."""

    lost_nodes: int = 0
    refed_tokens: int = 0
    """Tokens whose keys and values were computed again because a node had lost them."""
    rerouted: int = 0
    """Sequences that went on without a stage that nobody holds any more."""
    feeds: int = 0
    """Messages that went around, one for all sequences of a path."""


@dataclass(slots=True)
class _Sequence:
    ids: list[int]
    prompt: tuple[int, ...]
    path: StagePath
    fed: int = 0
    cell: int | None = None
    lends: bool = True
    """Its prompt's columns are those of the newest policy."""


@dataclass(slots=True)
class _Session:
    number: int
    way: Way
    cells: set[int] = field(default_factory=set[int])
    """In use."""

    def take_cell(self) -> int:
        cell = next(number for number in range(len(self.cells) + 1) if number not in self.cells)
        self.cells.add(cell)
        return cell


@dataclass(frozen=True, slots=True)
class _Load:
    path: StagePath
    feed: Feed
    rows: tuple[int, ...]


class Feeder:
    """Sequences by row, and the sessions that hold their keys and values."""

    def __init__(self, chain: Chain, choose_path: ChoosePath) -> None:
        self.counts = RecoveryCounts()
        self._chain = chain
        self._choose_path = choose_path
        self._sequences: dict[int, _Sequence] = {}
        self._sessions: dict[StagePath, _Session] = {}
        # A number that a former engine of this node had would find its session at the stages.
        self._numbers = secrets.randbits(40)

    def path_for(self, prompt_ids: Sequence[int], wanted: StagePath = ()) -> StagePath:
        """How a sequence with this prompt goes: as wanted, if that is a path here and every stage is held."""
        for path in (wanted, self._choose_path(prompt_ids)):
            if path and (way := self._chain.way(path)) is not None:
                return way.stages
        raise EngineError(
            f"{self._choose_path(prompt_ids)} is no path through this pipeline",
            hint="it begins at stage 0 and visits no stage twice",
        )

    def add(self, row: int, prompt: tuple[int, ...], sampled: Sequence[int], path: StagePath) -> None:
        self._sequences[row] = _Sequence([*prompt, *sampled], prompt, path)

    def append(self, row: int, token: int) -> None:
        self._sequences[row].ids.append(token)

    def path(self, row: int) -> StagePath:
        """Along which the row's next token is sampled."""
        return self._sequences[row].path

    def drop(self, rows: Iterable[int]) -> None:
        """These sequences have ended. A session without any is closed."""
        for row in rows:
            sequence = self._sequences.pop(row)
            session = self._sessions.get(sequence.path)
            if session is None or sequence.cell is None:
                continue
            session.cells.discard(sequence.cell)
            if not session.cells:
                self._close(sequence.path)

    def renumber(self, kept: Sequence[int]) -> None:
        """Row i is what row `kept[i]` was."""
        self._sequences = {row: self._sequences[former] for row, former in enumerate(kept)}

    def policy_moved(self) -> None:
        """What sequences have in their cells is an earlier policy's: it is lent to none that starts now."""
        for sequence in self._sequences.values():
            sequence.lends = False

    def clear(self) -> None:
        self._sequences.clear()
        for path in list(self._sessions):
            self._close(path)

    def bring(self, version: int) -> dict[int, Tensor] | Stopped:
        """Feed all sequences to their ends: the hidden state [D] of each row's newest token.

        Nodes that are lost or have forgotten are worked around. Another stop is returned: everything that was
        fed stays fed, and calling again goes on from there. Raises EngineError where going around does not
        help either.
        """
        found: dict[int, Tensor] = {}
        failures = 0
        while waiting := self._sequences.keys() - found.keys():
            loads = self._loads(waiting, version)
            self.counts.feeds += len(loads)
            unhelpful: Stopped | None = None
            for load, result in zip(loads, self._chain.run([load.feed for load in loads]), strict=True):
                if not isinstance(result, Stopped):
                    found |= self._fed(load, result)
                elif result.why in (Stop.LOST, Stop.FORGOTTEN):
                    failures += 1
                    self._go_around(load, result, failures)
                else:
                    unhelpful = result
            if unhelpful is not None:
                return unhelpful
        return found

    # Planning

    def _loads(self, waiting: Collection[int], version: int) -> list[_Load]:
        """One for each path: as many tokens as a feed may have."""
        by_path: dict[StagePath, list[int]] = {}
        for row in waiting:
            by_path.setdefault(self._settled(self._sequences[row]), []).append(row)
        return [self._load(path, rows, version) for path, rows in by_path.items()]

    def _settled(self, sequence: _Sequence) -> StagePath:
        """The sequence's path, with an open session and a cell."""
        session = self._sessions.get(sequence.path)
        if session is None:
            path = self.path_for(sequence.prompt, sequence.path)
            self.counts.rerouted += path != sequence.path
            sequence.path = path
            session = self._sessions.get(path) or self._open(path)
        if sequence.cell is None:
            sequence.cell = session.take_cell()
        return sequence.path

    def _open(self, path: StagePath) -> _Session:
        way = self._chain.way(path)
        assert way is not None  # path_for has found it
        self._numbers += 1
        self._sessions[path] = session = _Session(self._numbers, way)
        return session

    def _load(self, path: StagePath, rows: Sequence[int], version: int) -> _Load:
        """Cells in their order, so that a stage need not gather them; what is fed further goes first."""
        session = self._sessions[path]
        lenders = self._lenders(path)
        left = self._chain.max_feed_tokens
        begun: set[tuple[int, ...]] = set()
        chosen: list[tuple[int, int, list[int]]] = []
        forks: list[tuple[int, int, int]] = []
        for row in sorted(rows, key=lambda row: (self._sequences[row].fed == 0, self._cell(row))):
            sequence = self._sequences[row]
            start, lender = sequence.fed, None
            if start == 0 and len(sequence.prompt) > 1:
                if sequence.prompt in begun:
                    continue  # its prompt is on its way with another: the next load copies it
                if (lender := lenders.get(sequence.prompt)) is not None:
                    start = min(len(sequence.prompt), len(sequence.ids) - 1)
            brought = sequence.ids[start : start + left]
            if not brought:
                break
            if lender is not None:
                forks.append((lender, self._cell(row), start))
            elif start == 0:
                begun.add(sequence.prompt)
            left -= len(brought)
            chosen.append((row, start, brought))
        segments = Segments(
            cells=tuple(self._cell(row) for row, _, _ in chosen),
            starts=tuple(start for _, start, _ in chosen),
            counts=tuple(len(brought) for _, _, brought in chosen),
            tails=(1,) * len(chosen),
            forks=tuple(forks),
        )
        ids = tuple(token for _, _, brought in chosen for token in brought)
        feed = Feed(session.way, session.number, ids, segments, version)
        return _Load(path, feed, tuple(row for row, _, _ in chosen))

    def _lenders(self, path: StagePath) -> dict[tuple[int, ...], int]:
        """The cell in which each prompt stands whole."""
        return {
            sequence.prompt: sequence.cell
            for sequence in self._sequences.values()
            if sequence.path == path
            and sequence.lends
            and sequence.cell is not None
            and sequence.fed >= len(sequence.prompt)
        }

    def _cell(self, row: int) -> int:
        cell = self._sequences[row].cell
        assert cell is not None
        return cell

    # Results

    def _fed(self, load: _Load, hidden_ND: Tensor) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        segments = load.feed.segments
        for place, row in enumerate(load.rows):
            sequence = self._sequences[row]
            sequence.fed = segments.starts[place] + segments.counts[place]
            if sequence.fed == len(sequence.ids):
                found[row] = hidden_ND[place]
        return found

    def _go_around(self, load: _Load, stopped: Stopped, failures: int) -> None:
        """Forget the session, so that everything is brought again, along another way if need be."""
        if failures > MAX_FAILURES:
            raise EngineError(
                f"{failures} messages through the pipeline failed, last: {stopped.why}, {stopped.detail}",
                hint="what was sampled is kept; look at the members of the pipeline",
            )
        if stopped.why is Stop.LOST and stopped.node is not None:
            self._chain.give_up(stopped.node, stopped.detail)
            self.counts.lost_nodes += 1
        lost = [sequence for sequence in self._sequences.values() if sequence.path == load.path]
        tokens = sum(sequence.fed for sequence in lost)
        log.info(
            "%d sequences on path %s are read again, %d tokens: node %s, %s (%s)",
            len(lost), load.path, tokens, stopped.node, stopped.why, stopped.detail,
        )  # fmt: skip
        self.counts.refed_tokens += tokens
        for sequence in lost:
            sequence.fed, sequence.cell, sequence.lends = 0, None, True
        self._close(load.path)

    def _close(self, path: StagePath) -> None:
        session = self._sessions.pop(path)
        self._chain.close_session(session.way, session.number)
