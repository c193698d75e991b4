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
