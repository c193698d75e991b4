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
    set_: Assignments = None,
) -> None:
    """Run a small swarm on loopback and print what each node learnt, from itself and from the others.

    The last line printed is JSON: peer, first and last reward, and trained groups per peer of every node.
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
    )
    results = run_local_swarm(plan, home, show=lambda line: print(line, file=sys.stderr, flush=True))
    print(msgspec.json.encode({"nodes": results}).decode())
