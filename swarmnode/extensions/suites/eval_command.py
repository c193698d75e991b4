"""`swarmnode eval`: the reward per task on held-out draws, or the score of standard suites, of a checkpoint
or of a model as it is."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import (
    Assignments,
    Base,
    Best,
    ConfigFile,
    Greedy,
    Home,
    Model,
    Policy,
    Preset,
    RunName,
    TaskSpecs,
    settings_of_trained,
)
from swarmnode.errors import ConfigError
from swarmnode.node.commands.offline import OfflineEvaluation, evaluate_offline
from swarmnode.node.showing.figures import figure

MOST_SAMPLES = 1024


def evaluate(
    model: Model = None,
    task: TaskSpecs = None,
    base: Base = False,
    best: Best = False,
    greedy: Greedy = False,
    samples: Annotated[
        int,
        typer.Option("--samples", min=1, max=MOST_SAMPLES, help="Answers to each question, for pass@k."),
    ] = 1,
    passing_reward: Annotated[
        float, typer.Option("--passing-reward", help="An answer with this reward or more has passed.")
    ] = 1.0,
    suite: Annotated[
        list[Path] | None,
        typer.Option(
            "--suite",
            help="A file or folder of GSM8K, MATH, IFEval or HumanEval: base model and checkpoint side by"
            " side; may be repeated.",
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            "--shots",
            min=0,
            help="Worked examples before a question of a suite. By default none for a chat model, otherwise"
            " the usual number.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Only this many questions of each suite, the first ones."),
    ] = None,
    run: RunName = None,
    policy: Policy = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Measure the newest checkpoint (or the best, or the base model) on questions that no node trains on.

    The questions come from the tasks that the node trained on, unless --task or --set tasks.names names
    others. With --samples N each is asked N times; pass@k (k = 1, 2, 4, ... up to N) is the chance that at
    least one of k answers passes, and maj@k that the majority of k answers does.

    With --suite the questions are those of the given files, which are never trained on.
    """
    _check_suite_options(suite, task, shots, limit)
    # Tasks that are named here count, whatever the policy trains on.
    named = {"tasks.names": tuple(task), "tasks.mixes": ()} if task else {}
    settings = settings_of_trained(
        home=home, preset=preset, config=config, set_=set_, model=model, run=run, policy=policy, named=named
    )
    if suite:
        from swarmnode.extensions.suites.suite_evaluation import evaluate_suites

        measured = evaluate_suites(
            settings, suite,
            base=base, best=best, greedy=greedy, samples=samples, shots=shots, limit=limit,
        )  # fmt: skip
        tell(json, measured, measured.lines())
        if not measured.measured:
            raise typer.Exit(1)
        return
    result = evaluate_offline(
        settings,
        base=base,
        best=best,
        greedy=greedy,
        samples=samples,
        passing_reward=passing_reward,
    )
    tell(json, result, _lines(result))


def _check_suite_options(
    suite: Sequence[Path] | None, task: Sequence[str] | None, shots: int | None, limit: int | None
) -> None:
    """Refuse what would be ignored."""
    if suite and task:
        raise ConfigError("--suite and --task cannot be combined", hint="run one evaluation after the other")
    if not suite and (shots is not None or limit is not None):
        raise ConfigError("--shots and --limit apply only to suites", hint="name one: --suite FILE")


def _lines(result: OfflineEvaluation) -> Iterator[str]:
    """A task a line: its mean reward, and pass@k where more than one answer was sampled."""
    several = result.samples > 1
    asked = f"{result.samples} answers each, " if several else ""
    on = f"{result.examples} held-out examples per task"
    how = f"{asked}{result.sampling}, at most {result.max_tokens} tokens"
    yield f"{result.model}, {result.policy}, {on}, {how}"
    ks = list(result.pass_at_mean) if several else []
    votes = ks[1:]
    if several:
        yield _row("", ["reward", *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in votes)])
    for name, reward in result.per_task.items():
        pass_at, majority_at = result.pass_at[name], result.majority_at[name]
        cells = [reward, *(pass_at[k] for k in ks), *(majority_at[k] for k in votes)]
        yield _row(name, map(figure, cells))
    yield _row("mean", map(figure, [result.mean, *(result.pass_at_mean[k] for k in ks)]))
    if several:
        yield f"passed: a reward of {result.passing_reward:g} or more"
    for name, judges in result.judged_by.items():
        if "agreement" in judges:
            yield f"{name}: no reference answers, so judged by what most of the other answers say"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"  {name:12} {' '.join(f'{cell:8}' for cell in cells)}".rstrip()
