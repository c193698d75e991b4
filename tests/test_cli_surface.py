"""The command line is a promise: adding, removing or renaming a flag is a deliberate change of this table."""

import typer
from typer.testing import CliRunner

from swarmnode.cli.app import app

SURFACE = {
    "join": "addresses --config --engine --fresh --home --model --overlap --pipeline --policies --port"
    " --preset --rounds --seed --set --swarm --task",
    "swarm": "--compare-alone --equals --home --model --nodes --rounds --seed --set --task",
    "seed": "addresses --config --home --port --set --swarm",
    "status": "--home --json",
    "doctor": "--config --home --json --preset --set",
    "eval": "--base --best --config --greedy --home --json --limit --model --passing-reward --policy --preset"
    " --samples --set --shots --suite --task",
    "export": "folder --best --config --home --merged --model --policy --preset --set",
    "task list": "--json",
    "task show": "task --config --count --home --json --preset --seed --set",
    "task check": "task --config --home --json --preset --set",
    "task new": "file --environment",
    "task try": "task --base --best --config --count --greedy --home --json --model --policy --preset"
    " --samples --seed --set",
    "pipeline plan": "instance --averaging --free-map --gantt --json --out --seconds --seed --steps",
    "identity show": "--home --json --policy",
    "identity export": "--home --policy",
    "identity import": "source --home --overwrite --policy",
    "config show": "--config --explain --home --json --preset --set",
}


def surface() -> dict[str, str]:
    found: dict[str, str] = {}

    def walk(command: object, path: tuple[str, ...]) -> None:
        children = vars(command).get("commands")
        if children:
            for name, child in children.items():
                walk(child, (*path, name))
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


def test_join_keeps_to_few_options() -> None:
    assert len(surface()["join"].split()) <= 16


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
