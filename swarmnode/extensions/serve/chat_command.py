"""`swarmnode chat`: talk to the policy in training here, or to a checkpoint, in the terminal."""

import asyncio
import sys
from contextlib import aclosing
from typing import Annotated

import msgspec
import typer

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
from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.extensions.serve.answering_client import ask, models
from swarmnode.extensions.serve.questions import AnswerBegan, Piece, Question, QuestionRefused
from swarmnode.extensions.serve.standing_alone import Answering, answering
from swarmnode.printable import printable

USE = (
    "an empty line ends the chat; /new starts over; /model NAME asks another version, such as policy@12 or"
    " base; // begins a text with a slash; /help shows this"
)


def chat(
    question: Annotated[
        str | None, typer.Argument(help="A single question; leave it out for a conversation.")
    ] = None,
    ask_for: Annotated[
        str | None,
        typer.Option(
            "--ask",
            metavar="NAME",
            help="policy, policy@12, policy-1 (of several) or base; by default, the one of --policy.",
        ),
    ] = None,
    greedy: Greedy = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Maximum length of an answer, in tokens.")
    ] = None,
    model: Model = None,
    base: Base = False,
    best: Best = False,
    run: RunName = None,
    policy: Policy = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Talk to the policy that trains here now; without a running node, to its newest checkpoint (or the best,
    or the base model)."""
    if json and question is None:
        raise ConfigError(
            "--json takes a single question",
            hint="pass a question, or let your program use `swarmnode serve`",
        )
    settings = settings_of_trained(
        home=home, preset=preset, config=config, set_=set_, model=model, run=run, policy=policy
    )
    with answering(settings, base=base, best=best, model=model, run=run, policy=policy) as found:
        asked = Question(
            model=ask_for or found.policy,
            temperature=0.0 if greedy else 1.0,
            max_tokens=max_tokens,
            stream=True,
        )
        if question is not None:
            _said(found, asked, (("user", question),), json)
            return
        typer.echo(f"{found.about}; {USE}")
        _converse(found, _of(found, asked, asked.model))


def _converse(found: Answering, asked: Question) -> None:
    messages: tuple[tuple[str, str], ...] = ()
    while line := _line():
        command, _, rest = line.partition(" ")
        try:
            if command == "/new":
                messages = ()
            elif command == "/model":
                asked = _of(found, asked, rest.strip())
            elif line.startswith("/") and not line.startswith("//"):
                typer.echo(USE if command == "/help" else f"there is no command {printable(command)}: {USE}")
            else:
                told = (*messages, ("user", line[1:] if line.startswith("//") else line))
                messages = (*told, ("assistant", _said(found, asked, told)))
        except SwarmnodeError as error:
            typer.echo(printable(error.message))


def _of(found: Answering, asked: Question, model: str) -> Question:
    """Returns the question for another model. Raises SwarmnodeError if there is no model of this name."""
    try:
        there = asyncio.run(models(found.find()))
    except QuestionRefused as refusal:
        raise SwarmnodeError(refusal.refused.message) from refusal
    # With several policies, "policy" is also the name of the first (answering_service.py).
    if model != "policy" and not {model, model.replace("policy@", "policy-0@", 1)} & {*there}:
        raise SwarmnodeError(f"there is no model {model!r}: choose one of {', '.join(there)}")
    return _with(asked, model=model)


def _line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _said(
    found: Answering, asked: Question, messages: tuple[tuple[str, str], ...], json: bool = False
) -> str:
    """Prints an answer as it arrives, or as JSON when it is complete, and returns it. Raises
    SwarmnodeError."""
    try:
        return asyncio.run(_print_answer(found.find(), _with(asked, messages=messages), json))
    except QuestionRefused as refusal:
        raise SwarmnodeError(refusal.refused.message) from refusal


async def _print_answer(path: str | None, question: Question, json: bool) -> str:
    said: list[str] = []
    model = question.model
    async with aclosing(ask(path, question)) as events:
        async for event in events:
            if isinstance(event, AnswerBegan):
                model, shown = event.model, f"[{event.model}] "
            elif isinstance(event, Piece):
                said.append(event.text)
                shown = "\n".join(map(printable, event.text.split("\n")))
            else:
                continue
            if not json:
                typer.echo(shown, nl=False)
    answer = "".join(said)
    tell(json, {"model": model, "answer": answer}, [""])
    return answer


def _with(question: Question, **changes: object) -> Question:
    return msgspec.structs.replace(question, **changes)
