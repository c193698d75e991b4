"""The result of `swarmnode eval --suite`, as a record and as the lines that are printed.

suite_evaluation.py -> [SuiteEvaluation] -> eval_command.py -> the terminal: before and after as a table
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.training.records import PassAt

_NARROW, _WIDE = 8, 16


@dataclass(frozen=True, slots=True)
class SuiteScore:
    """Scores of one policy on one suite. None: nothing was judged."""

    pass_at: PassAt
    """k -> the chance that one of k answers is right; with k = 1 the usual accuracy."""
    standard_error: PassAt
    """Standard error of each chance, over the questions."""
    answered: int
    """Number of questions that were not too long to ask."""
    judged: int
    """Number of answered questions with an answer that could be judged."""
    cut_share: float | None
    """Share of answers that ran out of tokens before they ended."""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """A suite, its prompts, and the scores of the policies."""

    name: str
    version: str
    """Digest of the rows."""
    format: str
    prompting: str
    """Kind of prompts, such as "8-shot" or "zero-shot, chat"."""
    rows: int
    """Rows of the suite, those beyond the limit included."""
    asked: int
    unknown: Mapping[str, int]
    """Rows that were not asked since no answer could be judged, by reason. They count as nothing."""
    trained_on: bool
    """True if the checkpoint names this very file among those that it was trained on."""
    before: SuiteScore
    """Score of the base model."""
    after: SuiteScore | None
    """Score of the checkpoint. None: only the base model was measured."""


@dataclass(frozen=True, slots=True)
class SuiteEvaluation:
    """The result of `swarmnode eval --suite`."""

    model: str
    policy: str | None
    """Name of the checkpoint. None: only the base model was measured."""
    sampling: str
    samples: int
    """Answers to each question."""
    max_tokens: int
    suites: tuple[SuiteResult, ...]

    @property
    def measured(self) -> bool:
        """True if an answer to any question was judged."""
        return any(suite.before.judged for suite in self.suites)

    def lines(self) -> Iterator[str]:
        """Yields a table with a line for each suite and k, then notes on what was not measured."""
        asked = f"{self.samples} answers each" if self.samples > 1 else "one answer each"
        yield f"{self.model}, {asked}, {self.sampling}, up to {self.max_tokens} tokens"
        yield f"before: base model; after: {self.policy or 'nothing, only the base model was measured'}"
        width = max(5, *(len(suite.name) for suite in self.suites)) + 1
        yield _row(width, ("suite", "format", "prompts", "asked", "", "before", "after", "gain"))
        for suite in self.suites:
            yield from _rows(width, suite)
        for suite in self.suites:
            yield from _notes(suite)


def _rows(width: int, suite: SuiteResult) -> Iterator[str]:
    first = [suite.name, suite.format, suite.prompting, f"{suite.asked}"]
    for k in suite.before.pass_at:
        before = suite.before.pass_at[k]
        after = suite.after and suite.after.pass_at[k]
        gain = "" if before is None or after is None else f"{after - before:+.3f}"
        yield _row(width, (*first, f"pass@{k}", _shown(suite.before, k), _shown(suite.after, k), gain))
        first = [""] * 4


def _row(width: int, cells: Sequence[str]) -> str:
    widths = (width, 10, _WIDE, _NARROW, _NARROW, _WIDE, _WIDE, _NARROW)
    return "  " + " ".join(f"{cell:{wide}}" for cell, wide in zip(cells, widths, strict=True)).rstrip()


def _shown(score: SuiteScore | None, k: int) -> str:
    value = None if score is None else score.pass_at[k]
    if score is None or value is None:
        return "-"
    error = score.standard_error[k]
    return f"{value:.3f}" if error is None else f"{value:.3f} +- {error:.3f}"


def _notes(suite: SuiteResult) -> Iterator[str]:
    unknown = sum(suite.unknown.values())
    if suite.trained_on:
        yield f"{suite.name}: the policy was trained on this file: `after` says nothing about new questions"
    if suite.asked + unknown < suite.rows:
        yield f"{suite.name}: the first {suite.asked + unknown} of {suite.rows} questions"
    if unknown:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(suite.unknown.items()))
        yield f"{suite.name}: {_questions(unknown)} unknown and not counted: {reasons}"
    for name, score in (("before", suite.before), ("after", suite.after)):
        if score is None:
            continue
        if too_long := suite.asked - score.answered:
            zero = suite.prompting.startswith("zero-shot")
            fewer = "" if zero else "; --shots 0 leaves out the worked examples"
            yield f"{suite.name}, {name}: {_questions(too_long)} too long to ask{fewer}"
        if unjudged := score.answered - score.judged:
            yield f"{suite.name}, {name}: no answer to {_questions(unjudged)} could be judged"
        if score.cut_share:
            yield f"{suite.name}, {name}: {score.cut_share:.1%} of answers reached rollout.max_tokens"


def _questions(count: int) -> str:
    return "1 question" if count == 1 else f"{count} questions"
