"""The command line is a promise: adding, removing or renaming a flag is a deliberate change of this table."""

import re

import pytest
import typer
from typer.testing import CliRunner

from swarmnode import __version__
from swarmnode.cli.app import SUMMARIES, app

SURFACE = {
    "join": "addresses --config --engine --fresh --home --hours --max-disk --max-download --max-memory"
    " --max-upload --model --overlap --pipeline --policies --port --power --preset --rounds --run"
    " --seed --set --swarm --task",
    "swarm": "--compare-alone --home --homes --model --nodes --rounds --seed --set --task",
    "swarm create": "name --home --json --private --seed",
    "swarm invite": "--home --json --seed --swarm",
    "swarm members": "--home --json --swarm",
    "swarm remove": "peers --home --json --swarm",
    "swarm rotate": "--home --json --only --swarm",
    "swarm publishers": "peers --home --json --swarm",
    "seed": "addresses --config --home --port --set --swarm",
    "serve": "--base --best --config --home --host --key --model --policy --port --preset --run --set",
    "chat": "question --ask --base --best --config --greedy --home --json --max-tokens --model --policy"
    " --preset --run --set",
    "status": "--healthy --home --json",
    "watch": "machines --every --json --once --password",
    "pause": "duration --home --json",
    "resume": "--home --json",
    "finish": "--home --json",
    "stop": "--home --json",
    "logs": "--errors --follow --home --json --number",
    "peers": "--home --json --policy",
    "doctor": "--config --home --json --preset --set",
    "eval": "--base --best --config --greedy --home --json --limit --model --passing-reward --policy"
    " --preset --run --samples --set --shots --suite --task",
    "export": "folder --best --config --home --json --merged --model --policy --preset --public --push --run"
    " --set",
    "report": "--home --json --out --policy --run",
    "pull": "repo --home --json --policy --run",
    "service install": "arguments --for --json --print",
    "runs": "--home --json",
    "runs remove": "name --home --json --policy",
    "library show": "file --home --json --policy --set --task",
    "library export": "file --home --json --policy",
    "library import": "file --home --json --policy",
    "task list": "--json",
    "task show": "task --config --count --home --json --preset --seed --set",
    "task check": "task --config --home --json --model --preset --samples --set",
    "task new": "file --environment --json",
    "task try": "task --base --best --config --count --greedy --home --json --model --policy --preset --run"
    " --samples --seed --set",
    "pipeline plan": "instance --free-map --json --out --seconds --seed --steps",
    "identity show": "--home --json --policy",
    "identity export": "--home --json --policy",
    "identity import": "source --home --json --overwrite --policy",
    "config show": "--config --explain --home --json --preset --set",
    "version": "--json",
}

WITHOUT_JSON = {
    "join": "runs for days: its record is metrics.jsonl, and its last line is JSON",
    "swarm": "is `join` several times, and its last line is JSON",
    "seed": "runs for months, and its only line is the address",
    "serve": "runs until it is stopped: its answers are JSON",
}


def surface() -> dict[str, str]:
    found: dict[str, str] = {}

    def walk(command: object, path: tuple[str, ...]) -> None:
        children = vars(command).get("commands")
        if children:
            for name, child in children.items():
                walk(child, (*path, name))
            if not path or not vars(command)["invoke_without_command"]:
                return
        words = [
            p.name if p.param_type_name == "argument" else p.opts[0]
            for p in command.params  # type: ignore[attr-defined]
        ]
        arguments = [word for word in words if not word.startswith("--")]
        found[" ".join(path)] = " ".join(arguments + sorted(w for w in words if w.startswith("--")))

    walk(typer.main.get_command(app), ())
    return found


def test_the_flags_are_exactly_these() -> None:
    assert surface() == SURFACE


def test_every_command_that_prints_something_prints_json_too() -> None:
    without = {name for name, words in surface().items() if "--json" not in words.split()}
    assert without == set(WITHOUT_JSON)


def test_join_keeps_to_few_options() -> None:
    assert len(surface()["join"].split()) <= 23


def test_every_option_is_explained() -> None:
    def walk(command: object) -> list[str]:
        children = vars(command).get("commands") or {}
        own = [
            p.name for p in vars(command).get("params", ()) if p.param_type_name == "option" and not p.help
        ]
        return own + [name for child in children.values() for name in walk(child)]

    assert walk(typer.main.get_command(app)) == []


def test_a_command_that_is_mistyped_is_answered_with_the_nearest_one() -> None:
    answer = CliRunner().invoke(app, ["joni"])
    assert answer.exit_code == 2
    assert "Did you mean 'join'" in answer.output


@pytest.mark.parametrize("command", ["", *SURFACE])
def test_every_command_answers_to_both_spellings_of_help(command: str) -> None:
    short, long = (CliRunner().invoke(app, [*command.split(), flag]) for flag in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "]...]" not in short.output


def test_the_table_of_commands_is_ordered_for_a_reader_whoever_registers_them() -> None:
    table = CliRunner().invoke(app, ["--help"]).output.partition("Commands:\n")[2]
    assert re.findall(r"^  (\w+) ", table, re.MULTILINE) == list(SUMMARIES)


def test_the_version_is_a_command_and_an_option() -> None:
    told = [CliRunner().invoke(app, [word]).output for word in ("version", "--version")]
    assert told == [f"swarmnode {__version__}\n"] * 2


def test_help_of_join_begins_with_examples_that_stay_on_their_lines() -> None:
    shown = CliRunner().invoke(app, ["join", "--help"]).output
    assert re.search(r"^  swarmnode join --task last.py --rounds 100 +on your own task", shown, re.MULTILINE)
