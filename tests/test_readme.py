"""What the README promises can be typed."""

import re
from pathlib import Path

import pytest
import typer

from swarmnode.cli.app import app
from swarmnode.config import KEYS
from swarmnode.tasks.check import check_task
from swarmnode.tasks.loader import load_task

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def task_of_the_readme() -> tuple[str, str]:
    found = re.search(r"```python\n# (\w+\.py)\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def test_the_custom_task_is_ready_to_train_on(tmp_path: Path) -> None:
    name, code = task_of_the_readme()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    path = tmp_path / name
    path.write_text(code)
    assert f"--task {name}" in README and f"task check {name}" in README
    assert check_task(str(path)).ok
    example = next(iter(load_task(str(path)).examples(0)))
    right, wrong = load_task(str(path)).score(example, [str(example.columns["answer"]), "?"])
    assert (right, wrong) == ({"reward": 1.0}, {"reward": 0.0})


def test_every_command_it_names_exists() -> None:
    named = set(
        re.findall(r"swarmnode (join|swarm|status|eval|export|doctor|task check|config show)", README)
    )
    commands = vars(typer.main.get_command(app))["commands"]
    assert {name.split()[0] for name in named} <= set(commands)
    assert len(named) == 8


@pytest.mark.parametrize("page", ["README.md", "configs/README.md", "benchmarks/README.md"])
def test_links_and_files_it_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for name in re.findall(r"`(?:python )?(benchmarks/\w+\.py)`", text):
        assert (ROOT / name).exists(), name


def test_every_benchmark_has_its_row() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert len(scripts) >= 5
    assert {path.name for path in scripts if f"`{path.name}`" not in table} == set()


def test_settings_that_are_named_exist() -> None:
    sections = {key.partition(".")[0] for key in KEYS}
    for page in ("README.md", "configs/README.md"):
        for section, key in re.findall(r"--set (\w+)\.(\w+)=", (ROOT / page).read_text()):
            assert section not in sections or f"{section}.{key}" in KEYS
