"""Real nodes, real daemons and an attacker, each a process of its own on loopback.

A pair of nodes serves a file: what one attack did must not change what the next one meets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attackers.handle import Attacker
from swarmnode.errors import NetworkError
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from tests.joined_node import JoinedNode
from tests.warm_start import WarmStart

LOOPBACK = ("--preset", "tiny", "--set", "network.listen=127.0.0.1", "--set", "tasks.eval_examples=8")
MOST_S = 60.0
"""How long an attack may last when nobody ends it earlier."""


@pytest.fixture(autouse=True, scope="session")
def needs_the_daemon() -> None:
    try:
        find_daemon()
    except NetworkError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Pair:
    """A victim, and an honest node that shares with it."""

    victim: JoinedNode
    honest: JoinedNode

    @property
    def addresses(self) -> list[str]:
        return [node.running().addresses[0] for node in (self.victim, self.honest)]

    def attacked_by(self, name: str, **options: Any) -> Attacker:
        """An attack on both, which the test enters and ends."""
        return Attacker(name, self.addresses, **{"seconds": MOST_S, **options})

    @property
    def restarts(self) -> tuple[int, int]:
        """Of either daemon."""
        return tuple(node.status()["network"]["restarts"] for node in (self.victim, self.honest))  # type: ignore[return-value]

    def go_on(self) -> None:
        """Each trains on groups of the other that it did not have before."""
        for one, other in ((self.victim, self.honest), (self.honest, self.victim)):
            peer = other.status()["peer_id"]

            def trained(node: JoinedNode = one, peer: str = peer) -> int:
                return node.status()["exchange"]["trained"].get(peer, 0)

            before = trained()
            one.until(lambda trained=trained, before=before: trained() > before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, warm: WarmStart) -> Iterator[Pair]:
    """Two nodes that train on each other's groups, for one file: they never rest."""
    folder = tmp_path_factory.mktemp("pair")
    options = ("--model", str(tiny_model), *LOOPBACK)
    nodes = [JoinedNode(folder / "victim", *options, "--seed", "1", warm=warm)]
    try:
        address = nodes[0].running().addresses[0]
        nodes.append(JoinedNode(folder / "honest", address, *options, "--seed", "2", warm=warm))
        both = Pair(*nodes)
        both.go_on()
        yield both
    finally:
        for node in nodes:
            node.end()


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, warm: WarmStart) -> Iterator[Callable[..., JoinedNode]]:
    """Start nodes for one test; whatever still runs afterwards is ended."""
    nodes: list[JoinedNode] = []

    def join(*arguments: str, home: str = "node") -> JoinedNode:
        options = ("--model", str(tiny_model), *LOOPBACK, *arguments)
        node = JoinedNode(tmp_path / home, *options, warm=warm)
        nodes.append(node)
        return node

    yield join
    for node in nodes:
        node.end()
