"""Nobody is told to install what is not ours: `swarmnode` on the package index is another project."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from swarmnode.machine import installing
from swarmnode.machine.installing import DISTRIBUTION, find_namesake, how_to_install, install_command

ROOT = Path(__file__).parent.parent
READ = (
    "*.md",
    "docs/*.md",
    "*/README.md",
    "swarmnode/**/*.py",
    "examples/*.py",
    "checks/*.py",
    "docker/*",
    "Makefile",
)
NOT_FROM_THE_INDEX = re.compile(r"swarmnode(-rl)?\[[^\]]*\] @ |/swarmnode\b|swarmnode-rl(\[[^\]]*\])? @ ")


def misleading(text: str) -> list[str]:
    """The commands in a text by which pip would ask the index for swarmnode, under either name."""
    commands = re.findall(r"pip3? (?:install|download)[^\n`#;]*", text)
    return [
        one
        for one in commands
        if re.search(r"""(^|[\s"'])swarmnode(-rl)?(\[|["'\s]|$)""", NOT_FROM_THE_INDEX.sub("", one))
    ]


def test_a_command_that_asks_the_index_is_found_in_any_spelling() -> None:
    for command in (
        "pip install swarmnode",
        "pip install -U 'swarmnode[train]'",
        'pip install "swarmnode[data]" trl',
        "/opt/swarmnode/bin/pip install 'swarmnode[train]'",
        "pip install swarmnode-rl",
        'pip install "swarmnode-rl[vllm]"',
    ):
        assert misleading(command), command
    for command in (
        'pip install -e ".[train]"',
        'pip install -e "/home/me/swarmnode[train]"',
        'pip install "swarmnode-rl[train] @ git+URL"',
        'pip install "swarmnode_rl-0.1.0-py3-none-any.whl[train]"',
        "pip uninstall swarmnode",
    ):
        assert misleading(command) == [], command


def test_no_page_hint_unit_or_example_tells_anybody_to_ask_the_index_for_it() -> None:
    paths = {path for pattern in READ for path in ROOT.glob(pattern) if path.is_file()}
    assert len(paths) > 200
    found = {str(path.relative_to(ROOT)): misleading(path.read_text()) for path in paths}
    assert {name: commands for name, commands in found.items() if commands} == {}


def test_no_module_spells_an_extra_itself() -> None:
    """One rule in one place: whoever has a hint to give asks `how_to_install`."""
    spelt = re.compile(r"swarmnode(-rl)?\[\w")
    sources = [path for path in (ROOT / "swarmnode").rglob("*.py") if path.name != "installing.py"]
    assert [path.name for path in sources if spelt.search(path.read_text())] == []
    asked = {
        extra
        for path in sources
        for extra in re.findall(r"how_to_install\([\"'](\w+)[\"']\)", path.read_text())
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert {"train", "data", "tasks"} <= asked <= set(project["optional-dependencies"])


def test_a_hint_names_the_source_tree_that_runs() -> None:
    assert how_to_install("train") == f'pip install -e "{ROOT}[train]"'


def test_a_hint_names_the_place_that_an_installation_came_from(tmp_path: Path) -> None:
    wheel = tmp_path / "a folder" / "ours.whl"
    tree = tmp_path / "clone"
    wheel.parent.mkdir()
    wheel.touch()
    tree.mkdir()
    assert install_command("data", tmp_path, "git+https://host/it") == (
        'pip install "swarmnode-rl[data] @ git+https://host/it"'
    )
    assert install_command("data", tmp_path, wheel.as_uri()) == (
        f'pip install "swarmnode-rl[data] @ {wheel.as_uri()}"'
    )
    assert install_command("data", tmp_path, tree.as_uri()) == f'pip install -e "{tree}[data]"'


@pytest.mark.parametrize(
    ("record", "origin"),
    [
        ({"url": "https://host/it", "vcs_info": {"vcs": "git"}}, "git+https://host/it"),
        ({"url": "file:///a/clone", "vcs_info": {"vcs": "git"}}, "file:///a/clone"),
        ({"url": "file:///a/ours.whl", "archive_info": {}}, "file:///a/ours.whl"),
        ({}, ""),
    ],
)
def test_the_place_is_read_in_the_record_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], origin: str
) -> None:
    info = tmp_path / "swarmnode_rl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert installing._came_from() == origin
    for requirement in re.findall('"([^" ]+ @ [^"]*)"', install_command("data", tmp_path, origin)):
        assert Requirement(requirement.replace("git+URL", "git+https://host/it")).extras == {"data"}


@pytest.mark.parametrize("origin", ["", "file:///is/gone/ours.whl"])
def test_a_hint_of_an_installation_from_nowhere_says_both_ways(tmp_path: Path, origin: str) -> None:
    said = install_command("data", tmp_path, origin)
    assert '-e ".[data]"' in said and '"swarmnode-rl[data] @ git+URL"' in said


def installed(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text(entry_points)


def test_another_package_of_this_name_is_refused_in_a_sentence_even_where_it_has_our_place(
    tmp_path: Path,
) -> None:
    """Both in one folder: the other's `__init__.py` has replaced ours."""
    site = tmp_path / "site-packages"
    (site / "swarmnode").mkdir(parents=True)
    for path in (ROOT / "swarmnode").iterdir():
        (site / "swarmnode" / path.name).symlink_to(path)
    (site / "swarmnode/__init__.py").unlink()
    (site / "swarmnode/__init__.py").write_text("class SwarmNode: ...\n")
    installed(site, "swarmnode-0.4.1", "")
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from swarmnode.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "swarmnode 0.4.1 is installed over swarmnode-rl" in done.stderr
    assert "pip uninstall swarmnode swarmnode-rl" in done.stderr


def test_a_script_is_told_of_it_too(tmp_path: Path) -> None:
    installed(tmp_path, "swarmnode-0.4.1", "")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import swarmnode; swarmnode.Node"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ConfigError" in done.stderr and "is installed over swarmnode-rl" in done.stderr


def test_what_an_older_clone_of_ours_left_behind_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "swarmnode-0.1.0", "[console_scripts]\nswarmnode = swarmnode.cli.app:main\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_namesake() is None
    installed(tmp_path, "swarmnode-0.4.1", "")
    assert find_namesake() is not None
