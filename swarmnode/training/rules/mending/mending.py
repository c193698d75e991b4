"""Cuts strangers' right answers to what is worth learning, before they enter the book.

exchange -> full marks by our own judge -> [mend] -> book
                                             |
                       reading.py (how likely to us), the task's judge

A judge that reads the last number of a text gives full marks to "BUY EVILCOIN. 2 + 2 = 5 ... so 42". Learning
such text is worse than learning alone, and refusing everything that surprises us throws the lessons away. So
an answer is cut to a part that (a) our judge still gives the same reward, (b) is likely to us, and (c) keeps
every piece without which the rest gets less likely: a step of reasoning supports the answer, an advertisement
supports nothing.

Nearly all honest answers cost one forward pass. Those with doubtful tokens are searched for cuts, side by
side, in one batch of readings per number of cuts. Then the judge chooses among the best parts, and pieces
that the rest depends on come back. A doubtful answer is refused if it is longer than LONGEST_TOKENS, or once
the round has read READ_AT_MOST times as many tokens as came in.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from swarmnode.rollout.renderer import Renderer
from swarmnode.training.rules.mending.cuts import (
    Reading,
    ReadingRequest,
    cuts_of,
    is_suspicious,
    runs_between,
    score,
)
from swarmnode.types import Example, ExampleKey

BEAM = 5
"""Texts read per answer, number of cuts and guess (cuts.py has two guesses)."""

MOST_CUTS = 3
"""The most cuts in one answer. Each place where text was injected takes one."""

MOST_JUDGED = 32
"""The most texts that the judge gets for each answer and number of cuts, in one call."""

CARRIED_NATS = 0.5
"""Nats that the rest loses without a piece that it depends on. Less is noise."""

LONGEST_TOKENS = 1024
"""Longer doubtful answers are refused: one answer is read up to MOST_READINGS times."""

MOST_READINGS = 1 + 2 * BEAM * MOST_CUTS + MOST_CUTS
"""The most readings of one answer: the whole, the beams, and the pieces that come back."""

READ_AT_MOST = 16
"""Tokens that a round may read for each token that came in."""

READ_AT_LEAST = 4096
"""Tokens that any round may read, however few came in."""

SAME_REWARD = 1e-6

Read = Callable[[Sequence[ReadingRequest]], Sequence[Reading]]
"""Returns our policy's readings of rows, in order (reading.py)."""

Outcome = Literal["untouched", "mended", "refused"]


@dataclass(frozen=True, slots=True)
class ForeignAnswer:
    """A stranger's answer that our own judge gave full marks, in our tokens, without an end of text."""

    example: Example
    author: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    odd: frozenset[int] = frozenset()
    """Places of tokens that the author repeats and others do not write (odd_pieces.py)."""


Judge = Callable[[ForeignAnswer, Sequence[str]], Sequence[float | None]]
"""Returns the rewards of these texts as answers to the same example, by our own copy of its task. None:
unknown."""


@dataclass(frozen=True, slots=True)
class MendedAnswer:
    """An answer after mending. A refused one must not be learnt from."""

    source: ForeignAnswer
    outcome: Outcome
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A part of an answer: the places of the tokens that are kept."""

    kept: tuple[int, ...]
    reading: Reading
    score: float


@dataclass(slots=True)
class _Case:
    """A doubtful answer while it is examined."""

    answer: ForeignAnswer
    drafts: dict[tuple[int, ...], _Draft] = field(default_factory=dict[tuple[int, ...], _Draft])
    """All parts read so far, by the places they keep."""
    chosen: tuple[int, ...] | None = None
    refused: bool = False
    reward: float | None = None
    """Reward of the whole answer, judged together with its parts."""

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(range(len(self.answer.token_ids)))

    @property
    def length(self) -> int:
        return len(self.answer.prompt_ids) + len(self.answer.token_ids) + 1

    @property
    def best(self) -> _Draft:
        return max(self.drafts.values(), key=lambda draft: draft.score)

    def is_too_long(self) -> bool:
        if len(self.answer.token_ids) > LONGEST_TOKENS:
            self.refused = True
        return self.refused

    def row(self, kept: tuple[int, ...], end: int, *, for_cuts: bool) -> ReadingRequest:
        ids = tuple(self.answer.token_ids[place] for place in kept)
        looks = _odd_places(kept, self.answer.odd) if for_cuts else None
        return ReadingRequest(self.answer.prompt_ids, (*ids, end), looks)


def mend(
    answers: Sequence[ForeignAnswer],
    *,
    read: Read,
    judge: Judge,
    tokens: Renderer,
) -> list[MendedAnswer]:
    """Returns the part of each answer that is worth learning, in order.

    Blocks while the judge works. Errors of `judge` propagate.
    """
    return _Mending(read, judge, tokens).mend(answers)


class _Mending:
    """One round's work."""

    def __init__(self, read: Read, judge: Judge, tokens: Renderer) -> None:
        self._read = read
        self._judge = judge
        self._renderer = tokens
        self._end = tokens.eos_token_ids[0]
        self._tokens_left = 0

    def mend(self, answers: Sequence[ForeignAnswer]) -> list[MendedAnswer]:
        # Two authors may send the same text, and one author may send it twice.
        distinct = {_key(one): one for one in answers}
        rows = [ReadingRequest(one.prompt_ids, (*one.token_ids, self._end)) for one in distinct.values()]
        self._tokens_left = max(READ_AT_MOST * sum(map(_length, rows)), READ_AT_LEAST)
        cases = {
            key: _Case(one)
            for (key, one), reading in zip(distinct.items(), self._read(rows), strict=True)
            if is_suspicious(reading.logprobs[:-1], one.odd)
        }
        self._examine(_in_turns(cases.values()))
        return [self._result(one, cases.get(_key(one))) for one in answers]

    def _examine(self, cases: Sequence[_Case]) -> None:
        """Examines the cases in waves: as many at once as the round can afford in the worst case, then more
        with the budget that is left."""
        waiting = [case for case in cases if not case.is_too_long()]
        while wave := self._affordable(waiting):
            waiting = waiting[len(wave) :]
            self._search(wave)
            for case in wave:
                self._choose(case)
            self._bring_back([case for case in wave if case.chosen is not None])
        for case in waiting:
            case.refused = True

    def _affordable(self, waiting: Sequence[_Case]) -> list[_Case]:
        left = self._tokens_left
        wave: list[_Case] = []
        for case in waiting:
            left -= MOST_READINGS * case.length
            if left < 0:
                break
            wave.append(case)
        return wave

    def _read_parts(self, asked: Sequence[tuple[_Case, tuple[int, ...]]], *, for_cuts: bool) -> None:
        """Reads these parts of answers in one batch."""
        rows = [case.row(kept, self._end, for_cuts=for_cuts) for case, kept in asked]
        self._tokens_left -= sum(map(_length, rows))
        for (case, kept), reading in zip(asked, self._read(rows) if rows else (), strict=True):
            found = score(reading.logprobs, kept, len(case.whole), case.answer.odd)
            case.drafts[kept] = _Draft(kept, reading, found)

    # ---- (b): the likeliest parts ----

    def _search(self, cases: Sequence[_Case]) -> None:
        """Reads the whole answers, then the most promising parts with one cut, two cuts, ..., among those
        that the judge gives the same reward."""
        frontiers = [[case.whole] for case in cases]
        for _ in range(MOST_CUTS + 1):
            pairs = list(zip(cases, frontiers, strict=True))
            self._read_parts([(case, kept) for case, parts in pairs for kept in parts], for_cuts=True)
            frontiers = [self._next_parts(case, parts) for case, parts in pairs]

    def _next_parts(self, case: _Case, parts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the parts to read next, with one more cut than these."""
        if not parts or case.refused or case.best.kept not in parts:
            # The last cut brought nothing.
            return []
        by_gain, by_hope = _next_cuts(case, parts)
        both = [part for pair in zip_longest(by_gain, by_hope) for part in pair if part is not None]
        passed = set(self._judge_parts(case, list(dict.fromkeys(both))[:MOST_JUDGED]))
        first = [[part for part in ranked if part in passed][:BEAM] for ranked in (by_gain, by_hope)]
        return list(dict.fromkeys(part for ranked in first for part in ranked))

    # ---- (a): what the judge says ----

    def _choose(self, case: _Case) -> None:
        """Chooses the best part among all that were read."""
        if not case.refused and case.reward is not None:
            case.chosen = case.best.kept

    def _judge_parts(self, case: _Case, parts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the parts that our judge gives the same reward as the whole."""
        texts = {kept: text for kept in parts if (text := self._text(case, kept)) is not None}
        if not texts:
            return []
        whole, *rewards = self._judge(case.answer, [case.answer.text, *texts.values()])
        case.reward = whole
        if whole is None:
            case.refused = True
            return []
        return [
            kept
            for kept, reward in zip(texts, rewards, strict=True)
            if reward is not None and reward >= whole - SAME_REWARD
        ]

    def _text(self, case: _Case, kept: tuple[int, ...]) -> str | None:
        """Returns a part as text; None if it is empty or splits a character."""
        text = self._renderer.decode([case.answer.token_ids[place] for place in kept])
        broken = text.count("\ufffd") > case.answer.text.count("\ufffd")
        return None if broken or not text.strip() else text

    # ---- (c): what the rest depends on ----

    def _bring_back(self, cases: Sequence[_Case]) -> None:
        """Compares each choice with the choice plus one of its deleted runs, in one batch."""
        asked = [(case, kept) for case in cases for kept in _unread(case)]
        self._read_parts(asked, for_cuts=False)
        for case in cases:
            self._put_back_needed(case)

    def _put_back_needed(self, case: _Case) -> None:
        """Puts back the runs that support what was kept, if there are any."""
        chosen = case.chosen
        assert chosen is not None
        alone = sum(case.drafts[chosen].reading.logprobs)
        carrying = [
            run
            for kept, run in _each_run_back(chosen, len(case.whole))
            if _without(run, kept, case.drafts[kept].reading) - alone > CARRIED_NATS
        ]
        if not carrying:
            return
        back = tuple(sorted({*chosen, *(place for run in carrying for place in range(*run))}))
        if back == case.whole or self._judge_parts(case, [back]):
            case.chosen = back
        else:
            case.refused = True

    # ---- results ----

    def _result(self, answer: ForeignAnswer, case: _Case | None) -> MendedAnswer:
        if case is not None and case.refused:
            return MendedAnswer(answer, "refused", answer.text, answer.token_ids)
        if case is None or case.chosen is None or case.chosen == case.whole:
            return MendedAnswer(answer, "untouched", answer.text, answer.token_ids)
        text = self._text(case, case.chosen)
        ids = self._renderer.encode_completion(text, "length") if text is not None else ()
        if text is None or not ids:
            return MendedAnswer(answer, "refused", answer.text, answer.token_ids)
        return MendedAnswer(answer, "mended", text, ids)


def _next_cuts(
    case: _Case, parts: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Returns parts with one more cut that may score better by either guess, best first."""
    by_gain: dict[tuple[int, ...], float] = {}
    by_hope: dict[tuple[int, ...], float] = {}
    for kept in parts:
        draft = case.drafts[kept]
        for cut in cuts_of(draft.reading, _odd_places(kept, case.answer.odd)):
            if cut.gain <= 0 and cut.hope <= 0:
                continue
            part = (*kept[: cut.start], *kept[cut.end :])
            if not part or part in case.drafts:
                continue
            for guess, found in ((cut.gain, by_gain), (cut.hope, by_hope)):
                if guess > 0:
                    found[part] = max(found.get(part, float("-inf")), draft.score + guess)
    return _ranked(by_gain), _ranked(by_hope)


def _ranked(found: Mapping[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    return sorted(found, key=lambda part: -found[part])


def _unread(case: _Case) -> list[tuple[int, ...]]:
    """Returns the parts that must be read to see what the choice depends on."""
    assert case.chosen is not None
    parts = [case.chosen, *(kept for kept, _ in _each_run_back(case.chosen, len(case.whole)))]
    return [kept for kept in parts if kept not in case.drafts]


def _each_run_back(kept: tuple[int, ...], length: int) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """Returns, for each deleted run, the part with that run put back, and the run."""
    return [(tuple(sorted((*kept, *range(*run)))), run) for run in runs_between(kept, length)]


def _without(run: tuple[int, int], kept: Sequence[int], reading: Reading) -> float:
    """Returns the log-probability of the kept tokens without those of a run, including the end."""
    inside = range(*run)
    logprobs = zip(kept, reading.logprobs, strict=False)
    return sum(value for place, value in logprobs if place not in inside) + reading.logprobs[-1]


def _odd_places(kept: Sequence[int], odd: Collection[int]) -> frozenset[int]:
    """Returns the places, in a row of kept tokens, of tokens that are odd in the whole."""
    return frozenset(place for place, original in enumerate(kept) if original in odd)


def _in_turns(cases: Iterable[_Case]) -> list[_Case]:
    """Returns the first case of each author, then the second of each: no author uses up the shared budget."""
    seen: Counter[str] = Counter()
    numbered: list[tuple[int, _Case]] = []
    for case in cases:
        numbered.append((seen[case.answer.author], case))
        seen[case.answer.author] += 1
    return [case for _, case in sorted(numbered, key=lambda pair: pair[0])]


def _key(answer: ForeignAnswer) -> tuple[ExampleKey, tuple[int, ...], frozenset[int]]:
    """Returns the key that answers with the same outcome share."""
    return answer.example.key, answer.token_ids, answer.odd


def _length(row: ReadingRequest) -> int:
    return len(row.prompt_ids) + len(row.token_ids)
