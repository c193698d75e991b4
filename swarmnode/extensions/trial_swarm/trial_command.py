"""`swarmnode swarm`: several real nodes on this machine; with a command, a private swarm."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.output import tell
from swarmnode.cli.settings import Assignments, Model, TaskSpecs
from swarmnode.extensions.private_swarms import swarm_commands
from swarmnode.extensions.trial_swarm.local_swarm import SwarmPlan, run_local_swarm

app = typer.Typer(invoke_without_command=True)
app.registered_commands += swarm_commands.app.registered_commands


@app.callback()
def swarm(
    context: typer.Context,
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=64, help="How many nodes.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of each node.")] = 30,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first node; the others count up.")] = 0,
    model: Model = None,
    task: TaskSpecs = None,
    home: Annotated[
        Path | None,
        typer.Option("--home", help="Keep the nodes' folders here; by default, a temporary folder."),
    ] = None,
    compare_alone: Annotated[
        bool, typer.Option("--compare-alone", help="Run each node once more without the others.")
    ] = False,
    homes: Annotated[
        int | None,
        typer.Option(
            "--homes",
            min=2,
            max=16,
            help="Run this many nodes, each in a home of its own behind a router, with a seed between; each "
            "is run once more alone. Needs Linux and root.",
        ),
    ] = None,
    set_: Assignments = None,
) -> None:
    """Run a small swarm on loopback and print what each node knew and what it learnt from the others. With a
    command: create and manage a private swarm.

    The nodes know different things, unless a model or tasks are named. The last line printed is JSON: peer,
    first and last reward, trained groups per peer, tasks known and learnt, and right answers from others, for
    every node; with --compare-alone or --homes also alone_reward_last, of the same node with
    exchange.enabled=false.
    """
    if context.invoked_subcommand is not None:
        return
    plan = SwarmPlan(
        nodes=homes or nodes,
        rounds=rounds,
        seed=seed,
        model=model,
        tasks=tuple(task or ()),
        assignments=tuple(set_ or ()),
        compare_alone=compare_alone or homes is not None,
        homes=homes is not None,
    )
    results = run_local_swarm(plan, home, show=partial(typer.echo, err=True))
    tell(True, {"nodes": results}, ())
