"""Is this task fit for a swarm? Draws and scores it the way strangers will, and says what to mend.

swarmnode task check SPEC -> [check_task] -> TaskReport

Peers draw an example again from its key and score its completions by themselves, so the first question is
always whether the same numbers give the same examples: twice in one process, and in a fresh one, where Python
hashes strings differently. An environment is asked the same of an episode. Neither is ours: whatever the file
does, there is a report.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from swarmnode.errors import JudgementLost, TaskError
from swarmnode.extensions.workbench.probes import (
    INJECTIONS,
    WRONG_ANSWERS,
    answer_of,
    find_right,
    passed_with,
    rewards_of,
)
from swarmnode.extensions.workbench.rehearsal import Rehearsal, difference_of, rehearse
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.drawing.demonstrations import COLUMN, Demonstrations
from swarmnode.tasks.drawing.draw_digest import EXAMPLES_PER_SEED, SEEDS, draw
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate_as_set
from swarmnode.tasks.task import (
    evaluation_size_of,
    holds_out,
    is_environment,
    judges_groups,
    score_strictly,
)
from swarmnode.types import FULL_MARGIN, Example, Scores, total_reward

SCORED_EXAMPLES = 32

ALONE_EXAMPLES = 4
"""Examples whose answers are also scored one by one."""

SLOW_DRAWS_PER_S = 1000.0
"""The speed below which a peer's key of the highest index costs seconds to draw again."""

SLOW_SCORES_PER_S = 100.0
"""The speed below which judging a round of 256 own and 256 foreign completions takes longer than training on
them."""

SIMILAR = 0.75
"""The likeness, by difflib, from which another column was probably meant to be `demonstration`."""

_Scored = list[tuple[Scores, ...]]
"""Scores by example and probe."""

INDIFFERENT = "a right answer scores no better than nonsense"
READS_NO_QUESTION = "a right answer to another question scores as well as the right one"


@dataclass(frozen=True, slots=True)
class TaskFinding:
    """One thing worth knowing: an "error" keeps the task out of a swarm, a "warning" makes a poor teacher."""

    level: Literal["error", "warning"]
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class JudgedDemonstrations:
    """Demonstrations of drawn examples that are not held out, judged by the task."""

    judged: int
    right: int
    """Demonstrations with full marks: only those are learnt from."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Measurements of a task. A figure is None if it could not be measured; a finding then gives the
    reason."""

    task: str
    version: str
    drawn: int
    distinct_share: float | None
    """Prompts that differ from all others of their seed: a finite set is read again by every seed."""
    held_out_share: float | None
    draws_per_s: float | None
    scores_per_s: float | None
    sample: Example | None
    lets_through: Mapping[str, float] | None
    """The share of right answers that still had full marks with each injection (probes.py). None: no right
    answer is known."""
    findings: tuple[TaskFinding, ...]
    episode: Rehearsal | None = None
    """Report on the rehearsed episode. None: the task is no environment, or no episode could be played."""
    rows: int | None = None
    """Examples that a seed has. None: it has more than were drawn."""
    demonstrations: JudgedDemonstrations | None = None
    """None: the drawn examples have none, or they could not be judged."""

    @property
    def ok(self) -> bool:
        """True if the task may be used in a swarm: no finding is an error."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def teaches(self) -> bool:
        """True if the rewards tell right answers from wrong ones, as far as the check tried, and a
        demonstration is right where there are any."""
        if self.demonstrations is not None and not self.demonstrations.right:
            return False
        return not {finding.what for finding in self.findings} & {INDIFFERENT, READS_NO_QUESTION}


def check_task(
    spec: str, config: TasksConfig | None = None, *, printed: Callable[[str], None] | None = None
) -> TaskReport:
    """Loads, draws and scores a task as a node with these settings does (None: as one without any), but that
    loading the file may take no longer than a judgement. Raises TaskError or JudgementLost only when it
    cannot be loaded at all. `printed`: gets each line that it prints.

    >>> check_task("rev").ok
    True
    """
    load = partial(_isolated, spec, config or TasksConfig(), printed=printed)
    with load() as task:
        return _Checker(task, load).report()


def _isolated(spec: str, config: TasksConfig, **options: Any) -> IsolatedTask:
    """Returns the task loaded in a process of its own, built-in tasks too, because a node runs it like
    that."""
    alone: dict[str, Any] = {"builtin": True, "workers": 1, "load_timeout_s": config.score_timeout_s}
    task = isolate_as_set(spec, config, **alone, **options)
    assert isinstance(task, IsolatedTask)
    return task


@dataclass(slots=True)
class _Checker:
    """The check of one task: each part returns its figure, and adds what is worth knowing to `findings`."""

    task: IsolatedTask
    load: Callable[..., IsolatedTask]
    """Loads the task once more."""
    examples: list[Example] = field(default_factory=list[Example])
    """Examples that were drawn before the first failure."""
    findings: list[TaskFinding] = field(default_factory=list[TaskFinding])

    def report(self) -> TaskReport:
        task, examples = self.task, self.examples
        start = time.perf_counter()
        with self.guarded():
            examples.extend(draw(task))
        draw_s = time.perf_counter() - start
        if not self.findings:
            self.judge_draws(draw_s)
        scores_per_s = self.judge_scores()
        episode = self.judge_episode()
        shown = lets_through = None
        if scores_per_s is not None:
            shown = self.judge_demonstrations()
            if shown is not None and shown.right:
                self.findings = [finding for finding in self.findings if finding.what != INDIFFERENT]
            lets_through = self.judge_rights()
        held_out = sum(holds_out(task, example) for example in examples)
        seeds = Counter(example.key.seed for example in examples)
        return TaskReport(
            task=task.name,
            version=task.version,
            drawn=len(examples),
            distinct_share=_distinct_share(examples) if examples else None,
            held_out_share=held_out / len(examples) if examples else None,
            draws_per_s=len(examples) / draw_s if examples else None,
            scores_per_s=scores_per_s,
            sample=examples[0] if examples else None,
            lets_through=lets_through,
            findings=tuple(self.findings),
            episode=episode,
            rows=seeds[SEEDS[0]] if 0 < seeds[SEEDS[0]] < EXAMPLES_PER_SEED else None,
            demonstrations=shown,
        )

    def error(self, what: str, advice: str) -> None:
        self.findings.append(TaskFinding("error", what, advice))

    def warn(self, what: str, advice: str) -> None:
        self.findings.append(TaskFinding("warning", what, advice))

    @contextmanager
    def guarded(self, doing: str = "") -> Generator[None]:
        """Context that ends with a finding where the task fails. `doing`: what that begins with."""
        try:
            yield
        except (TaskError, JudgementLost) as error:
            self.error(doing + error.message, error.hint)

    def judge_draws(self, draw_s: float) -> None:
        if not self.examples:
            self.error(f"examples({SEEDS[0]}) yields nothing", "yield at least a few hundred examples")
            return
        with self.guarded("drawing again failed: "):
            self.judge_repeatability()
            self.judge_variety()
            if len(self.examples) / draw_s < SLOW_DRAWS_PER_S:
                self.warn(
                    f"drawing takes {1000 * draw_s / len(self.examples):.1f} ms per example",
                    "do slow work once, at the top of the file: peers draw your examples again",
                )

    def judge_repeatability(self) -> None:
        here = self.task.digest()
        for name, kind in here.no_data.items():
            self.warn(
                f"the column {name!r} is of type {kind}, which is not plain data:"
                " nodes cannot check that it stays the same",
                "yield texts, numbers, lists and dictionaries: a reward or reset() can build objects",
            )
        if here != self.task.digest():
            self.error(
                "two draws of the same seed differ",
                "draw only from random.Random(seed): no global random, clock or shared state",
            )
            return
        with self.load(random_hashes=True) as fresh:
            if here != fresh.digest():
                self.error(
                    "another process draws different examples",
                    "do not use hash() or the order of a set: both differ between Python processes",
                )

    def judge_variety(self) -> None:
        task, examples = self.task, self.examples
        held_out = sum(holds_out(task, example) for example in examples)
        if held_out == 0 and not evaluation_size_of(task):
            self.warn("no drawn prompt is held out for evaluation", "ask more different questions")
        if held_out == len(examples):
            self.error("every drawn prompt is held out for evaluation", "ask more different questions")
        if (distinct := _distinct_share(examples)) < 0.5:
            self.warn(f"{1 - distinct:.0%} of prompts are duplicates", "the policy may memorize them")
        seed, neighbour = (next(iter(task.examples(seed)), None) for seed in SEEDS[:2])
        if seed and neighbour and seed.prompt == neighbour.prompt:
            self.warn("two seeds begin with the same prompt", "let the seed change the examples' order")

    def judge_scores(self) -> float | None:
        """Returns the scored completions per second. None: nothing was scored."""
        task, examples = self.task, self.examples[:SCORED_EXAMPLES]
        with self.guarded():
            start = time.perf_counter()
            scored = [score_strictly(task, example, _probes(example)) for example in examples]
            seconds = time.perf_counter() - start
            # In another order: what a reward keeps from call to call must not show in a score.
            again = [score_strictly(task, example, _probes(example)) for example in reversed(examples)][::-1]
            alone = [
                tuple(score_strictly(task, example, [text])[0] for text in _probes(example))
                for example in examples[:ALONE_EXAMPLES]
            ]
            if scored:
                scores_per_s = sum(map(len, scored)) / seconds
                self.judge_values(scored, again, alone, scores_per_s)
                return scores_per_s
        return None

    def judge_values(self, scored: _Scored, again: _Scored, alone: _Scored, scores_per_s: float) -> None:
        """Judges the scores of the probes. Those of an environment are single turns, which need not score
        differently; and one that is not exchangeable may be random."""
        plain = not is_environment(self.task)
        rewards = _totals(scored)
        unstable = scored != again and (plain or self.task.exchangeable)
        unrewarded = plain and all(reward is None for row in rewards for reward in row)
        if unstable:
            self.error(
                "the same text scores differently the second time",
                "rewards must not use randomness, a clock or a model, or keep anything between calls",
            )
        if unrewarded:
            self.error("no completion gets a reward, only None", "return a number where the reward applies")
        told = [row for row in rewards if len(row) > len(WRONG_ANSWERS)]
        if plain and told and not any(map(_prefers_last, told)):
            self.warn(INDIFFERENT, "there is nothing to learn from equal rewards")
        if scores_per_s < SLOW_SCORES_PER_S:
            self.warn(
                f"{scores_per_s:.0f} completions scored per second",
                "every node scores the answers it hears of",
            )
        # By what is learned from: a number for `log_metric` may be about a whole group.
        if not (unstable or unrewarded) and rewards[: len(alone)] != _totals(alone):
            self.warn(
                "an answer scores differently alone than beside others",
                "a reward that compares answers (by a vote, for example) means nothing for a single one, as"
                " in `swarmnode eval` without --samples",
            )

    def judge_episode(self) -> Rehearsal | None:
        """Rehearses an episode three times and compares them. Returns None if the task is no environment."""
        task, examples = self.task, self.examples
        if not is_environment(task) or not examples:
            return None
        with self.guarded("no episode can be played: "):
            first, second = rehearse(task, examples[0]), rehearse(task, examples[0])
            with self.load(random_hashes=True) as fresh:
                assert is_environment(fresh)
                other = rehearse(fresh, examples[0])
            difference = difference_of(first, second) or difference_of(first, other)
            if task.exchangeable and difference:
                self.error(
                    f"the environment answers the same words differently the second time: {difference}",
                    "remove `exchangeable = True`, or derive what happens from the example's columns",
                )
            if total_reward(first.scores) is None:
                self.warn(
                    "the episode that was tried has no reward", "a better answer may be needed to earn one"
                )
            return replace(first, difference=difference)
        return None

    def judge_demonstrations(self) -> JudgedDemonstrations | None:
        """Returns how many demonstrations of the examples have full marks. None: there are none to judge."""
        task, given = self.task, Demonstrations()
        with self.guarded("demonstrations: "):
            found = [
                (example, texts)
                for example in self.examples
                if not holds_out(task, example) and (texts := given.of(task, example))
            ][:SCORED_EXAMPLES]
            if not found:
                self.judge_spelling()
                return None
            if is_environment(task) or judges_groups(task):
                what = "demonstrations are not used: the task answers back or compares answers"
                self.warn(what, f"remove the column {COLUMN!r}")
                return None
            rights = [right for example, _ in found if (right := find_right(task, example)) is not None]
            judged = [
                (text, example, reward, _best(rewards[: len(WRONG_ANSWERS)]))
                for example, texts in found
                for rewards in [rewards_of(task, example, [*WRONG_ANSWERS, *texts])]
                for text, reward in zip(texts, rewards[len(WRONG_ANSWERS) :], strict=True)
            ]
            best = _best([reward for reward, _ in rights])
            wrong = [
                (text, example, reward)
                for text, example, reward, nonsense in judged
                if reward is None or not nonsense < reward >= best - FULL_MARGIN * (best - nonsense)
            ]
            if wrong:
                text, example, reward = wrong[0]
                worth = "no reward" if reward is None else f"the reward {reward:g}"
                self.warn(
                    f"{len(wrong)} of {len(judged)} demonstrations do not get full marks and are not learnt"
                    f" from: for example, {text!r:.60} to {example.prompt!r:.60} gets {worth}",
                    "write answers that the task's own judge gives full marks",
                )
            return JudgedDemonstrations(len(judged), len(judged) - len(wrong))
        return None

    def judge_spelling(self) -> None:
        """Looks for a column whose name is nearly that of demonstrations, which no example has."""
        columns = {str(name).lower(): str(name) for example in self.examples for name in example.columns}
        if COLUMN not in columns.values() and (near := get_close_matches(COLUMN, columns, 1, SIMILAR)):
            self.warn(
                f"the column {columns[near[0]]!r:.60} is not read as demonstrations",
                f"rename it to {COLUMN!r} if it holds right answers to start from",
            )

    def judge_rights(self) -> dict[str, float] | None:
        """Returns the share of right answers that keep full marks, by injection. None: no right answer is
        known, or the judge failed."""
        task, passed = self.task, Counter[str]()
        try:
            found = [(example, find_right(task, example)) for example in self.examples[:SCORED_EXAMPLES]]
            rights = [(example, right[1]) for example, right in found if right is not None]
            for example, right in rights:
                passed.update(name for name, full in passed_with(task, example, right).items() if full)
            pairs = zip(rights, [*rights[1:], *rights[:1]], strict=True)
            rewards = [
                rewards_of(task, example, [right, other])
                for (example, right), (_, other) in pairs
                if other != right
            ]
        except (TaskError, JudgementLost):
            return None
        if passed:
            self.warn(
                "right answers get full marks even with text added that nobody asked for",
                "strangers can teach whatever a reward lets through: judge the whole answer where you can"
                " (rewards/README.md has strict rewards)",
            )
        if rewards and all(own is not None and other is not None and other >= own for own, other in rewards):
            self.warn(
                READS_NO_QUESTION, "compare with the example's answer: any answer of its kind counts now"
            )
        return {name: passed[name] / len(rights) for name in INJECTIONS} if rights else None


def _distinct_share(examples: Sequence[Example]) -> float:
    return len({(example.key.seed, example.prompt) for example in examples}) / len(examples)


def _best(rewards: Sequence[float | None]) -> float:
    """Returns the best of these rewards; 0, which a right answer exceeds, where there are none."""
    return max((reward for reward in rewards if reward is not None), default=0.0)


def _probes(example: Example) -> list[str]:
    """Returns some wrong answers and, last, the right one if the example tells it."""
    answer = answer_of(example)
    return [*WRONG_ANSWERS, *([] if answer is None else [answer])]


def _totals(scored: _Scored) -> list[list[float | None]]:
    return [[total_reward(scores) for scores in row] for row in scored]


def _prefers_last(rewards: Sequence[float | None]) -> bool:
    *others, right = rewards
    return right is not None and any(wrong is None or right > wrong for wrong in others)
