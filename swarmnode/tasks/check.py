"""Is this task fit for a swarm? Draws and scores it the way strangers will, and says what to mend.

swarmnode task check SPEC -> [check_task] -> TaskReport

Peers draw an example again from its key and score its completions by themselves, so the first question is
always whether the same numbers give the same examples: twice in this process, and in a fresh one, where
Python hashes strings differently.
"""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from swarmnode.errors import TaskError
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.task import Task, is_held_out, score_strictly
from swarmnode.types import Example, Scores, total_reward

SEEDS = (0, 1, 2**40)
"""Seeds that are drawn: two neighbours, and one that does not fit in 32 bits."""

EXAMPLES_PER_SEED = 200

SCORED_EXAMPLES = 32

WRONG_ANSWERS = ("", "?", "lorem ipsum dolor sit amet")
"""Completions that hardly any task means."""

FRESH_PROCESS_TIMEOUT_S = 120.0

SLOW_DRAWS_PER_S = 1000.0
"""Below this a peer's key of the highest index costs seconds to draw again."""

SLOW_SCORES_PER_S = 100.0
"""Below this, judging a round of 256 own and 256 foreign completions takes longer than training on them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing: an "error" keeps the task out of a swarm, a "warning" makes a poor teacher."""

    level: Literal["error", "warning"]
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What was measured about a task. None: could not be measured, and a finding says why."""

    task: str
    version: str
    drawn: int
    distinct_share: float | None
    held_out_share: float | None
    draws_per_s: float | None
    scores_per_s: float | None
    sample: Example | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the task may be used in a swarm."""
        return not any(finding.level == "error" for finding in self.findings)


def check_task(spec: str) -> TaskReport:
    """Load, draw and score a task. Raises TaskError only when it cannot be loaded at all.

    >>> check_task("rev").ok
    True
    """
    task = load_task(spec)
    examples, draw_s, failure = _timed_draw(task)
    findings = [failure] if failure else list(_judge_draws(spec, task, examples, draw_s))
    scores_per_s, score_findings = _judge_scores(task, examples[:SCORED_EXAMPLES])
    prompts = [example.prompt for example in examples]
    return TaskReport(
        task=task.name,
        version=task.version,
        drawn=len(examples),
        distinct_share=len(set(prompts)) / len(prompts) if prompts else None,
        held_out_share=sum(map(is_held_out, prompts)) / len(prompts) if prompts else None,
        draws_per_s=len(examples) / draw_s if examples else None,
        scores_per_s=scores_per_s,
        sample=examples[0] if examples else None,
        findings=(*findings, *score_findings),
    )


def draw_digest(task: Task) -> str:
    """One digest of everything that is drawn: prompts, columns and their order."""
    state = hashlib.blake2b(digest_size=16)
    for example in _draw(task):
        state.update(repr((example.key, example.prompt, sorted(example.columns.items()))).encode())
    return state.hexdigest()


def _draw(task: Task) -> Iterator[Example]:
    for seed in SEEDS:
        yield from islice(task.examples(seed), EXAMPLES_PER_SEED)


def _timed_draw(task: Task) -> tuple[list[Example], float, Finding | None]:
    """The examples up to the first failure, and the seconds they took."""
    examples: list[Example] = []
    start = time.perf_counter()
    try:
        examples.extend(_draw(task))
    except TaskError as error:
        return examples, time.perf_counter() - start, Finding("error", error.message, error.hint)
    return examples, time.perf_counter() - start, None


def _judge_draws(spec: str, task: Task, examples: list[Example], draw_s: float) -> Iterator[Finding]:
    if not examples:
        yield Finding(
            "error", f"examples({SEEDS[0]}) yields nothing", "yield at least a few hundred examples"
        )
        return
    here = draw_digest(task)
    if here != draw_digest(load_task(spec)):
        yield Finding(
            "error",
            "two draws of the same seed differ",
            "draw from random.Random(seed) only: no global random, clock or shared state",
        )
    elif here != _digest_in_fresh_process(spec):
        yield Finding(
            "error",
            "another process draws other examples",
            "do not use hash() or the order of a set: Python changes both in each process",
        )
    yield from _judge_variety(task, [example.prompt for example in examples])
    if len(examples) / draw_s < SLOW_DRAWS_PER_S:
        yield Finding(
            "warning",
            f"drawing takes {1000 * draw_s / len(examples):.1f} ms per example",
            "prepare slow things once at the top of the file: peers draw your examples again",
        )


def _judge_variety(task: Task, prompts: list[str]) -> Iterator[Finding]:
    held_out = sum(map(is_held_out, prompts))
    if held_out == 0:
        yield Finding("warning", "no drawn prompt is held out for evaluation", "ask more different questions")
    if held_out == len(prompts):
        yield Finding(
            "error", "every drawn prompt is held out for evaluation", "ask more different questions"
        )
    if len(set(prompts)) < len(prompts) / 2:
        share = 1 - len(set(prompts)) / len(prompts)
        yield Finding(
            "warning", f"{share:.0%} of prompts are repetitions", "the policy may learn them by heart"
        )
    seed, neighbour = (next(iter(task.examples(seed)), None) for seed in SEEDS[:2])
    if seed and neighbour and seed.prompt == neighbour.prompt:
        yield Finding(
            "warning", "two seeds begin with the same prompt", "let the seed change the examples' order"
        )


def _digest_in_fresh_process(spec: str) -> str:
    """The digest that a process with another hash seed finds. Empty when it fails, which no digest equals."""
    # -R: random string hashes even where PYTHONHASHSEED forbids them. -P: nothing from the current folder.
    command = [sys.executable, "-RP", "-m", "swarmnode.tasks.check", spec]
    try:
        fresh = subprocess.run(
            command, capture_output=True, text=True, timeout=FRESH_PROCESS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return fresh.stdout.strip().rpartition("\n")[2]


def _judge_scores(task: Task, examples: list[Example]) -> tuple[float | None, list[Finding]]:
    """Scored completions per second, and what is wrong with the scores."""
    start = time.perf_counter()
    try:
        scored = [_score_probes(task, example) for example in examples]
        seconds = time.perf_counter() - start
        again = [_score_probes(task, example) for example in examples]
    except TaskError as error:
        return None, [Finding("error", error.message, error.hint)]
    if not scored:
        return None, []
    scores_per_s = sum(map(len, scored)) / seconds
    return scores_per_s, [finding for judge in _JUDGES if (finding := judge(scored, again, scores_per_s))]


def _score_probes(task: Task, example: Example) -> tuple[Scores, ...]:
    """Scores of some wrong answers and, last, of the right one where the example tells it."""
    answer = example.columns.get("answer")
    return score_strictly(task, example, [*WRONG_ANSWERS, *([answer] if isinstance(answer, str) else [])])


_Scored = list[tuple[Scores, ...]]


def _unstable(scored: _Scored, again: _Scored, _scores_per_s: float) -> Finding | None:
    if scored == again:
        return None
    return Finding(
        "error",
        "the same text scores differently the second time",
        "no randomness, clock or model in rewards",
    )


def _unscored(scored: _Scored, _again: _Scored, _scores_per_s: float) -> Finding | None:
    if any(total_reward(scores) is not None for row in scored for scores in row):
        return None
    return Finding(
        "error", "no completion gets any reward, only None", "return a number where the reward applies"
    )


def _indifferent(scored: _Scored, _again: _Scored, _scores_per_s: float) -> Finding | None:
    told = [[total_reward(scores) for scores in row] for row in scored if len(row) > len(WRONG_ANSWERS)]
    if not told or any(_prefers_last(rewards) for rewards in told):
        return None
    return Finding(
        "warning",
        "a right answer scores no better than nonsense",
        "there is nothing to learn from equal rewards",
    )


def _prefers_last(rewards: Sequence[float | None]) -> bool:
    *others, right = rewards
    return right is not None and any(wrong is None or right > wrong for wrong in others)


def _slow(_scored: _Scored, _again: _Scored, scores_per_s: float) -> Finding | None:
    if scores_per_s >= SLOW_SCORES_PER_S:
        return None
    return Finding(
        "warning", f"{scores_per_s:.0f} completions scored per second", "every node scores what it hears of"
    )


_JUDGES: tuple[Callable[[_Scored, _Scored, float], Finding | None], ...] = (
    _unstable,
    _unscored,
    _indifferent,
    _slow,
)


if __name__ == "__main__":
    sys.stdout.write(draw_digest(load_task(sys.argv[1])) + "\n")
