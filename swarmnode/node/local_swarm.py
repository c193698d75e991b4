"""A real swarm on one machine: one `swarmnode join` process per node, on loopback.

cli swarm -> [run_local_swarm] -> N processes -> their last lines

Keys and ports are made beforehand, so that every node knows the first one's address before it is up.
"""

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnode.config_layers import load_config
from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.identity.keys import NodeKey, load_or_create
from swarmnode.paths import resolve_paths

LAST_LINES = 20
"""Kept of each node, to show when it fails."""
STOP_GRACE_S = 20.0
REPORTED = ("peer", "reward_first", "reward_last", "external_groups_trained")


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    nodes: int
    rounds: int
    seed: int
    model: str | None = None
    tasks: tuple[str, ...] = ()
    assignments: tuple[str, ...] = ()


@dataclass(slots=True)
class LocalNode:
    """One member: where it lives, and its process once started."""

    home: Path
    key: NodeKey
    port: int
    process: subprocess.Popen[str] | None = None
    last_line: str = ""
    story: deque[str] = field(default_factory=lambda: deque[str](maxlen=LAST_LINES))

    @property
    def address(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.key.peer_id}"


def run_local_swarm(plan: SwarmPlan, home: Path | None, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run all nodes to their end; returns their results in order. Raises SwarmnodeError when one fails."""
    if load_config(assignments=plan.assignments).config.node.policies > 1:
        raise ConfigError(
            "each node of a local swarm has one policy",
            hint="leave out node.policies and raise --nodes, or use `swarmnode join --policies`",
        )
    with _folder(home) as root:
        nodes = [_prepare(root / f"node-{number}") for number in range(plan.nodes)]
        model = plan.model or str(_tiny(root, show))
        try:
            readers = [
                thread
                for number, node in enumerate(nodes)
                for thread in _start(node, arguments(plan, nodes, number, model), show)
            ]
            for thread in readers:
                thread.join()
            for node in nodes:
                assert node.process is not None
                node.process.wait()
        finally:
            stop_all(nodes)
        return [_result(node) for node in nodes]


def arguments(plan: SwarmPlan, nodes: list[LocalNode], number: int, model: str) -> list[str]:
    """The `join` command line of one node. All but the first know the first one's address."""
    node = nodes[number]
    settings = ["network.listen=127.0.0.1", f"network.wait_for_peers={len(nodes) - 1}", *plan.assignments]
    return [
        *([nodes[0].address] if number else []),
        *("--home", str(node.home), "--port", str(node.port), "--model", model),
        *([] if plan.model else ["--preset", "tiny"]),
        *("--rounds", str(plan.rounds), "--seed", str(plan.seed + number)),
        *[part for task in plan.tasks for part in ("--task", task)],
        *[part for setting in settings for part in ("--set", setting)],
    ]


def stop_all(nodes: list[LocalNode]) -> None:
    """End what still runs: all are asked first, those that do not listen are told."""
    running = [node.process for node in nodes if node.process is not None and node.process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _folder(home: Path | None) -> Iterator[Path]:
    if home is not None:
        yield home.expanduser().absolute()
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-") as temporary:
        yield Path(temporary)


def _prepare(home: Path) -> LocalNode:
    return LocalNode(home, load_or_create(resolve_paths(home).identity), _free_port())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _tiny(root: Path, show: Callable[[str], None]) -> Path:
    """The tiny policy, built once for all nodes."""
    from swarmnode.training.tiny import build_tiny

    show("building the tiny policy, once for all nodes")
    return build_tiny(resolve_paths(root / "shared").models)


def _start(node: LocalNode, options: list[str], show: Callable[[str], None]) -> list[threading.Thread]:
    node.process = subprocess.Popen(
        # -P: a file called random.py where the person happens to be must not be taken for the library's.
        [sys.executable, "-P", "-m", "swarmnode", "join", *options],
        # A Ctrl-C in the terminal is for us; the nodes are then asked once, by us.
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def keep_last(line: str) -> None:
        node.last_line = line

    def tell(line: str) -> None:
        node.story.append(line)
        show(f"{node.key.name}  {line}")

    threads = [
        threading.Thread(target=_read_lines, args=(stream, use), daemon=True)
        for stream, use in ((node.process.stdout, keep_last), (node.process.stderr, tell))
    ]
    for thread in threads:
        thread.start()
    return threads


def _read_lines(stream: Any, use: Callable[[str], None]) -> None:
    for line in stream:
        if line.strip():
            use(line.rstrip())


def _result(node: LocalNode) -> dict[str, Any]:
    assert node.process is not None
    if node.process.returncode != 0:
        last = node.story[-1] if node.story else "it printed nothing"
        raise SwarmnodeError(
            f"node {node.key.name} ended with exit code {node.process.returncode}: {last}",
            hint=f"its log is in {resolve_paths(node.home).logs}",
        )
    summary = json.loads(node.last_line)
    return {name: summary[name] for name in REPORTED}
