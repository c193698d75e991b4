"""`swarmnode eval`: the reward per task on held-out draws, of a checkpoint or of a model as it is."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.settings import (
    Assignments,
    ConfigFile,
    Home,
    Json,
    Model,
    Policy,
    Preset,
    TaskSpecs,
    load_settings,
    of_policy,
)

if TYPE_CHECKING:
    from swarmnode.node.offline import OfflineEvaluation

MOST_SAMPLES = 1024


def evaluate(
    model: Model = None,
    task: TaskSpecs = None,
    base: Annotated[
        bool, typer.Option("--base", help="The base model, without the trained adapter.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the best evaluation instead of the newest.")
    ] = False,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take the likeliest token instead of sampling.")
    ] = False,
    samples: Annotated[
        int,
        typer.Option("--samples", min=1, max=MOST_SAMPLES, help="Answers to each question, for pass@k."),
    ] = 1,
    passing_reward: Annotated[
        float, typer.Option("--passing-reward", help="With this reward or more an answer has passed.")
    ] = 1.0,
    policy: Policy = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Measure the newest checkpoint (or the best, or the base model) on questions that no node trains on.

    They are of the tasks that the node trained on, unless --task or --set tasks.names says otherwise. With
    --samples N each is asked N times, and pass@k (k = 1, 2, 4, ... up to N) says how likely it is that at
    least one of k answers passes.
    """
    # Tasks that are named here count, whatever the policy trains on.
    named = {"tasks.names": tuple(task), "tasks.mixes": ()} if task else {}
    settings = load_settings(
        home=home,
        preset=preset,
        config_file=config,
        assignments=set_,
        flags={"policy.model": model, **named},
    )
    settings = of_policy(settings, policy)
    import msgspec

    from swarmnode.node.offline import evaluate_offline

    here = ("--set", "command line", *([f"--config {config}"] if config else []))
    result = evaluate_offline(
        settings.config,
        settings.model,
        settings.paths,
        base=base,
        best=best,
        greedy=greedy,
        samples=samples,
        passing_reward=passing_reward,
        tasks_named=settings.origins["tasks.names"] in here,
    )
    if json:
        typer.echo(msgspec.json.encode(result).decode())
        return
    for line in _lines(result):
        typer.echo(line)


def _lines(result: "OfflineEvaluation") -> Iterator[str]:
    """A task a line: its mean reward, and pass@k where more than one answer was sampled."""
    several = result.samples > 1
    asked = f"{result.samples} answers each, " if several else ""
    on = f"{result.examples} held-out examples per task"
    yield f"{result.model}, {result.policy}, {on}, {asked}{result.sampling}"
    ks = list(result.pass_at_mean) if several else []
    if several:
        yield _row("", ["reward", *(f"pass@{k}" for k in ks)])
    rows = [(name, reward, result.pass_at[name]) for name, reward in result.per_task.items()]
    for name, reward, pass_at in (*rows, ("mean", result.mean, result.pass_at_mean)):
        yield _row(name, [_shown(reward), *(_shown(pass_at[k]) for k in ks)])
    if several:
        yield f"passed: a reward of {result.passing_reward:g} or more"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:12} {' '.join(f'{cell:8}' for cell in cells)}".rstrip()


def _shown(value: float | None) -> str:
    return "-" if value is None else format(value, ".3f")
