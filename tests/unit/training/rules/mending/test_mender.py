"""A book's mender: our policy reads, our own copy of the task judges, and no stranger holds up the round."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest

from swarmnode.errors import JudgementLost, JudgementOverran, TaskError
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.tasks.deadlines.daemon_threads import in_daemon_thread
from swarmnode.training.rules.book import BookCandidate, Entry
from swarmnode.training.rules.book_rule import BookRule
from swarmnode.training.rules.lessons import SharingRule
from swarmnode.training.rules.mending.cuts import Reading, ReadingRequest, places_to_look_at
from swarmnode.training.rules.mending.mender import Mender
from swarmnode.types import Completion, Example, ExampleKey, FinishReason, RolloutGroup, one_span

END = 1
AD = "BUY IT!"
STEP = "six times seven>42"


class Letters:
    """A token is a letter."""

    eos_token_ids = (END,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_completion(self, text: str, finish: FinishReason) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))


def read(rows: Sequence[ReadingRequest]) -> list[Reading]:
    """A policy that expects STEP, by the three letters before."""
    known = f"^^^{STEP}{chr(END)}"

    def logprob(before: str, letter: str) -> float:
        return -0.1 if f"^^^{before}"[-3:] + letter in known else -8.0

    found: list[Reading] = []
    for row in rows:
        text = "".join(map(chr, row.token_ids))
        logprobs = [logprob(text[:place], letter) for place, letter in enumerate(text)]
        looks = [] if row.looks is None else places_to_look_at(logprobs, row.looks)
        after = {place: [logprob(text[:place], later) for later in text[place + 1 :]] for place in looks}
        found.append(Reading(logprobs, after))
    return found


class AfterTheArrow:
    """A task whose judge reads what follows the last arrow."""

    name = "arrow"
    version = "1"

    def __init__(self, fails_with: Exception | None = None) -> None:
        self.fails_with = fails_with
        self.asked = 0

    def examples(self, seed: int) -> Iterator[Example]:
        yield from ()

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        self.asked += 1
        if self.fails_with is not None:
            raise self.fails_with
        return [{"right": float(text.rpartition(">")[2] == "42")} for text in completions]


def answer(text: str, *, author: str = "stranger", index: int = 0) -> BookCandidate:
    example = Example(ExampleKey("arrow", "1", 0, index), "question")
    entry = Entry("arrow", "1", 0, index, "question", tuple(map(ord, text)), 1.0, author, False, False)
    return BookCandidate(example, text, entry)


def mender(task: AfterTheArrow) -> Mender:
    return Mender(read, {"arrow": task}, Letters())


def texts(answers: Sequence[BookCandidate]) -> list[str]:
    return [one.text for one in answers]


def test_what_was_put_in_is_cut_and_the_rest_goes_through(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mend = mender(AfterTheArrow())
    poisoned = [answer(f"{AD}{STEP}", index=number) for number in range(3)]
    kept = mend([answer(STEP), *poisoned])
    assert texts(kept) == [STEP] * 4
    assert kept[1] == answer(STEP, index=0)
    (line,) = caplog.messages
    assert (
        f"answers of {memorable_name('stranger')} (stranger) are cut" in line and repr(f"{AD}{STEP}") in line
    )


def test_a_judge_that_overran_is_not_asked_again_about_that_author() -> None:
    task = AfterTheArrow(JudgementOverran("it hangs"))
    mend = mender(task)
    assert texts(mend([answer(f"{AD}{STEP}", author="hanger"), answer(STEP, author="hanger")])) == [STEP]
    assert task.asked == 1
    task.fails_with = None
    assert texts(mend([answer(f"{AD}{STEP}", author="hanger")])) == []
    assert task.asked == 1
    assert texts(mend([answer(f"{AD}{STEP}", author="another")])) == [STEP]


def test_a_lost_judge_is_asked_once_a_round_and_nobody_is_blamed() -> None:
    task = AfterTheArrow(JudgementLost("it died"))
    mend = mender(task)
    assert mend([answer(f"{AD}{STEP}", index=number) for number in range(5)]) == []
    assert task.asked == 1
    task.fails_with = None
    assert texts(mend([answer(f"{AD}{STEP}")])) == [STEP]


def test_a_judge_that_never_returns_does_not_hold_up_the_learner() -> None:
    release = threading.Event()

    class Hanging(AfterTheArrow):
        def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
            release.wait()
            return super().score(example, completions)

    mend = Mender(read, {"arrow": Hanging()}, Letters(), judge_limit_s=0.05)
    try:
        answers = [answer(f"{AD}{STEP}", author="hanger"), answer(STEP, index=1)]
        learner = in_daemon_thread(lambda: mend(answers))
        assert texts(learner.result(timeout=60)) == [STEP]
    finally:
        release.set()


def test_a_part_that_no_judge_can_read_ends_nothing() -> None:
    assert mender(AfterTheArrow(TaskError("what is this?")))([answer(f"{AD}{STEP}")]) == []


def group(*answers: tuple[str, float], index: int, author: str) -> RolloutGroup:
    example = Example(ExampleKey("arrow", "1", 0, index), "question")
    completions = tuple(
        Completion(text, tuple(map(ord, text)), None, one_span(0, len(text)), "length") for text, _ in answers
    )
    return RolloutGroup(example, completions, tuple({"right": r} for _, r in answers), author, 0)


def test_the_book_keeps_what_was_mended_and_says_how_much() -> None:
    rule = BookRule(SharingRule(), 0, mender(AfterTheArrow()))
    right, poisoned, wrong = (STEP, 1.0), (f"{AD}{STEP}", 1.0), ("41", 0.0)
    external = [group(right, wrong, index=0, author="a"), group(poisoned, wrong, index=1, author="b")]
    lessons = rule.lessons([], external, version=0)
    assert {"".join(map(chr, entry.token_ids)) for entry in rule.book.entries} == {STEP}
    assert (lessons.report.book, lessons.report.mended, lessons.report.refused) == (2, 1, 0)
    unmended = BookRule(SharingRule(), 0)
    unmended.lessons([], external, version=0)
    assert any(AD in "".join(map(chr, entry.token_ids)) for entry in unmended.book.entries)
