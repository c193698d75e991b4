"""Fixtures shared by the whole suite, and how far property tests look for cases."""

import fcntl
import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.warm_start import WarmStart

# Before torch is imported anywhere: more threads than one are far slower beside another busy process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNTIMED)
settings.register_profile("search", derandomize=False, **UNTIMED)
settings.load_profile("repeatable")
"""The same cases in every run: what nobody changed does not fail. New ones are looked for on purpose, with
`--hypothesis-profile=search`: others in every run, or those of `--hypothesis-seed=N`."""

SEARCHED = 10
"""Times as many cases as a test asks for, in the profile "search"."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "models").mkdir(exist_ok=True)
    return folder / "models"


@pytest.fixture(scope="session")
def quick_model(models: Path) -> Path:
    """A tiny policy that knows nothing, for tests that do not look at rewards."""
    from swarmnode.extensions.demonstration.tiny import build_quick_tiny

    with one_at_a_time(models):
        return build_quick_tiny(models)


@pytest.fixture(scope="session")
def tiny_model(models: Path) -> Path:
    """The tiny policy that users get; built once for all tests."""
    from swarmnode.extensions.demonstration.tiny import build_tiny

    with one_at_a_time(models):
        return build_tiny(models)


@contextmanager
def one_at_a_time(folder: Path) -> Generator[None, None, None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Starts nodes and commands without their imports."""
    starter = WarmStart()
    yield starter
    starter.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns who hands out the tests to several processes; None: whom pytest-xdist has, as asked for."""
    from tests.whole_files import WholeFiles

    return None if config.getvalue("dist") == "each" else WholeFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if settings.get_current_profile_name() == "search":
        _search({item.obj for item in items if isinstance(item, pytest.Function)})


def pytest_collection_finish() -> None:
    """Has the garbage collector leave out the tests themselves, most of what it would look through."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def _search(tests: set[Any]) -> None:
    """What a test says of itself goes before the profile: here it is the other way round."""
    name = "_hypothesis_internal_use_settings"
    for test in tests:
        if (own := getattr(test, name, None)) is not None:
            wide = settings(own, max_examples=SEARCHED * own.max_examples, derandomize=False)
            setattr(test, name, wide)
