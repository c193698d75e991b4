"""What the pages name exists: files, headings, modules, commands, settings."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer

from swarmnode.cli.app import app
from swarmnode.exchange import limits, messages
from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL
from swarmnode.exchange.gossip.header_gossip import receipts_topic_of, topic_of
from swarmnode.exchange.gossip.helping import help_topic_of
from swarmnode.exchange.library import library_pages
from swarmnode.extensions.pipeline.stages.trial_cut import CAN_BE_CUT
from swarmnode.extensions.pipeline.wire import frames, member_streams
from swarmnode.extensions.reach import dialback
from swarmnode.network import host, stream_slots
from swarmnode.settings.config import KEYS
from swarmnode.training.records import FORMAT

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "swarmnode"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md")))
FILES_LIKE_SETTINGS = {"node.log"}

GONE_SETTINGS = {
    "training.clip_low",
    "training.clip_high",
    "policy.threads",
    "tasks.prompt_column",
    "tasks.answer_column",
    "tasks.evaluation",
    "tasks.max_turns",
    "rollout.max_turn_tokens",
    "rollout.max_lag",
    "pipeline.memory_gb",
    "pipeline.search_tasks",
}
"""Settings that the changelog says are gone."""


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings have."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if re.match("#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_the_pages_that_should_be_there_are() -> None:
    pages = {"README.md", "AGENTS.md", "docs/architecture.md", "docs/operations.md", "docs/pipeline.md"}
    assert pages | {"docs/tasks.md", "docs/trust.md", "benchmarks/README.md", "configs/README.md"} <= set(
        PAGES
    )


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text_of(page)):
        found = ROOT / page if not target else (ROOT / page).parent / target
        assert found.exists(), target
        assert not anchor or anchor in headings(found), f"{target}#{anchor}"


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    """`make docs` builds it; what mkdocs would refuse is refused here without it."""
    site = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"^ +- .+: (\S+\.md)$", site, re.MULTILINE)
    assert sorted(named) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_to_files_as_a_site_needs_them(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text_of(page))
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_its_lists_and_tables_stand_apart_as_a_site_needs_them(page: str) -> None:
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    assert re.findall(r"^(?![-|>]|\d+\.|  )\S.*\n(?=- |1\. |\|)", text, re.MULTILINE) == []


def test_the_wire_protocol_is_that_of_the_code() -> None:
    page = text_of("docs/wire_protocol.md")
    named = {name: int(value) for name, value in re.findall(r"\| `([A-Z_]+)` \| (\d+) \|", page)}
    of_code = {**vars(host), **vars(stream_slots), **vars(library_pages), **vars(limits)}
    assert len(named) > 12 and named == {name: of_code[name] for name in named}
    assert set(re.findall(r"`(/swarmnode/[\w/]+)`", page)) == {
        topic_of("SWARM"),
        help_topic_of("SWARM"),
        receipts_topic_of("SWARM"),
        BODY_PROTOCOL,
        library_pages.LIBRARY_PROTOCOL,
        dialback.PROTOCOL,
        member_streams.PROTOCOL,
        "/swarmnode/1/SWARM",
    }
    assert f"| {frames.VERSION}, in each frame |" in page
    fields = [
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in row.split("`")[1::2]
    ]
    assert set(messages.Header.__struct_fields__) <= set(fields)


def test_the_changelog_names_the_version_and_the_protocols_that_hold() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = text_of("CHANGELOG.md")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == version
    assert f"exchange {limits.PROTOCOL}, of libraries 1, of pipelines {frames.VERSION}." in changelog
    assert f"Checkpoints have format {FORMAT}." in changelog


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_repository_that_it_names_exist(page: str) -> None:
    named = re.findall(r"\b((?:benchmarks|checks|configs|docs|rewards|tests)/[\w/]*\w\.\w+)", text_of(page))
    assert [name for name in named if not (ROOT / name).exists() and not name.endswith("/NAME.py")] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_it_names_exist(page: str) -> None:
    named = re.findall(r"(?:`|^|= |\$ )swarmnode (\w[\w-]*)(?: (\w+))?", text_of(page), re.MULTILINE)
    commands = vars(typer.main.get_command(app))["commands"]
    for name, second in named:
        assert name in commands, name
        below = vars(commands[name]).get("commands")
        alone = below is None or (not second and commands[name].invoke_without_command)
        assert alone or second in below, f"{name} {second}"


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_it_names_exist(page: str) -> None:
    sections = {key.partition(".")[0] for key in KEYS}
    # The table of measurements is made of the code, and their names look like those of settings.
    text = text_of(page).partition("<!-- Made by checks/metrics_page.py")[0]
    named = re.findall(r"(?:`|--set )((\w+)\.\w+)(?=`|=| =)", text)
    known = {*KEYS, *GONE_SETTINGS} if page == "CHANGELOG.md" else KEYS
    unknown = {key for key, section in named if section in sections and key not in known}
    assert {key for key in unknown - FILES_LIKE_SETTINGS if not key.endswith(".py")} == set()


EXAMPLE_FILES = {
    "file.py",
    "FILE.py",
    "my.py",
    "rw.py",
    "add.py",
    "re.py",
    "module.py",
    "random.py",
    "last.py",
    "my_task.py",
}


def test_files_that_docstrings_name_exist() -> None:
    folders = (PACKAGE, ROOT / "rewards", ROOT / "benchmarks", ROOT / "examples", ROOT / "tests")
    there = EXAMPLE_FILES.union(path.name for folder in folders for path in folder.rglob("*.py"))
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for text in re.findall(r'""".*?"""', path.read_text(), re.DOTALL)
        for name in re.findall(r"\w+\.py\b", text)
        if name not in there
    ]
    assert gone == []


def test_the_page_of_pipelines_names_the_families_that_can_be_cut() -> None:
    assert CAN_BE_CUT in text_of("docs/pipeline.md")


def test_tasksets_that_pages_train_on_are_in_the_examples() -> None:
    """A set of verifiers' own may go with its next version."""
    named = {name for page in PAGES for name in re.findall(r"join --task verifiers:([\w-]+)", text_of(page))}
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert named and {name.replace("-", "_") for name in named} <= examples


def test_the_pages_name_all_that_a_newcomer_types() -> None:
    everything = "".join(map(text_of, PAGES))
    for command in (
        "join",
        "swarm",
        "seed",
        "status",
        "eval",
        "export",
        "doctor",
        "task check",
        "config show",
    ):
        assert f"swarmnode {command}" in everything


def test_every_benchmark_has_its_row() -> None:
    table = text_of("benchmarks/README.md")
    scripts = {path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert len(scripts) >= 5
    assert {path.name for path in scripts if f"`{path.name}`" not in table} == set()


ARCHITECTURE = text_of("docs/architecture.md")


def way() -> str:
    """The picture of a rollout's way."""
    return ARCHITECTURE.partition("## The way of a rollout")[2].split("```")[1]


def test_every_module_that_the_architecture_names_exists() -> None:
    named = set(re.findall(r"(?<![\w/])[\w/]+\.py\b", ARCHITECTURE))
    assert len(named) > 50
    roots = (PACKAGE, ROOT)
    assert sorted(name for name in named if not any((root / name).is_file() for root in roots)) == []


def test_every_folder_that_the_architecture_names_exists() -> None:
    named = set(re.findall(r"`(\w[\w/]*/)`", ARCHITECTURE))
    assert len(named) > 12
    assert [name for name in named if not any((root / name).is_dir() for root in (PACKAGE, ROOT))] == []


def test_every_folder_of_the_package_is_in_the_architecture() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert [name for name in folders if f"`{name}/`" not in ARCHITECTURE] == []


def test_each_station_of_the_way_is_defined_in_its_module() -> None:
    stations = re.findall(r"([\w/]+\.py):(\w+)", way())
    assert len(stations) > 20
    assert [f"{path}:{name}" for path, name in stations if name not in names_of(PACKAGE / path)] == []


def names_of(path: Path) -> set[str]:
    """The classes and functions that a module defines."""
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, defined)}


def test_a_glossary_fits_on_a_page_and_explains_each_word_once() -> None:
    lines = ARCHITECTURE.partition("## Glossary")[2].strip().splitlines()
    words = [word.lower() for line in lines for word in re.findall(r"\*\*([^*]+)\*\*", line)]
    assert len(lines) <= 40 and max(map(len, lines)) <= 250
    assert len(words) == len(set(words)) > 25
