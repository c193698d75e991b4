"""Real nodes in real processes on loopback, each in a temporary home; ended by pid, never by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.joined_node import JoinedNode
from tests.warm_start import WarmStart


@pytest.fixture
def join(tmp_path: Path, quick_model: Path, warm: WarmStart) -> Iterator[Callable[..., JoinedNode]]:
    """Start nodes on loopback; whatever still runs afterwards is ended."""
    nodes: list[JoinedNode] = []

    def start(
        *arguments: str,
        home: str = "node",
        model: Path | str | None = None,
        data_bytes: int | None = None,
    ) -> JoinedNode:
        policy = ("--model", str(model or quick_model), "--preset", "tiny")
        settings = ("--set", "network.listen=127.0.0.1", "--set", "tasks.eval_examples=8")
        node = JoinedNode(tmp_path / home, *policy, *settings, *arguments, warm=warm, data_bytes=data_bytes)
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        node.end()


@pytest.fixture
def swarmnode(tmp_path: Path, warm: WarmStart) -> "Callable[..., CompletedProcess[str]]":
    """Run a command to its end."""
    return lambda *arguments: warm.run(arguments, tmp_path)
