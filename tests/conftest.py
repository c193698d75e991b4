"""Fixtures shared by the whole suite."""

import os
from pathlib import Path

import pytest

# Before torch is imported anywhere: more threads than one are far slower beside another busy process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def quick_model(models: Path) -> Path:
    """A tiny policy that knows nothing, for tests that do not look at rewards."""
    from swarmnode.training.tiny import build_quick_tiny

    return build_quick_tiny(models)


@pytest.fixture(scope="session")
def tiny_model(models: Path) -> Path:
    """The tiny policy that users get; built once for all tests."""
    from swarmnode.training.tiny import build_tiny

    return build_tiny(models)


ENGINES = ("test_engine.py", "test_vllm.py")
"""These share one vLLM engine, which takes tens of seconds to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs two processes: a file stays whole, so that its fixtures are made once."""
    for item in items:
        group = "engines" if item.path.name in ENGINES else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
