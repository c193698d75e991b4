"""The heart stands alone: without swarmnode/extensions everything else imports, and a node trains a round."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmnode.machine.storage import resolve_paths
from swarmnode.network.admission import file_of
from swarmnode.network.finding.invitation import Invitation

ROOT = Path(__file__).parent.parent
ALL_MODULES = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
FRIENDS = Invitation(name="friends", key=bytes(72))
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def heart(tmp_path: Path) -> Run:
    """Runs Python on a copy of the package, made of links, that has no extensions."""
    place = tmp_path / "installed"
    (place / "swarmnode").mkdir(parents=True)
    for path in (*(ROOT / "swarmnode").iterdir(), ROOT / "rewards", ROOT / "configs"):
        if path.name != "extensions":
            (place / path.relative_to(ROOT)).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": str(place), "SWARMNODE_HOME": str(tmp_path / "home")}
    return lambda *arguments: subprocess.run(
        [sys.executable, *arguments],
        env=environment, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_every_module_of_the_heart_imports_without_extensions(heart: Run) -> None:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "swarmnode").rglob("*.py"))
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    left = [name for name in names if not name.startswith(("swarmnode.extensions", "swarmnode.__main__"))]
    done = heart("-c", ALL_MODULES, *left)
    assert done.returncode == 0, done.stderr
    assert "No module named" in heart("-c", "import swarmnode.extensions").stderr


@pytest.mark.slow
def test_a_node_trains_a_round_without_extensions(heart: Run, quick_model: Path) -> None:
    settings = ("network.listen=127.0.0.1", "tasks.eval_examples=4", "exchange.enabled=false")
    done = heart(
        *("-m", "swarmnode", "join", "--model", str(quick_model), "--preset", "tiny", "--rounds", "1"),
        *(part for setting in settings for part in ("--set", setting)),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("join", "--pipeline", "ours"), "join = 'pipeline': no such run; available: alone."),
        (("join", "--task", "rows.jsonl?reward=http://127.0.0.1:9"), "no such judge; available: none."),
        (("join", "--set", "node.monitors=wandb"), "no such monitor; available: none."),
        (("join", "--set", "num_generations=8"), "unknown setting 'num_generations' (--set)"),
        (("join", "--engine", "vllm"), "no such engine; available: auto, embedded."),
        (("join", "--task", "rows.jsonl?reward=passes_tests"), "no reward 'passes_tests'"),
        (("join", "--model", "tiny"), "policy.model = 'tiny': no such model; available: none."),
        (("join", "--task", "tools.py"), "'turns': no such environment; available: none."),
        (("join", "--task", "reasoning-gym:chain_sum"), "there is no task 'reasoning-gym:chain_sum'"),
    ],
)
def test_a_part_of_a_missing_extension_is_refused_with_a_sentence(
    arguments: tuple[str, ...], sentence: str, heart: Run, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": "!"}\n' * 20)
    (tmp_path / "tools.py").write_text("def examples(seed):\n    yield '?', '!'\ntools = [print]\n")
    done = heart("-m", "swarmnode", *arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert sentence in done.stderr


def test_a_terminal_shows_the_lines_of_the_log_where_no_panel_is_installed(heart: Run) -> None:
    shown = (
        "from swarmnode.node.showing.screen import Screen, logger\n"
        "with Screen(terminal=True) as screen:\n"
        "    screen.start_watcher()\n"
        "    logger.info('a round is done')"
    )
    assert heart("-c", shown).stderr.endswith(" a round is done\n")


@pytest.mark.parametrize("module", ["__init__", "reachability"])
def test_an_extension_that_cannot_be_imported_is_named_before_a_model_is_loaded(
    module: str, heart: Run, quick_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "installed" / "swarmnode" / "extensions" / "reach"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(
        'PARTS = {"reach": {"dialback": "swarmnode.extensions.reach.reachability:Reachability"}}\n'
    )
    (folder / f"{module}.py").write_text("import not_here\n")
    done = heart("-m", "swarmnode", "join", "--model", str(quick_model), "--preset", "tiny", "--rounds", "1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "swarmnode/extensions/reach cannot be imported: No module named 'not_here'" in done.stderr
    assert "memory: " not in done.stderr


@pytest.mark.parametrize("named", [("--swarm", "friends"), (FRIENDS.text(),)])
def test_a_private_swarm_is_never_joined_as_a_public_one(
    named: tuple[str, ...], heart: Run, quick_model: Path, tmp_path: Path
) -> None:
    key = file_of(resolve_paths(tmp_path / "home").swarms, "friends")
    key.parent.mkdir(parents=True)
    key.write_text("of another day")
    model = ("--model", str(quick_model), "--preset", "tiny")
    done = heart("-m", "swarmnode", "join", *named, *model, "--rounds", "1")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "friends is a private swarm, and nothing installed can read its key" in done.stderr
    assert "swarmnode.extensions.private_swarms" in done.stderr


@pytest.mark.parametrize("command", ["seed", "doctor", "export", "eval", "logs", "runs", "config"])
def test_a_command_of_a_missing_extension_says_so(command: str, heart: Run) -> None:
    missing = heart("-m", "swarmnode", command)
    assert missing.returncode == 2
    assert f"`swarmnode {command}` needs swarmnode.extensions, which is missing" in missing.stderr


def test_a_mistyped_command_is_told_from_one_of_a_missing_extension(heart: Run) -> None:
    mistyped = heart("-m", "swarmnode", "seeds")
    assert mistyped.returncode == 2 and "No such command 'seeds'" in mistyped.stderr


def test_nobody_finds_out_who_can_reach_a_node(heart: Run) -> None:
    asked = (
        "from swarmnode.network.finding.discovery import Discovery\n"
        "from swarmnode.network.finding.peer_book import PeerBook\n"
        "from swarmnode.network.memory_network import MemoryNetwork\n"
        "print(Discovery(MemoryNetwork().host(), PeerBook(), (), 'swarm').reach.verdict)"
    )
    assert heart("-c", asked).stdout == "unknown\n"


def test_every_extension_has_a_page_and_says_what_it_registers() -> None:
    folders = [path.parent for path in (ROOT / "swarmnode" / "extensions").glob("*/__init__.py")]
    assert folders
    for folder in folders:
        assert (ROOT / "docs" / f"{folder.name}.md").is_file(), folder
        assert (ROOT / "tests" / "unit" / "extensions" / folder.name).is_dir(), folder
