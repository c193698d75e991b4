"""`swarmnode swarm`: several real nodes on this machine, each a process of its own, over real libp2p."""

from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.settings import Assignments, Model, TaskSpecs


def swarm(
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=64, help="How many nodes.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of each node.")] = 30,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first node; the others count up.")] = 0,
    model: Model = None,
    task: TaskSpecs = None,
    home: Annotated[
        Path | None, typer.Option("--home", help="Keep the nodes' folders here; a temporary one otherwise.")
    ] = None,
    equals: Annotated[
        bool, typer.Option("--equals", help="All nodes start from one policy, not from different ones.")
    ] = False,
    compare_alone: Annotated[
        bool, typer.Option("--compare-alone", help="Run each node once more without the others.")
    ] = False,
    set_: Assignments = None,
) -> None:
    """Run a small swarm on loopback and print what each node knew and what it learnt from the others.

    The nodes know different things, unless a model or tasks are named. The last line printed is JSON: peer,
    first and last reward, trained groups per peer, tasks known and learnt, and right answers of others of
    every node; with --compare-alone also alone_reward_last, of the same node with exchange.enabled=false.
    """
    import sys

    import msgspec

    from swarmnode.node.local_swarm import SwarmPlan, run_local_swarm

    plan = SwarmPlan(
        nodes=nodes,
        rounds=rounds,
        seed=seed,
        model=model,
        tasks=tuple(task or ()),
        assignments=tuple(set_ or ()),
        equals=equals,
        compare_alone=compare_alone,
    )
    if sys.stderr.isatty():
        from rich.console import Console

        from swarmnode.node.swarm_panel import SwarmPanel

        panel = SwarmPanel(Console(stderr=True))
        results = run_local_swarm(plan, home, panel.say, panel.watch)
    else:
        results = run_local_swarm(plan, home, show=lambda line: print(line, file=sys.stderr, flush=True))
    print(msgspec.json.encode({"nodes": results}).decode())
