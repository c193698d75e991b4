"""`swarmnode pipeline`: plan an iteration of a pipeline before any node runs it."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from swarmnode.cli.output import Json, tell
from swarmnode.errors import ConfigError, StorageError
from swarmnode.extensions.pipeline.scheduling.instance import load_instance
from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort, search
from swarmnode.extensions.pipeline.scheduling.plan import encode_plan
from swarmnode.extensions.pipeline.scheduling.plan_figures import PlanFigures, figures_of
from swarmnode.extensions.pipeline.scheduling.schedule import Scheduled, SearchBudget, schedule
from swarmnode.machine.storage import replace_file

app = typer.Typer(help="Plan a pipeline of peers that skips stages.", no_args_is_help=True)

SECONDS = 10.0
"""Default CPU seconds of a search."""


@app.callback()
def pipeline() -> None:
    """Keeps `plan` a sub-command while it is the only one."""


@app.command()
def plan(
    instance: Annotated[
        Path, typer.Argument(metavar="INSTANCE", help="Nodes, links and stages: a JSON or TOML file.")
    ],
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search.")] = 0,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0.0, help=f"CPU seconds of each search; {SECONDS:g} by default."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Changes that each search tries: the same plan on every machine."
        ),
    ] = None,
    free_map: Annotated[
        bool, typer.Option("--free-map", help="Search which node holds which stage, too.")
    ] = False,
    json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan to this JSON file.")] = None,
) -> None:
    """Plan one iteration: makespan, paths, and how busy and full each node is.

    Exits with 1 when the plan breaks a rule.
    """
    if seconds is not None and steps is not None:
        raise ConfigError("--seconds and --steps cannot be combined", hint="use one of them")
    if out is not None and not out.absolute().parent.is_dir():
        # Refuse this before the search, not after it.
        raise StorageError(f"there is no folder for {out}", hint="create it, or name another file")
    loaded = load_instance(instance)
    budget = SearchBudget(steps, None if steps is not None else SECONDS if seconds is None else seconds)
    found = schedule(loaded, seed=seed, budget=budget)
    if free_map:
        effort = PlacementEffort() if steps is None else PlacementEffort(swaps=steps // 12, steps=steps)
        placed = search(loaded, seed=seed, effort=effort).plan
        own = schedule(placed.instance, seed=seed, budget=budget, start=placed)
        found = min(found, own, key=lambda each: each.makespan_s)
    figures = figures_of(found.plan)
    tell(json, figures, chain(_summary(instance.name, found, figures), [_occupation(figures)]))
    if out is not None:
        try:
            replace_file(out, encode_plan(found.plan))
        except OSError as error:
            raise StorageError(f"cannot write {out}: {error.strerror}", hint="name another file") from error
    if figures.violations:
        raise typer.Exit(1)


def _summary(name: str, found: Scheduled, figures: PlanFigures) -> Iterator[str]:
    stages = len(figures.stages)
    visited = stages * (1 - figures.skip_ratio)
    yield f"{name}: {len(figures.nodes)} nodes, {stages} stages, {visited:g} visited by a micro-batch"
    yield f"  in flight    {figures.in_flight} micro-batches, {figures.waves} waves an iteration"
    per_s = figures.makespan_s / figures.micro_batches
    yield f"  makespan     {figures.makespan_s:.2f} s, {per_s:.2f} s per micro-batch"
    yield f"  planning     {found.steps} changes tried"
    yield f"  skip ratio   {figures.skip_ratio:.1%}"
    yield f"  slots        {figures.slots_used} of {figures.slots} used"
    yield f"  plan         sha256 {figures.digest[:16]}"
    if not figures.violations:
        yield "  violations   none: order, gaps, skip ratio, slots and shares of stages hold"
    for broken in figures.violations:
        yield f"  violation    {broken}"


def _occupation(figures: PlanFigures) -> Table:
    """Returns the nodes by stage, with how busy and how full they are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "busy", "visits/needed/slots", "node", "name", "busy", "slots"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    stages = {use.stage: use for use in figures.stages}
    for use in figures.nodes:
        # The figures of a stage are shown beside its first node.
        first = stages.pop(use.stage, None)
        own = ("", "", "")
        if first is not None:
            share = f"{first.visits}/{first.least_visits}/{first.slots}"
            own = (f"{first.stage}", f"{first.utilisation:.0%}", share)
        busy = f"{use.utilisation:.0%}"
        table.add_row(*own, f"{use.node}", Text(use.name), busy, f"{use.slots_used}/{use.slots}")
    return table
