"""`swarmnode task`: the built-in tasks, and the check that a file of your own is ready to train on."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.settings import Json

if TYPE_CHECKING:
    from swarmnode.tasks.check import TaskReport

app = typer.Typer(help="List, look at and check tasks.", no_args_is_help=True)

Spec = Annotated[str, typer.Argument(metavar="TASK", help="A built-in task's name, or a Python file.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """Print the built-in tasks with an example of each."""
    import msgspec

    from swarmnode.tasks.loader import load_tasks

    tasks = load_tasks(["builtin"])
    if json:
        typer.echo(msgspec.json.encode([{"name": t.name, "version": t.version} for t in tasks]).decode())
        return
    for task in tasks:
        typer.echo(f"{task.name:8} {next(iter(task.examples(0))).prompt}")


@app.command()
def show(
    task: Spec,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw.")] = 0,
    count: Annotated[int, typer.Option("--count", min=1, max=100, help="How many examples.")] = 5,
    json: Json = False,
) -> None:
    """Draw examples of a task."""
    import msgspec

    from swarmnode.tasks.loader import load_tasks
    from swarmnode.tasks.task import is_held_out

    for loaded in load_tasks([task]):
        for example in islice(loaded.examples(seed), count):
            record = {"prompt": example.prompt, **example.columns, "held_out": is_held_out(example.prompt)}
            typer.echo(
                msgspec.json.encode(record).decode()
                if json
                else "  ".join(f"{k}: {v}" for k, v in record.items())
            )


@app.command()
def check(task: Spec, json: Json = False) -> None:
    """Draw and score a task, and report whether it is deterministic, disjoint and fast enough.

    What does not answer within two minutes is an error of the report. Exits with 1 when something would keep
    it from training.
    """
    import msgspec

    from swarmnode.tasks.check import check_task

    report = check_task(task, printed=lambda line: typer.echo(f"{task} prints: {line}", err=True))
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        for line in _describe(report):
            typer.echo(line)
    if not report.ok:
        raise typer.Exit(1)


def _describe(report: "TaskReport") -> Iterator[str]:
    """What was measured, what was found, and what to do about it."""
    yield f"task {report.task}, version {report.version}"
    if report.sample is not None:
        yield f"  first example     {report.sample.prompt!r}  {dict(report.sample.columns)}"
    yield f"  drawn             {report.drawn} examples, {_number(report.draws_per_s, ',.0f')} per second"
    yield f"  distinct prompts  {_number(report.distinct_share, '.1%')}"
    yield f"  held out          {_number(report.held_out_share, '.1%')} (for evaluation, never trained on)"
    yield f"  scored            {_number(report.scores_per_s, ',.0f')} completions per second"
    yield f"  lets through      {_let_through(report)}"
    for finding in report.findings:
        yield f"  {finding.level}: {finding.what}. {finding.advice}"
    yield "ready to train on" if report.ok else "not ready: see the errors above"


def _let_through(report: "TaskReport") -> str:
    if report.lets_through is None:
        return "unknown (no right answer is known)"
    through = [f"{name} ({share:.0%})" for name, share in report.lets_through.items() if share > 0]
    return ", ".join(through) or "nothing besides the answer, of what was tried"


def _number(value: float | None, spec: str) -> str:
    return "unknown" if value is None else format(value, spec)
