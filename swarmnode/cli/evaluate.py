"""`swarmnode eval`: the reward per task on held-out draws, of a checkpoint or of a model as it is."""

from typing import Annotated

import typer

from swarmnode.cli.settings import (
    Assignments,
    ConfigFile,
    Home,
    Json,
    Model,
    Preset,
    TaskSpecs,
    load_settings,
)


def evaluate(
    model: Model = None,
    task: TaskSpecs = None,
    base: Annotated[
        bool, typer.Option("--base", help="The base model, without the trained adapter.")
    ] = False,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take the likeliest token instead of sampling.")
    ] = False,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Measure the newest checkpoint (or the base model) on questions that no node trains on."""
    settings = load_settings(
        home=home,
        preset=preset,
        config_file=config,
        assignments=set_,
        flags={"policy.model": model, "tasks.names": tuple(task) if task else None},
    )
    import msgspec

    from swarmnode.node.offline import evaluate_offline

    result = evaluate_offline(settings.config, settings.model, settings.paths, base=base, greedy=greedy)
    if json:
        typer.echo(msgspec.json.encode(result).decode())
        return
    typer.echo(
        f"{result.model}, {result.policy}, {result.examples} held-out examples per task, {result.sampling}"
    )
    for name, reward in result.per_task.items():
        typer.echo(f"  {name:12} {'-' if reward is None else format(reward, '.3f')}")
    typer.echo(f"  {'mean':12} {'-' if result.mean is None else format(result.mean, '.3f')}")
