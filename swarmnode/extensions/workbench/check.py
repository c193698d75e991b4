"""Is this task fit for a swarm? Draws and scores it the way strangers will, and says what to mend.

swarmnode task check SPEC -> [check_task] -> TaskReport

Peers draw an example again from its key and score its completions by themselves, so the first question is
always whether the same numbers give the same examples: twice in one process, and in a fresh one, where Python
hashes strings differently. An environment is asked the same of an episode. Neither is ours: whatever the file
does, there is a report.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from swarmnode.chat import Turn
from swarmnode.errors import JudgementLost, TaskError
from swarmnode.extensions.workbench.probes import (
    INJECTIONS,
    WRONG_ANSWERS,
    answer_of,
    find_right,
    passed_with,
    rewards_of,
)
from swarmnode.extensions.workbench.rehearsal import difference_of, rehearse
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.drawing.demonstrations import COLUMN, Demonstrations
from swarmnode.tasks.drawing.draw_digest import EXAMPLES_PER_SEED, SEEDS, draw
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate_as_set
from swarmnode.tasks.task import (
    Task,
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
class EpisodeReport:
    """An episode of an environment, played several times without a policy (rehearsal.py)."""

    turns: tuple[Turn, ...]
    scores: Scores
    difference: str
    """Difference in observations or scores between two plays or two processes. Empty: there is none."""

    @property
    def same(self) -> bool:
        """True if every play gave the same observations and rewards."""
        return not self.difference


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
    episode: EpisodeReport | None = None
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
        examples, draw_s, failure = _timed_draw(task)
        findings = [failure] if failure else list(_judge_draws(task, load, examples, draw_s))
        scores_per_s, score_findings = _judge_scores(task, examples[:SCORED_EXAMPLES])
        episode, episode_findings = _judge_episode(task, load, examples)
        scored = [] if scores_per_s is None else examples[:SCORED_EXAMPLES]
        shown, shown_findings = _judge_demonstrations(task, [] if scores_per_s is None else examples)
        if shown is not None and shown.right:
            score_findings = [finding for finding in score_findings if finding.what != INDIFFERENT]
        lets_through, right_findings = _judge_rights(task, scored)
        prompts = [example.prompt for example in examples]
        seeds = Counter(example.key.seed for example in examples)
        return TaskReport(
            task=task.name,
            version=task.version,
            drawn=len(examples),
            distinct_share=_distinct_share(examples) if examples else None,
            held_out_share=sum(holds_out(task, one) for one in examples) / len(prompts) if prompts else None,
            draws_per_s=len(examples) / draw_s if examples else None,
            scores_per_s=scores_per_s,
            sample=examples[0] if examples else None,
            lets_through=lets_through,
            findings=(*findings, *score_findings, *episode_findings, *shown_findings, *right_findings),
            episode=episode,
            rows=seeds[SEEDS[0]] if 0 < seeds[SEEDS[0]] < EXAMPLES_PER_SEED else None,
            demonstrations=shown,
        )


def _distinct_share(examples: Sequence[Example]) -> float:
    return len({(example.key.seed, example.prompt) for example in examples}) / len(examples)


def _isolated(spec: str, config: TasksConfig, **options: Any) -> IsolatedTask:
    """Returns the task loaded in a process of its own, built-in tasks too, because a node runs it like
    that."""
    alone: dict[str, Any] = {"builtin": True, "workers": 1, "load_timeout_s": config.score_timeout_s}
    task = isolate_as_set(spec, config, **alone, **options)
    assert isinstance(task, IsolatedTask)
    return task


def _timed_draw(task: Task) -> tuple[list[Example], float, TaskFinding | None]:
    """Returns the examples up to the first failure, and the seconds that they took."""
    examples: list[Example] = []
    start = time.perf_counter()
    try:
        examples.extend(draw(task))
    except (TaskError, JudgementLost) as error:
        return examples, time.perf_counter() - start, TaskFinding("error", error.message, error.hint)
    return examples, time.perf_counter() - start, None


def _judge_draws(
    task: IsolatedTask, load: Callable[..., IsolatedTask], examples: list[Example], draw_s: float
) -> Iterator[TaskFinding]:
    if not examples:
        yield TaskFinding(
            "error", f"examples({SEEDS[0]}) yields nothing", "yield at least a few hundred examples"
        )
        return
    try:
        yield from _judge_repeatability(task, load)
    except (TaskError, JudgementLost) as error:
        yield TaskFinding("error", f"the second draw failed: {error.message}", error.hint)
        return
    yield from _judge_variety(task, examples)
    if len(examples) / draw_s < SLOW_DRAWS_PER_S:
        yield TaskFinding(
            "warning",
            f"drawing takes {1000 * draw_s / len(examples):.1f} ms per example",
            "prepare slow things once at the top of the file: peers draw your examples again",
        )


def _judge_repeatability(task: IsolatedTask, load: Callable[..., IsolatedTask]) -> Iterator[TaskFinding]:
    here = task.digest()
    for name, kind in here.no_data.items():
        yield TaskFinding(
            "warning",
            f"the column {name!r} is of type {kind}, which is no data: nobody can tell if it stays the same",
            "yield texts, numbers, lists and dictionaries: a reward or reset() can make objects of them",
        )
    if here != task.digest():
        yield TaskFinding(
            "error",
            "two draws of the same seed differ",
            "draw from random.Random(seed) only: no global random, clock or shared state",
        )
        return
    with load(random_hashes=True) as fresh:
        if here != fresh.digest():
            yield TaskFinding(
                "error",
                "another process draws other examples",
                "do not use hash() or the order of a set: Python changes both in each process",
            )


def _judge_variety(task: Task, examples: Sequence[Example]) -> Iterator[TaskFinding]:
    prompts = [example.prompt for example in examples]
    held_out = sum(holds_out(task, example) for example in examples)
    if held_out == 0 and not evaluation_size_of(task):
        yield TaskFinding(
            "warning", "no drawn prompt is held out for evaluation", "ask more different questions"
        )
    if held_out == len(prompts):
        yield TaskFinding(
            "error", "every drawn prompt is held out for evaluation", "ask more different questions"
        )
    if (distinct := _distinct_share(examples)) < 0.5:
        yield TaskFinding(
            "warning", f"{1 - distinct:.0%} of prompts are repetitions", "the policy may learn them by heart"
        )
    seed, neighbour = (next(iter(task.examples(seed)), None) for seed in SEEDS[:2])
    if seed and neighbour and seed.prompt == neighbour.prompt:
        yield TaskFinding(
            "warning", "two seeds begin with the same prompt", "let the seed change the examples' order"
        )


def _judge_scores(task: Task, examples: list[Example]) -> tuple[float | None, list[TaskFinding]]:
    """Returns the scored completions per second, and findings on the scores."""
    start = time.perf_counter()
    try:
        scored = [score_strictly(task, example, _probes(example)) for example in examples]
        seconds = time.perf_counter() - start
        # In another order: what a reward keeps from call to call must not show in a score.
        again = [score_strictly(task, example, _probes(example)) for example in reversed(examples)][::-1]
        alone = [
            tuple(score_strictly(task, example, [text])[0] for text in _probes(example))
            for example in examples[:ALONE_EXAMPLES]
        ]
    except (TaskError, JudgementLost) as error:
        return None, [TaskFinding("error", error.message, error.hint)]
    if not scored:
        return None, []
    scores_per_s = sum(map(len, scored)) / seconds
    found = list(_judge_values(task, scored, again, scores_per_s))
    fails = any(finding.level == "error" for finding in found)
    return scores_per_s, [*found, *(() if fails else _compares(scored, alone))]


def _judge_episode(
    task: IsolatedTask, load: Callable[..., IsolatedTask], examples: Sequence[Example]
) -> tuple[EpisodeReport | None, list[TaskFinding]]:
    """Rehearses an episode three times and compares them. The report is None if the task is no
    environment."""
    if not is_environment(task) or not examples:
        return None, []
    try:
        first, second = rehearse(task, examples[0]), rehearse(task, examples[0])
        with load(random_hashes=True) as fresh:
            assert is_environment(fresh)
            other = rehearse(fresh, examples[0])
    except (TaskError, JudgementLost) as error:
        return None, [TaskFinding("error", f"no episode can be played: {error.message}", error.hint)]
    difference = difference_of(first, second) or difference_of(first, other)
    found: list[TaskFinding] = []
    if task.exchangeable and difference:
        found.append(
            TaskFinding(
                "error",
                f"the same words are answered differently the second time: {difference}",
                "leave out `exchangeable = True`, or draw what happens from the example's columns",
            )
        )
    if total_reward(first.scores) is None:
        found.append(
            TaskFinding("warning", "the episode that was tried has no reward", "it may need better words")
        )
    return EpisodeReport(first.turns, first.scores, difference), found


def _judge_demonstrations(
    task: Task, examples: Sequence[Example]
) -> tuple[JudgedDemonstrations | None, list[TaskFinding]]:
    """Returns how many demonstrations of these examples have full marks, and findings on them."""
    given = Demonstrations()
    try:
        found = [
            (example, texts)
            for example in examples
            if not holds_out(task, example) and (texts := given.of(task, example))
        ][:SCORED_EXAMPLES]
        if not found:
            return None, list(_misspelt(examples))
        if is_environment(task) or judges_groups(task):
            what = "demonstrations are not used: the task answers back or compares answers"
            return None, [TaskFinding("warning", what, f"leave out the column {COLUMN!r}")]
        rights = [right for example, _ in found if (right := find_right(task, example)) is not None]
        judged = [
            (text, example, reward, _best(rewards[: len(WRONG_ANSWERS)]))
            for example, texts in found
            for rewards in [rewards_of(task, example, [*WRONG_ANSWERS, *texts])]
            for text, reward in zip(texts, rewards[len(WRONG_ANSWERS) :], strict=True)
        ]
    except (TaskError, JudgementLost) as error:
        return None, [TaskFinding("error", f"demonstrations: {error.message}", error.hint)]
    best = _best([reward for reward, _ in rights])
    wrong = [
        (text, example, reward)
        for text, example, reward, nonsense in judged
        if reward is None or not nonsense < reward >= best - FULL_MARGIN * (best - nonsense)
    ]
    shown = JudgedDemonstrations(len(judged), len(judged) - len(wrong))
    if not wrong:
        return shown, []
    text, example, reward = wrong[0]
    worth = "no reward" if reward is None else f"the reward {reward:g}"
    what = (
        f"{len(wrong)} of {len(judged)} demonstrations do not have full marks and are not learnt from:"
        f" {text!r:.60} to {example.prompt!r:.60}, for example, has {worth}"
    )
    return shown, [TaskFinding("warning", what, "write what the task's own judge gives full marks")]


def _best(rewards: Sequence[float | None]) -> float:
    """Returns the best of these rewards; 0, which a right answer exceeds, where there are none."""
    return max((reward for reward in rewards if reward is not None), default=0.0)


def _misspelt(examples: Sequence[Example]) -> Iterator[TaskFinding]:
    """Yields a finding on a column whose name is nearly that of demonstrations, which no example has."""
    columns = {str(name).lower(): str(name) for example in examples for name in example.columns}
    if COLUMN not in columns.values() and (near := get_close_matches(COLUMN, columns, 1, SIMILAR)):
        yield TaskFinding(
            "warning",
            f"the column {columns[near[0]]!r:.60} is not read as demonstrations",
            f"call it {COLUMN!r} if it holds right answers to begin with",
        )


def _judge_rights(
    task: Task, examples: Sequence[Example]
) -> tuple[dict[str, float] | None, list[TaskFinding]]:
    """Returns the share of right answers that keep full marks, by injection, and findings on right answers.
    None: no right answer is known, or the judge failed."""
    passed: Counter[str] = Counter()
    try:
        found = [(example, find_right(task, example)) for example in examples]
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
        return None, []
    findings: list[TaskFinding] = []
    if passed:
        findings.append(
            TaskFinding(
                "warning",
                "right answers have full marks with text in them that nobody asked for",
                "strangers can teach what a reward lets through: read all of the answer where you can"
                " (rewards/README.md has strict ones)",
            )
        )
    if rewards and all(own is not None and other is not None and other >= own for own, other in rewards):
        findings.append(
            TaskFinding(
                "warning",
                READS_NO_QUESTION,
                "compare with the example's answer: any answer of its kind counts now",
            )
        )
    return {name: passed[name] / len(rights) for name in INJECTIONS} if rights else None, findings


def _probes(example: Example) -> list[str]:
    """Returns some wrong answers and, last, the right one if the example tells it."""
    answer = answer_of(example)
    return [*WRONG_ANSWERS, *([] if answer is None else [answer])]


def _compares(scored: _Scored, alone: _Scored) -> Iterator[TaskFinding]:
    # By what is learned from: a number for `log_metric` may be about a whole group.
    if _totals(scored[: len(alone)]) != _totals(alone):
        yield TaskFinding(
            "warning",
            "an answer scores otherwise alone than beside others",
            "a reward that compares answers, by a vote say, means nothing for a single one, as in"
            " `swarmnode eval` without --samples",
        )


def _judge_values(task: Task, scored: _Scored, again: _Scored, scores_per_s: float) -> Iterator[TaskFinding]:
    """Yields findings on the scores of the probes. Those of an environment are single turns, which need not
    score differently; and one that is not exchangeable may be random."""
    plain = not is_environment(task)
    if scored != again and (plain or task.exchangeable):
        yield TaskFinding(
            "error",
            "the same text scores differently the second time",
            "no randomness, clock or model in rewards, and nothing that they keep from call to call",
        )
    rewards = _totals(scored)
    if plain and all(reward is None for row in rewards for reward in row):
        yield TaskFinding(
            "error", "no completion gets any reward, only None", "return a number where the reward applies"
        )
    told = [row for row in rewards if len(row) > len(WRONG_ANSWERS)]
    if plain and told and not any(map(_prefers_last, told)):
        yield TaskFinding("warning", INDIFFERENT, "there is nothing to learn from equal rewards")
    if scores_per_s < SLOW_SCORES_PER_S:
        yield TaskFinding(
            "warning",
            f"{scores_per_s:.0f} completions scored per second",
            "every node scores what it hears of",
        )


def _totals(scored: _Scored) -> list[list[float | None]]:
    return [[total_reward(scores) for scores in row] for row in scored]


def _prefers_last(rewards: Sequence[float | None]) -> bool:
    *others, right = rewards
    return right is not None and any(wrong is None or right > wrong for wrong in others)
