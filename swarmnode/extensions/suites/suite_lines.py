"""What `swarmnode eval --suite` prints: before and after as a table, and what to know when reading it.

cli/evaluate.py -> [suite_lines] -> the terminal
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.extensions.suites.suite_evaluation import SuiteEvaluation, SuiteResult, SuiteScore

_NARROW, _WIDE = 8, 16


def suite_lines(result: "SuiteEvaluation") -> Iterator[str]:
    """A line for each suite and k, then notes on what was not measured."""
    asked = f"{result.samples} answers each" if result.samples > 1 else "one answer each"
    yield f"{result.model}, {asked}, {result.sampling}, up to {result.max_tokens} tokens"
    yield f"before: base model; after: {result.policy or 'nothing, for only the base model was measured'}"
    width = max(5, *(len(suite.name) for suite in result.suites)) + 1
    yield _row(width, ("suite", "format", "prompts", "asked", "", "before", "after", "gain"))
    for suite in result.suites:
        yield from _rows(width, suite)
    for suite in result.suites:
        yield from _notes(suite)


def _rows(width: int, suite: "SuiteResult") -> Iterator[str]:
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


def _shown(score: "SuiteScore | None", k: int) -> str:
    value = None if score is None else score.pass_at[k]
    if score is None or value is None:
        return "-"
    error = score.standard_error[k]
    return f"{value:.3f}" if error is None else f"{value:.3f} +- {error:.3f}"


def _notes(suite: "SuiteResult") -> Iterator[str]:
    unknown = sum(suite.unknown.values())
    if suite.trained_on:
        yield f"{suite.name}: the policy was trained on this very file: `after` says nothing about others"
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
            yield f"{suite.name}, {name}: {score.cut_share:.1%} of answers ran to rollout.max_tokens"


def _questions(count: int) -> str:
    return "1 question" if count == 1 else f"{count} questions"
