"""`swarmnode task`: what tasks there are, and all that is done with one before a policy trains on it."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from swarmnode.chat import asked_of
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
    settings_of_trained,
)
from swarmnode.extensions.workbench.catalogue import TaskForm, builtin_tasks, task_forms
from swarmnode.extensions.workbench.check import TaskReport, check_task
from swarmnode.extensions.workbench.first_answers import FirstAnswers, first_answers
from swarmnode.extensions.workbench.task_description import ShownExample, TaskDescription, descriptions_of
from swarmnode.extensions.workbench.template import write_template
from swarmnode.extensions.workbench.tryout import TriedExample, playing
from swarmnode.printable import printable
from swarmnode.settings.config_layers import load_settings
from swarmnode.tasks.data_settings import specs_of
from swarmnode.types import Example

app = typer.Typer(help="List, show, check, try and create tasks.", no_args_is_help=True)

Spec = Annotated[
    str, typer.Argument(metavar="TASK", help="As for `join --task`: a name, a file or a data set.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """Print the built-in tasks with an example of each, and what else --task takes."""
    samples = [
        (one.name, one.version, asked_of(next(iter(one.examples(0))).prompt)) for one in builtin_tasks()
    ]
    found = {
        "tasks": [{"name": n, "version": v, "prompt": prompt} for n, v, prompt in samples],
        "forms": [
            {"form": form.written, "means": form.means, "needs": form.needs, "ready": form.installed}
            for form in task_forms()
        ],
    }
    lines = [f"{name:10} {prompt.partition(chr(10))[0]}" for name, _, prompt in samples]
    tell(json, found, [*lines, "\n--task takes", *map(_form, task_forms())])


def _form(form: TaskForm) -> str:
    missing = "" if form.installed else f" (needs {form.needs}, which is not installed)"
    return f"  {form.written:25} {form.means}{missing}"


@app.command()
def show(
    task: Spec,
    seed: Seed = 0,
    count: Annotated[int, typer.Option("--count", min=1, max=100, help="How many examples.")] = 5,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Print a task's name, version, rewards and examples, and whether peers can exchange it.

    To exchange means that a peer with the same task draws the example again and judges the answers itself.
    Uses a node's settings: its sandbox, its limits, its rewards for data sets.
    """
    settings = load_settings(
        home=home, preset=preset, config_file=config, assignments=set_, flags=_only(task)
    )
    portraits = descriptions_of(settings.config.tasks, seed=seed, count=count)
    tell(json, portraits, (line for portrait in portraits for line in _portray(portrait)))


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Python file that does not exist yet.")],
    environment: Annotated[
        bool, typer.Option("--environment", help="A task that answers back, in several turns.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a task file to start from: twenty commented lines that pass `task check`."""
    write_template(file, environment=environment)
    tell(json, {"wrote": str(file)}, [f"wrote {file}: edit it, then run `swarmnode task check {file}`"])


@app.command("try")
def try_(
    task: Spec,
    model: Model = None,
    run: RunName = None,
    base: Base = False,
    best: Best = False,
    greedy: Greedy = False,
    count: Annotated[int, typer.Option("--count", min=1, max=100, help="How many examples.")] = 3,
    samples: Annotated[int, typer.Option("--samples", min=1, max=64, help="How many answers to each.")] = 2,
    seed: Seed = 0,
    policy: Policy = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Play a task against the newest checkpoint of this home, or against the base model.

    Prints each prompt, the answers and their rewards. Nothing is trained.
    """
    settings = settings_of_trained(
        home=home,
        preset=preset,
        config=config,
        set_=set_,
        model=model,
        run=run,
        policy=policy,
        named=_only(task),
    )
    played = playing(
        settings, base=base, best=best, greedy=greedy, examples=count, samples=samples, seed=seed
    )
    with played as (policy_name, tried):
        temperature = 0.0 if greedy else settings.config.rollout.temperature
        told = f"{settings.model}, {policy_name}, temperature {temperature:g}"
        examples = list(tried) if json else ()
        found = {"model": settings.model, "policy": policy_name, "examples": examples}
        tell(json, found, chain([told], chain.from_iterable(map(_played, tried))))


@app.command()
def check(
    task: Spec,
    model: Model = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=0,
            max=256,
            help="Also ask the untrained model, for this many answers to each example.",
        ),
    ] = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Draw and score a task, and report whether it is deterministic, disjoint and fast enough.

    Uses a node's settings: its sandbox, its limits, its rewards for data sets. Code that does not answer
    within tasks.score_timeout_s is reported as an error. With --samples it also says how often the untrained
    model is right (pass@k), and what that means. Exits with 1 if something would prevent training.
    """
    settings = load_settings(
        home=home,
        preset=preset,
        config_file=config,
        assignments=set_,
        flags={"policy.model": model, **_only(task)},
    )
    tasks = settings.config.tasks
    (spec,) = specs_of(tasks)
    report = check_task(spec, tasks, printed=lambda line: typer.echo(f"{task} prints: {line}", err=True))

    def untrained() -> Iterator[FirstAnswers]:
        if report.ok and samples:
            with playing(settings, base=True, examples=FIRST_EXAMPLES, samples=samples) as (_, tried):
                found = first_answers(tried, report.demonstrations.right if report.demonstrations else 0)
            yield found

    if json:
        found = msgspec.to_builtins(report, enc_hook=str)
        tell(True, found | {"untrained": next(untrained(), None)}, ())
    else:
        tell(False, None, chain(_describe(report), _conclude(report, untrained())))
    if not report.ok:
        raise typer.Exit(1)


FIRST_EXAMPLES = 32
"""Examples that the untrained model is asked."""


def _conclude(report: TaskReport, untrained: Iterator[FirstAnswers]) -> Iterator[str]:
    """Yields what the untrained model did, where it was asked, and the verdict."""
    found = next(untrained, None)
    if found is not None:
        yield _of_first_answers(found)
    if not report.ok:
        yield "not ready: see the errors above"
    elif found is not None and not found.begins:
        yield "a node on its own cannot learn anything yet: see above for what helps the untrained model"
    elif not report.teaches:
        yield "it can be trained on, but teaches little: see the warnings above"
    elif report.findings:
        yield "ready to train on: mind the warnings above"
    else:
        yield "ready to train on"


def _of_first_answers(found: FirstAnswers) -> str:
    passed = ", ".join(f"pass@{k} {share:.1%}" for k, share in found.pass_at.items())
    return f"  untrained         {found.answers} answers: {passed or 'none was judged'}. {found.follows}"


def _describe(report: TaskReport) -> Iterator[str]:
    """Yields the lines of a report: measurements, findings, and what to do about them."""
    yield f"task {report.task}, version {report.version}"
    if report.sample is not None:
        yield f"  first example     {_asked(report.sample)}  {dict(report.sample.columns)}"
    yield f"  drawn             {report.drawn} examples, {_number(report.draws_per_s, ',.0f')} per second"
    again = "" if report.rows is None else f" of the {report.rows} that every seed draws"
    yield f"  distinct prompts  {_number(report.distinct_share, '.1%')}{again}"
    yield f"  held out          {_number(report.held_out_share, '.1%')} (for evaluation, never trained on)"
    yield f"  scored            {_number(report.scores_per_s, ',.0f')} completions per second"
    yield f"  lets through      {_let_through(report)}"
    if (shown := report.demonstrations) is not None:
        yield f"  demonstrations    {shown.right} of {shown.judged} with full marks"
    if (episode := report.episode) is not None:
        alike = "answered the same each time"
        if episode.difference:
            alike = f"not answered the same each time: {episode.difference}"
        yield f"  episode           {len(episode.turns)} turns, {alike}"
    for finding in report.findings:
        yield f"  {finding.level}: {finding.what}. {finding.advice}"


def _let_through(report: TaskReport) -> str:
    if report.lets_through is None:
        return "unknown (no `answer` or demonstration, taken as it is, scores better than nonsense)"
    through = [f"{name} ({share:.0%})" for name, share in report.lets_through.items() if share > 0]
    return ", ".join(through) or "nothing that was tried, besides the answer"


def _number(value: float | None, spec: str) -> str:
    return "unknown" if value is None else format(value, spec)


def _portray(portrait: TaskDescription) -> Iterator[str]:
    yield f"task {portrait.name}, version {portrait.version}"
    yield f"  rewards   {', '.join(portrait.rewards)}"
    share = f"{portrait.held_out_share:.1%} of {portrait.drawn} examples"
    yield f"  held out  {share} (for evaluation, never trained on)"
    peers = "peers can draw it again and judge it" if portrait.exchangeable else "its rollouts stay at home"
    yield f"  exchange  {peers}"
    if portrait.most_turns is not None:
        tools = f", tools: {', '.join(portrait.tools)}" if portrait.tools else ""
        yield f"  turns     at most {portrait.most_turns}{tools}"
    for sample in portrait.samples:
        held_out = "  (held out)" if sample.held_out else ""
        yield f"  {_asked(sample)}  {dict(sample.columns)}{held_out}"


def _played(tried: TriedExample) -> Iterator[str]:
    """A question with its answers, each with its rewards. What a model writes may move a cursor."""
    held_out = "  (held out)" if tried.held_out else ""
    yield f"\n{tried.task}: {_asked(tried)}  {dict(tried.columns)}{held_out}"
    for answer in tried.answers:
        several = ", ".join(f"{name} {_number(value, 'g')}" for name, value in answer.scores.items())
        cut = "  (cut off)" if answer.finish == "length" else ""
        yield f"  {_number(answer.reward, 'g'):>8}  {printable(repr(answer.text))}{cut}  [{several}]"


def _asked(one: Example | ShownExample | TriedExample) -> str:
    return repr(asked_of(one.prompt))


def _only(task: str) -> dict[str, Any]:
    """The settings that name this task and no other."""
    return {"tasks.names": (task,), "tasks.mixes": ()}
