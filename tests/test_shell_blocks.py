"""Every shell block of a page can be typed: it parses, and what it names exists.

`make examples-check` runs what runs without another machine."""

import re
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from swarmnode.cli.app import app
from swarmnode.settings.config_layers import load_config
from tests.test_docker import module

ROOT = Path(__file__).parent.parent
page_commands = module(ROOT / "checks/page_commands.py")
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in page_commands.pages()
    for number, block in enumerate(page_commands.blocks_of(page))
]
MAKEFILE = (ROOT / "Makefile").read_text()
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHER_VARIABLES = {"PAGE_PASSWORD", "PYTHONPATH", "SWARMNODE_HOME", "SWARMNODE_SERVE_KEY"}


def parsed(words: list[str]) -> Any:
    """The command that these words call, with its options; a word that it does not know is an error."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in (below := vars(command).get("commands") or {}):
        command, words = below[words[0]], words[1:]
    return command.make_context(command.name, list(words))


def check_swarmnode(words: list[str], variables: dict[str, str]) -> None:
    settings = parsed(words[1:]).params.get("set_") or ()
    named = {name: value for name, value in variables.items() if name not in OTHER_VARIABLES}
    load_config(environ=named, assignments=settings)


def check_make(words: list[str], variables: dict[str, str]) -> None:
    target, *variables = words[1:]
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for name, _, value in (word.partition("=") for word in variables):
        assert name in ("ARGS", "ENGINE", "PYTHON")
        if name == "ARGS" and target in ("join", "swarm"):
            parsed([target, *value.split()])


def check_docker(words: list[str], variables: dict[str, str]) -> None:
    named = dict(pairwise(words))
    if "-f" in named:
        assert (ROOT / named["-f"]).is_file()
    if "--target" in named:
        assert re.search(rf"^FROM .* AS {named['--target']}$", DOCKERFILE, re.MULTILINE)
    if "--profile" in named:
        services = yaml.safe_load((ROOT / "docker/compose.yml").read_text())["services"].values()
        assert named["--profile"] in {profile for each in services for profile in each.get("profiles", ())}


def check_pip(words: list[str], variables: dict[str, str]) -> None:
    assert words[1] == "install"
    for extras in re.findall(r"(?:\.|swarmnode-rl|any\.whl)\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(EXTRAS)


def check_path(words: list[str], variables: dict[str, str]) -> None:
    assert (ROOT / words[1]).exists() or words[1].startswith(".venv/")


CHECKS: dict[str, Any] = {
    "swarmnode": check_swarmnode,
    "make": check_make,
    "docker": check_docker,
    "pip": check_pip,
    "python": check_path,
    "cd": check_path,
    "source": check_path,
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_shell_reads_it(block: str) -> None:
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", BLOCKS)
def test_what_it_names_exists(block: str) -> None:
    for command in page_commands.commands_of(block):
        assert command.words[0] in CHECKS, f"{command.text}: pictures are ```text"
        CHECKS[command.words[0]](command.words, command.variables)


@pytest.mark.parametrize("page", page_commands.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_that_a_sentence_names_exist(page: Path) -> None:
    sentences = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for quoted in re.findall(r"`swarmnode ([a-z][^`]*)`", sentences):
        command: Any = typer.main.get_command(app)
        known = set()
        quoted = quoted.partition(" -- ")[0]  # Behind it are another command's.
        for word in quoted.split():
            command = (vars(command).get("commands") or {}).get(word, command)
            known |= {flag for option in command.params for flag in option.opts}
        named = {flag.partition("=")[0] for flag in re.findall(r"(?<!\S)--[\w-]+", quoted)}
        assert named <= known | {"--help"}, quoted
