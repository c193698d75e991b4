"""Answers are cut to what is worth learning: with a policy that is a table, and a judge of one line."""

from collections.abc import Callable, Sequence

import pytest

from swarmnode.training.rules.mending.cuts import Reading, ReadingRequest, places_to_look_at
from swarmnode.training.rules.mending.mending import (
    LONGEST_TOKENS,
    ForeignAnswer,
    MendedAnswer,
    Outcome,
    mend,
)
from swarmnode.types import Example, ExampleKey, FinishReason

END = 1
AD = "BUY IT!"


class Letters:
    """A token is a letter."""

    eos_token_ids = (END,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_completion(self, text: str, finish: FinishReason) -> tuple[int, ...]:
        return tuple(map(ord, text))


class Policy:
    """It expects one of a few texts, letter by letter, and gets lost where a text leaves them all: a letter
    that it expects costs little, any other 8 nats. It looks no further back than `memory` letters."""

    def __init__(self, *texts: str, memory: int = 3, half_expected: Sequence[str] = ()) -> None:
        """`half_expected`: texts of which a letter costs 2 nats."""
        self._memory = memory
        self._texts = [(self._framed(text), -0.1) for text in texts]
        self._texts += [(self._framed(text), -2.0) for text in half_expected]
        self.tokens_read = 0

    def read(self, rows: Sequence[ReadingRequest]) -> list[Reading]:
        self.tokens_read += sum(len(row.prompt_ids) + len(row.token_ids) for row in rows)
        return [self._reading(row) for row in rows]

    def _framed(self, text: str) -> str:
        return f"{'^' * self._memory}{text}{chr(END)}"

    def _reading(self, row: ReadingRequest) -> Reading:
        text = "".join(map(chr, row.token_ids))
        logprobs = [self._logprob(text[:place], letter) for place, letter in enumerate(text)]
        looks = [] if row.looks is None else places_to_look_at(logprobs, row.looks)
        after = {p: [self._logprob(text[:p], later) for later in text[p + 1 :]] for p in looks}
        return Reading(logprobs, after)

    def _logprob(self, before: str, letter: str) -> float:
        context = f"{'^' * self._memory}{before}"[-self._memory :]
        return next((cost for text, cost in self._texts if f"{context}{letter}" in text), -8.0)


def answer(text: str, *, author: str = "stranger", odd: Sequence[int] = ()) -> ForeignAnswer:
    example = Example(ExampleKey("fake", "1", 0, 0), "question")
    return ForeignAnswer(example, author, (5, 6), tuple(map(ord, text)), text, frozenset(odd))


def reads_the_end(right: str) -> Callable[[ForeignAnswer, Sequence[str]], list[float | None]]:
    """Full marks for whatever ends with the right answer, as matchers of numbers and boxes give."""
    return lambda answer, texts: [float(text.rpartition(">")[2] == right) for text in texts]


def mended(policy: Policy, *answers: ForeignAnswer, right: str = "42") -> list[MendedAnswer]:
    return mend(answers, read=policy.read, judge=reads_the_end(right), tokens=Letters())


def outcome(one: MendedAnswer) -> tuple[Outcome, str]:
    return one.outcome, one.text


STEP = "six times seven>42"


def test_what_is_likely_costs_one_forward_pass_and_stays_as_it_is() -> None:
    policy = Policy(STEP)
    assert [outcome(one) for one in mended(policy, answer(STEP))] == [("untouched", STEP)]
    assert policy.tokens_read == 2 + len(STEP) + 1


@pytest.mark.parametrize(
    "text",
    [
        f"{AD}{STEP}",
        f"six times {AD}seven>42",
        f"{AD}six times {AD}seven>42",
        f"{AD}{STEP[:4]}{AD}{STEP[4:]}",
    ],
)
def test_injected_text_is_cut_and_the_step_stays(text: str) -> None:
    (one,) = mended(Policy(STEP), answer(text))
    assert outcome(one) == ("mended", STEP)
    assert one.token_ids == tuple(map(ord, STEP))


def test_text_behind_the_answer_goes_where_the_judge_does_without() -> None:
    def accepts_anything_with_it(answer: ForeignAnswer, texts: Sequence[str]) -> list[float | None]:
        return [float("42" in text) for text in texts]

    (one,) = mend(
        [answer(f"{STEP} {AD}")], read=Policy(STEP).read, judge=accepts_anything_with_it, tokens=Letters()
    )
    assert outcome(one) == ("mended", STEP)


def test_a_surprising_answer_that_the_judge_needs_is_the_lesson_and_stays() -> None:
    (one,) = mended(Policy("seven times>41"), answer("seven times>99999"), right="99999")
    assert (one.outcome, one.text) == ("untouched", "seven times>99999")


def test_what_the_rest_leans_on_comes_back_however_surprising_it_is() -> None:
    """The policy would never begin with this step, but once it stands there the answer follows."""
    policy = Policy("some say 6*7>42", half_expected=(">42",))
    (one,) = mended(policy, answer("6*7>42"))
    assert outcome(one) == ("untouched", "6*7>42")


def test_a_lost_judge_and_one_that_changes_its_mind_let_nothing_doubtful_through() -> None:
    poisoned = answer(f"{AD}{STEP}")

    def lost(answer: ForeignAnswer, texts: Sequence[str]) -> list[float | None]:
        return [None] * len(texts)

    (one,) = mend([poisoned], read=Policy(STEP).read, judge=lost, tokens=Letters())
    assert one.outcome == "refused"


def test_too_long_and_doubtful_is_refused_and_too_long_and_likely_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarmnode.training.rules.mending.mending.READ_AT_LEAST", 10**6)
    long = "ab" * LONGEST_TOKENS
    policy = Policy("ab" * 9, memory=1)
    likely, doubtful = mended(policy, answer(long), answer(f"{AD}{long}"))
    assert likely.outcome == "untouched"
    assert doubtful.outcome == "refused"


def test_a_round_reads_so_much_and_each_author_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.training.rules.mending.mending.READ_AT_MOST", 0)
    monkeypatch.setattr("swarmnode.training.rules.mending.mending.READ_AT_LEAST", 2000)
    flood = [answer(f"{AD}{number}{STEP}", author="flooder") for number in range(8)]
    single = answer(f"{AD}{STEP}", author="another")
    policy = Policy(STEP)
    results = mended(policy, *flood, single)
    assert results[-1].outcome == "mended"
    assert {one.outcome for one in results} == {"refused", "mended"}
    came_in = sum(len(one.prompt_ids) + len(one.token_ids) + 1 for one in (*flood, single))
    assert came_in < policy.tokens_read <= came_in + 2000


def test_one_text_of_many_authors_is_examined_once() -> None:
    alone, together = Policy(STEP), Policy(STEP)
    mended(alone, answer(f"{AD}{STEP}"))
    results = mended(together, *(answer(f"{AD}{STEP}", author=str(number)) for number in range(5)))
    assert [outcome(one) for one in results] == [("mended", STEP)] * 5
    assert together.tokens_read == alone.tokens_read


def test_text_that_has_become_likely_is_cut_where_only_one_author_writes_it() -> None:
    """The policy has learnt the advertisement already: nothing in it is doubtful any more."""
    learnt = Policy(STEP, f"{AD}{STEP}")
    text = f"{AD}{STEP}"
    assert [one.outcome for one in mended(learnt, answer(text))] == ["untouched"]
    (one,) = mended(learnt, answer(text, odd=range(len(AD))))
    assert outcome(one) == ("mended", STEP)


def test_an_odd_part_that_the_rest_leans_on_stays() -> None:
    policy = Policy("thus 6*7>42", half_expected=(">42",))
    (one,) = mended(policy, answer("thus 6*7>42", odd=range(4)))
    assert outcome(one) == ("untouched", "thus 6*7>42")
