"""A model that is nowhere to be had is an error at once, and not after minutes of attempts."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ASK = """
from swarmnode.errors import ModelError
from swarmnode.model.model_hub import only_from_disk

try:
    print(only_from_disk("owner/name"))
except ModelError as error:
    print(error)
"""


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def environment(port: int, cache: Path) -> dict[str, str]:
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(cache)}
    return {**os.environ, **hub, "NO_PROXY": "127.0.0.1"}


def ask(port: int, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=environment(port, cache),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def cached(cache: Path) -> None:
    folder = cache / "hub" / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "config.json").write_text("{}")


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path, closed_port: int) -> None:
    said = ask(closed_port, tmp_path)
    assert said.startswith("owner/name is not on this disk, and the hub cannot be reached: ")
    assert "--model tiny" in said


def test_a_hub_that_never_answers_is_not_waited_for(tmp_path: Path, silent_port: int) -> None:
    assert "the hub cannot be reached" in ask(silent_port, tmp_path)


def test_what_is_in_the_cache_needs_no_hub(tmp_path: Path, closed_port: int) -> None:
    cached(tmp_path)
    assert ask(closed_port, tmp_path) == "True\n"


def test_the_command_line_says_it_before_anything_heavy_is_loaded(tmp_path: Path, closed_port: int) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "swarmnode", "join", "--model", "owner/name"]
    done = subprocess.run(
        [*command, "--home", str(tmp_path / "home"), "--set", "exchange.enabled=false"],
        env=environment(closed_port, tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 7
    assert "error: owner/name is not on this disk" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "huggingface_hub" in imported and not {"torch", "transformers"} & imported
