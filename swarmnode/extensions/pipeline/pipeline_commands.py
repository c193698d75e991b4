"""`swarmnode pipeline`: plan an iteration of a pipeline of peers before anybody runs one."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.settings import Json
from swarmnode.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.extensions.pipeline.plans.report import Figures, Study
    from swarmnode.extensions.pipeline.scheduling.instance import Instance
    from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort
    from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget

app = typer.Typer(help="Plan a pipeline of peers that skips stages.", no_args_is_help=True)

SECONDS = 10.0
"""CPU seconds of a search, unless told otherwise."""

NARROWEST, WIDEST = 80, 120
"""Columns of the text chart; where there is no terminal, as many as it would have."""


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
    averaging: Annotated[
        bool,
        typer.Option(
            "--averaging",
            help="Average gradients, 268 MB a stage, at the end; a file that says how is not overruled.",
        ),
    ] = False,
    gantt: Annotated[
        str, typer.Option("--gantt", metavar="text|FILE.png", help="Where to draw who does what, when.")
    ] = "text",
    json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan to this JSON file.")] = None,
) -> None:
    """Plan one iteration: makespan, bound, utilisation, Gantt chart, comparison with the full pipeline.

    Exits with 1 when the plan breaks a rule.
    """
    if seconds is not None and steps is not None:
        raise ConfigError("--seconds and --steps contradict each other", hint="give one of them")
    picture = _picture(gantt)
    _check_folders([path for path in (picture, out) if path is not None])
    import msgspec

    from swarmnode.extensions.pipeline.plans.report import study
    from swarmnode.extensions.pipeline.scheduling.instance import load_instance
    from swarmnode.extensions.pipeline.scheduling.plan import encode_plan
    from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget

    loaded = _with_averaging(load_instance(instance), averaging)
    budget = SearchBudget(steps, None if steps is not None else SECONDS if seconds is None else seconds)
    effort = _effort(loaded, budget) if free_map else None
    result = study(loaded, seed=seed, budget=budget, effort=effort)
    if json:
        typer.echo(msgspec.json.encode(result.figures).decode())
    else:
        _show(instance.name, result, chart=picture is None)
    if picture is not None:
        from swarmnode.extensions.pipeline.plans.gantt import png_chart

        _write(picture, png_chart(result.plan, result.timeline), quiet=json)
    if out is not None:
        _write(out, encode_plan(result.plan), quiet=json)
    if result.figures.violations:
        raise typer.Exit(1)


def _picture(gantt: str) -> Path | None:
    if gantt == "text":
        return None
    if not gantt.lower().endswith(".png"):
        raise ConfigError(
            f"cannot draw a Gantt chart to {gantt!r}", hint="--gantt text, or a file named *.png"
        )
    return Path(gantt)


def _check_folders(files: list[Path]) -> None:
    """Refuse files that cannot be written before the search, not after it."""
    for path in files:
        if not path.absolute().parent.is_dir():
            raise StorageError(f"there is no folder for {path}", hint="create it, or name another file")


def _with_averaging(instance: "Instance", asked: bool) -> "Instance":
    from swarmnode.extensions.pipeline.scheduling.instance import (
        ACTIVATION_BYTES,
        GRADIENT_BYTES,
        HOP_OVERHEAD_S,
        with_averaging,
    )

    if not asked or instance.averaging is not None:
        return instance
    return with_averaging(
        instance, GRADIENT_BYTES, activation_bytes=ACTIVATION_BYTES, overhead_s=HOP_OVERHEAD_S
    )


def _effort(instance: "Instance", budget: "SearchBudget") -> "PlacementEffort":
    """Effort of the search for a stage map: its own, or as many changes as the other searches try."""
    from swarmnode.extensions.pipeline.scheduling.instance import agents
    from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort

    if budget.steps is None:
        return PlacementEffort()
    tasks = budget.steps * len(agents(instance)) * instance.waves * (2 * instance.path_length + 1)
    return PlacementEffort(moves=budget.steps, polish=tasks, schedule=tasks)


def _write(path: Path, data: bytes, *, quiet: bool) -> None:
    from swarmnode.machine.storage import replace_file

    try:
        replace_file(path, data)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint="name another file") from error
    if not quiet:
        typer.echo(f"wrote {path}")


def _show(name: str, result: "Study", *, chart: bool) -> None:
    from rich.console import Console

    from swarmnode.extensions.pipeline.plans.gantt import text_chart

    console, figures = Console(), result.figures
    for line in _summary(name, figures, len(result.plan.instance.stages)):
        typer.echo(line)
    console.print(_comparison(figures))
    console.print(_occupation(figures))
    if chart:
        width = min(max(console.width, NARROWEST), WIDEST)
        typer.echo(text_chart(result.plan, result.timeline, width))


def _summary(name: str, figures: "Figures", stage_count: int) -> Iterator[str]:
    visited = stage_count * (1 - figures.skip_ratio)
    yield f"{name}: {len(figures.nodes)} nodes, {stage_count} stages, {visited:g} visited by a micro-batch"
    yield f"  in flight    {figures.in_flight} micro-batches, {figures.waves} waves an iteration"
    per_s = figures.makespan_s / figures.micro_batches
    yield f"  makespan     {figures.makespan_s:.2f} s, {per_s:.2f} s per micro-batch"
    yield f"  lower bound  {figures.bound_s:.2f} s on this stage map, gap {figures.gap:.1%}"
    if figures.any_map_bound_s is not None:
        yield f"               {figures.any_map_bound_s:.2f} s on any stage map"
    yield f"  planning     {figures.plan_cpu_s:.1f} CPU s, {figures.steps} steps, seed {figures.seed}"
    yield f"  skip ratio   {figures.skip_ratio:.1%}"
    yield f"  slots        {figures.slots_used} of {figures.slots} used"
    yield f"  plan         sha256 {figures.digest[:16]}"
    longest_s = max(use.averaging_s for use in figures.stages)
    if longest_s:
        yield f"  averaging    {longest_s:.2f} s in the slowest stage"
    if not figures.violations:
        yield "  violations   none: order, gaps, skip ratio, slots and shares of stages hold"
    for broken in figures.violations:
        yield f"  violation    {broken}"


def _comparison(figures: "Figures") -> "Table":
    """All contenders on the same micro-batches; savings against the fastest full pipeline."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{figures.micro_batches} micro-batches", no_wrap=True)
    for heading in ("seconds", "each", "vs full", "in flight", "waves", "CPU s"):
        table.add_column(heading, justify="right", no_wrap=True)
    full = [each.seconds for each in figures.compared if not each.skips]
    total = figures.micro_batches
    for each in figures.compared:
        saved = f"{each.seconds / min(full) - 1:+.1%}" if full else "-"
        table.add_row(
            each.name,
            f"{each.seconds:.2f}",
            f"{each.seconds / total:.2f}",
            saved,
            f"{each.in_flight}",
            f"{each.waves:.3g}",
            f"{each.cpu_s:.1f}",
        )
    return table


def _occupation(figures: "Figures") -> "Table":
    """Nodes by stage: how busy they are, and how full."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "busy", "visits/needed/slots", "node", "name", "busy", "slots"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    stages = {use.stage: use for use in figures.stages}
    for use in figures.nodes:
        # The figures of a stage stand beside the first of its nodes.
        first = stages.pop(use.stage, None)
        own = ("", "", "")
        if first is not None:
            share = f"{first.visits}/{first.least_visits}/{first.slots}"
            own = (f"{first.stage}", f"{first.utilisation:.0%}", share)
        busy = f"{use.utilisation:.0%}"
        table.add_row(*own, f"{use.node}", Text(use.name), busy, f"{use.slots_used}/{use.slots}")
    return table
