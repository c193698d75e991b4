"""Determines the tokens of each sequence that the stages still need before its next token can be sampled.

pipeline_engine.py: rows and their tokens -> [Feeder] -> Feed -> chain.py -> hidden state of each row's
    newest token

One rule covers everything: a sequence has tokens, `fed` of which are stored in a cell at each stage of its
route, and the others are sent. A new prompt, a resumed answer, one more token, or everything again after a
node was lost: they differ only in `fed`. Sequences with the same prompt share it: the first sends the prompt,
and the others copy its columns and send the rest of their tokens, at least the last one.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from swarmnode.errors import EngineError
from swarmnode.extensions.pipeline.rollouts.chain import Chain, ChainFeed, Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.routing import ChoosePath, PlanNode, Route
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath

logger = logging.getLogger(__name__)

SESSION_BITS = 40

MAX_FAILURES = 16
"""Rounds of failed feeds after which a step is given up, unless a node was excluded. After half of them,
nodes that forget a feed are avoided at once."""

PATIENCE = 4
"""Number of feeds that a node may forget, under one plan and policy, before it is avoided."""

MOST_POLICIES = 64
"""Longest time that a node is avoided, in policy versions; one that is lost is avoided for as long."""


@dataclass(slots=True)
class _Sequence:
    ids: list[int]
    prompt: tuple[int, ...]
    path: StagePath
    fed: int = 0
    cell: int | None = None
    lends: bool = True
    """True if the columns of its prompt were computed under the newest policy, so that other sequences may
    copy them."""


@dataclass(slots=True)
class _Session:
    number: int
    route: Route
    cells: set[int] = field(default_factory=set[int])
    """The cells in use."""

    def take_cell(self) -> int:
        cell = next(number for number in range(len(self.cells) + 1) if number not in self.cells)
        self.cells.add(cell)
        return cell


@dataclass(slots=True)
class _Trouble:
    """Failures of the feeds of one step."""

    rounds: int = 0
    rows: set[int] = field(default_factory=set[int])
    tokens: int = 0
    causes: dict[str, None] = field(default_factory=dict[str, None])
    """Distinct causes, in order of first occurrence."""
    rerouted: int = 0
    """Sequences that continue without a stage that no node holds any more."""


@dataclass(frozen=True, slots=True)
class _Load:
    feed: ChainFeed
    rows: tuple[int, ...]


class Feeder:
    """The sequences by row, and the sessions that hold their keys and values."""

    def __init__(self, chain: Chain, choose_path: ChoosePath) -> None:
        self._chain = chain
        self._choose_path = choose_path
        self._sequences: dict[int, _Sequence] = {}
        self._sessions: dict[StagePath, _Session] = {}
        self._around: dict[PlanNode, int] = {}
        """Nodes that are avoided for now, and for how many policies."""
        self._forgot: Counter[PlanNode] = Counter()
        self._strikes: Counter[PlanNode] = Counter()
        """How often a node of the current plan was avoided: each time for twice as many policies."""

    def route_for(self, prompt_ids: Sequence[int], wanted: StagePath = ()) -> Route:
        """Return the route of a sequence with this prompt: along the wanted path, or else the one chosen for
        the prompt, without stages that no node holds. Raises EngineError if neither is a path here."""
        for path in (wanted, self._choose_path(prompt_ids)):
            if path and (route := self._chain.route(path, self._around)) is not None:
                return route
        raise EngineError(
            f"{self._choose_path(prompt_ids)} is not a path through this pipeline",
            hint="a path begins at stage 0 and visits no stage twice",
        )

    def add(self, row: int, prompt: tuple[int, ...], sampled: Sequence[int], path: StagePath) -> None:
        self._sequences[row] = _Sequence([*prompt, *sampled], prompt, path)

    def append(self, row: int, token: int) -> None:
        self._sequences[row].ids.append(token)

    def path(self, row: int) -> StagePath:
        """Return the path along which the row's next token is sampled."""
        return self._sequences[row].path

    def drop(self, rows: Iterable[int]) -> None:
        """Remove sequences that have ended, and close sessions without sequences."""
        for row in rows:
            sequence = self._sequences.pop(row)
            session = self._sessions.get(sequence.path)
            if session is None or sequence.cell is None:
                continue
            session.cells.discard(sequence.cell)
            if not session.cells:
                self._close(sequence.path)

    def policy_moved(self) -> None:
        """Stop lending the columns of current sequences to new ones, because they belong to an earlier
        policy. Nodes that were avoided for long enough are asked again."""
        self._around = {key: left - 1 for key, left in self._around.items() if left > 1}
        self._forgot.clear()
        for sequence in self._sequences.values():
            sequence.lends = False

    def clear(self) -> None:
        self._sequences.clear()
        for path in list(self._sessions):
            self._close(path)

    def bring(self, version: int) -> dict[int, Tensor] | Stopped:
        """Feed all sequences to their ends. Returns the hidden state [D] of each row's newest token.

        Works around lost and forgetful nodes, and returns any other stop. Everything that was fed stays fed,
        and the next call continues from there. Raises EngineError if working around fails too often.
        """
        trouble = _Trouble()
        try:
            return self._bring(version, trouble)
        finally:
            if trouble.causes:
                logger.info(
                    "%d of %d sequences were resumed (%d tokens), %d go along fewer stages: %s",
                    len(trouble.rows), len(self._sequences), trouble.tokens,
                    trouble.rerouted, "; ".join(trouble.causes),
                )  # fmt: skip

    def _bring(self, version: int, trouble: _Trouble) -> dict[int, Tensor] | Stopped:
        found: dict[int, Tensor] = {}
        while waiting := self._sequences.keys() - found.keys():
            loads = self._loads(waiting, version, trouble)
            results = self._chain.run([load.feed for load in loads])
            failed: list[tuple[Route, Stopped]] = []
            unhelpful: Stopped | None = None
            for load, result in zip(loads, results, strict=True):
                if not isinstance(result, Stopped):
                    found |= self._fed(load, result)
                elif self._can_work_around(result, load.feed.route):
                    failed.append((load.feed.route, result))
                else:
                    unhelpful = result
            self._restart_failed(failed, trouble)
            if unhelpful is not None:
                return unhelpful
            # Forgotten sequences are sent again, even if their newest token had come through.
            found = {row: hidden for row, hidden in found.items() if self._sequences[row].fed}
        return found

    # Planning

    def _loads(self, waiting: Collection[int], version: int, trouble: _Trouble) -> list[_Load]:
        """Return one load for each path, with at most as many tokens as a feed can have."""
        by_path: dict[StagePath, list[int]] = {}
        for row in waiting:
            by_path.setdefault(self._settled(self._sequences[row], trouble), []).append(row)
        return [self._load(path, rows, version) for path, rows in by_path.items()]

    def _settled(self, sequence: _Sequence, trouble: _Trouble) -> StagePath:
        """Give the sequence an open session and a cell. Returns its path."""
        session = self._sessions.get(sequence.path)
        if session is None:
            route = self.route_for(sequence.prompt, sequence.path)
            trouble.rerouted += route.stages != sequence.path
            sequence.path = route.stages
            session = self._sessions.get(route.stages)
            if session is None:
                # A member that could guess the number would open the session before us, along another path.
                session = self._sessions[route.stages] = _Session(secrets.randbits(SESSION_BITS), route)
        if sequence.cell is None:
            sequence.cell = session.take_cell()
        return sequence.path

    def _load(self, path: StagePath, rows: Sequence[int], version: int) -> _Load:
        """Make the feed of one path. Cells are in order, so that a stage need not gather them. Sequences that
        have already been fed in part go first."""
        session = self._sessions[path]
        lenders = self._lenders(path)
        left = self._chain.max_feed_tokens
        begun: set[tuple[int, ...]] = set()
        chosen: list[tuple[int, int, list[int]]] = []
        forks: list[tuple[int, int, int]] = []
        for row in sorted(rows, key=lambda row: (self._sequences[row].fed == 0, self._cell(row))):
            sequence = self._sequences[row]
            # Send the newest token again if its hidden state was not used.
            start, lender = min(sequence.fed, len(sequence.ids) - 1), None
            if start == 0 and len(sequence.prompt) > 1:
                if sequence.prompt in begun:
                    continue  # Another sequence is sending the prompt: the next load copies it.
                if (lender := lenders.get(sequence.prompt)) is not None:
                    start = min(len(sequence.prompt), len(sequence.ids) - 1)
            brought = sequence.ids[start : start + left]
            if not brought:
                break  # The feed has no room left.
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
            forks=tuple(forks),
        )
        ids = tuple(token for _, _, brought in chosen for token in brought)
        feed = ChainFeed(session.route, session.number, ids, segments, version)
        return _Load(feed, tuple(row for row, _, _ in chosen))

    def _can_work_around(self, stopped: Stopped, route: Route) -> bool:
        """Return True if a node is lost or has forgotten the feed, or if another node than ours stays at
        another policy or has no room for our only sequence."""
        if stopped.why in (StopReason.LOST, StopReason.FORGOTTEN):
            return True
        if stopped.node not in route.nodes[1:]:
            return False
        if stopped.why is StopReason.NO_MEMORY:
            return len(self._sequences) == 1
        return stopped.why is StopReason.OTHER_POLICY

    def _lenders(self, path: StagePath) -> dict[tuple[int, ...], int]:
        """Return, by prompt, a cell that holds the prompt completely."""
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

    def _restart_failed(self, failed: Sequence[tuple[Route, Stopped]], trouble: _Trouble) -> None:
        """Close the sessions of failed feeds, so that everything is sent again, along other routes if
        necessary. Raises EngineError if this happens too often without any node to exclude."""
        if not failed:
            return
        trouble.rounds += 1
        if self._one_less_to_ask(failed, hurry=trouble.rounds > MAX_FAILURES // 2):
            trouble.rounds = 0
        for route, stopped in failed:
            if trouble.rounds > MAX_FAILURES:
                raise EngineError(
                    f"messages through the pipeline failed {trouble.rounds} times, last: {stopped.why}, "
                    f"{stopped.detail}",
                    hint="what was sampled is kept; check the members of the pipeline",
                )
            where = "" if stopped.node is None else f"node {stopped.node} "
            trouble.causes[f"{where}{stopped.why} ({stopped.detail})"] = None
            self._forget(route.stages, trouble)

    def _one_less_to_ask(self, failed: Sequence[tuple[Route, Stopped]], *, hurry: bool) -> bool:
        """Avoid nodes that are lost, of no use now, or have forgotten too often (with `hurry`: at all). If no
        node was named, avoid all that were on the way. Returns True if any node is avoided."""
        lost, useless, forgot = set[PlanNode](), set[PlanNode](), set[PlanNode]()
        for route, stopped in failed:
            blamed = {(route.plan, node) for node in route.nodes[1:] if stopped.node in (None, node)}
            if stopped.why is StopReason.LOST and stopped.node is not None:
                self._chain.report_lost(route, stopped.node, stopped.detail)
                lost |= blamed
            elif stopped.why in (StopReason.OTHER_POLICY, StopReason.NO_MEMORY):
                useless |= blamed
            else:
                forgot |= blamed
        self._forgot.update(forgot)
        useless |= {key for key in forgot if hurry or self._forgot[key] > PATIENCE}
        plans = {route.plan for route, _ in failed}
        self._strikes = Counter({key: count for key, count in self._strikes.items() if key[0] in plans})
        self._strikes.update(useless)
        self._around |= {key: min(2 ** self._strikes[key], MOST_POLICIES) for key in useless}
        self._around |= dict.fromkeys(lost, MOST_POLICIES)
        return bool(lost | useless)

    def _forget(self, path: StagePath, trouble: _Trouble) -> None:
        for row, sequence in self._sequences.items():
            if sequence.path == path:
                trouble.rows |= {row} if sequence.fed else set()
                trouble.tokens += sequence.fed
                sequence.fed, sequence.cell, sequence.lends = 0, None, True
        self._close(path)

    def _close(self, path: StagePath) -> None:
        session = self._sessions.pop(path)
        self._chain.close_session(session.route, session.number)
