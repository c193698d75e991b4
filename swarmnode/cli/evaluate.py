"""`swarmnode eval`: the reward per task on held-out draws, of a checkpoint or of a model as it is."""

from typing import Annotated

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
    policy: Policy = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Measure the newest checkpoint (or the best, or the base model) on questions that no node trains on.

    They are of the tasks that the node trained on, unless --task or --set tasks.names says otherwise.
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
        tasks_named=settings.origins["tasks.names"] in here,
    )
    if json:
        typer.echo(msgspec.json.encode(result).decode())
        return
    typer.echo(
        f"{result.model}, {result.policy}, {result.examples} held-out examples per task, {result.sampling}"
    )
    for name, reward in result.per_task.items():
        typer.echo(f"  {name:12} {'-' if reward is None else format(reward, '.3f')}")
    typer.echo(f"  {'mean':12} {'-' if result.mean is None else format(result.mean, '.3f')}")
