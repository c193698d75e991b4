"""Each measure of benchmarks/house.py finds what it is there to find."""

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.house_counts import count_words, duplicate_class_names, fragment_docstrings
from benchmarks.house_trail import Step, Trail, from_join_to_loss, modules_of


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., Path]:
    """Writes a package of these modules, by name, and returns its folder."""

    def write(**modules: str) -> Path:
        folder = tmp_path / "house"
        folder.mkdir()
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    return write


def test_a_public_class_name_in_two_modules_is_found(package: Callable[..., Path]) -> None:
    folder = package(
        a="class Seat: ...\nclass _Own: ...\nclass Once: ...", b="class Seat: ...\nclass _Own: ..."
    )
    assert duplicate_class_names(folder) == {"Seat": ["house/a.py", "house/b.py"]}


def test_a_docstring_that_begins_as_the_rest_of_a_sentence_is_found_wherever_it_stands(
    package: Callable[..., Path],
) -> None:
    folder = package(
        a='''"""Of those that are up."""

LIMIT = 3
"""That it waited for us."""


class Seat:
    """A member's position."""

    number: int = 0
    """Under the author's name."""

    def held(self):
        """For: whoever asks."""
        "Of no account: nothing stands above it."
''',
        b='"""Addresses of the policies that are up."""\nx = "Of a value"\n',
    )
    assert [line.partition(": ")[0] for line in fragment_docstrings(folder)] == [
        "house/a.py:1",
        "house/a.py:4",
        "house/a.py:11",
        "house/a.py:14",
    ]


def test_words_of_a_page_are_those_of_its_code_blocks_too() -> None:
    assert count_words("# Two words\n\n```\nmake join\n```\n") == 7


def test_modules_of_other_packages_with_our_name_in_front_are_not_ours() -> None:
    assert modules_of("swarmnode", ["torch", "swarmnode", "swarmnode.node.building.run", "swarmnodes"]) == [
        "swarmnode",
        "swarmnode.node.building.run",
    ]


WAY = """
import asyncio
from concurrent.futures import ThreadPoolExecutor

def join(loss):
    return asyncio.run(serve(loss))

async def serve(loss):
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rounds(loss))
    return task.result()

async def rounds(loss):
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, train, loss)

def train(loss):
    return [loss() for _ in range(1)][0]
"""


def test_the_way_to_the_loss_is_one_list_across_coroutines_and_threads(package: Callable[..., Path]) -> None:
    folder = package(way=WAY)
    spec = importlib.util.spec_from_file_location("way", folder / "way.py")
    assert spec is not None and spec.loader is not None
    way: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(way)
    trail = Trail(folder)
    found: list[list[Step]] = []
    with trail.followed():
        thread = threading.Thread(target=lambda: found.append(way.join(trail.here)))
        thread.start()
        thread.join()
    assert found == [[Step("way.py", name) for name in ("join", "serve", "rounds", "train")]]
    assert asyncio.BaseEventLoop.create_task.__module__ == "asyncio.base_events"


def test_frames_before_join_do_not_count_and_a_way_without_it_is_an_error() -> None:
    main, join, loss = Step("cli/app.py", "main"), Step("cli/join.py", "join"), Step("losses.py", "loss")
    assert from_join_to_loss([main, join, loss]) == [join, loss]
    with pytest.raises(ValueError, match="main"):
        from_join_to_loss([main, loss])


def test_the_repository_is_counted_by_the_file_that_claims_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    house = importlib.import_module("benchmarks.house")
    way = [house.Step("cli/join.py", "join"), house.Step("a.py", "b"), house.Step("c.py", "d")]
    claims, material = house.read(["swarmnode"], way)
    assert claims == {"modules_loaded": 1, "frames_to_loss": 1, "files_to_loss": 3}
    assert material["modules that one round loads"] == ["swarmnode"]
    assert set(house.written()[0]) | set(claims) == set(house.GOALS)
