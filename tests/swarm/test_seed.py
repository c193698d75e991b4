"""A seed as a process of its own: nodes that know only its address meet through it, over real libp2p."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

Join = Callable[..., Any]
Command = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed"),
]

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "peft", "numpy", "safetensors", "hivemind.p2p"):
    sys.modules[name] = None  # whoever imports it gets an ImportError
from swarmnode.cli.app import main
sys.argv = ["swarmnode", *sys.argv[1:]]
main()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def seed(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start seeds in processes that cannot import torch; each comes with the address that it printed."""
    seeds: list[subprocess.Popen[str]] = []

    def start(port: int, *more: str, home: str = "seed") -> tuple[subprocess.Popen[str], str]:
        place = ("--home", str(tmp_path / home), "--port", str(port))
        options = (*more, *place, "--set", "network.listen=127.0.0.1")
        with (tmp_path / "seed.txt").open("a") as story:
            process = subprocess.Popen(
                [sys.executable, "-c", WITHOUT_TORCH, "seed", *options],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=story, text=True,
            )  # fmt: skip
        seeds.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith(f"/ip4/127.0.0.1/tcp/{port}/p2p/"), (tmp_path / "seed.txt").read_text()
        return process, address

    yield start
    for process in seeds:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, ""), "the address is the only line on standard output"


def test_two_nodes_that_know_only_the_seed_train_on_each_others_groups_and_say_thanks(
    seed: Callable[..., tuple[subprocess.Popen[str], str]], join: Join
) -> None:
    process, address = seed(free_port())
    nodes = [join(address, "--seed", str(number), home=f"node-{number}") for number in range(2)]
    for node in nodes:
        node.until(lambda node=node: node.status()["network"]["peers"] >= 2)
        node.until(lambda node=node: node.status()["exchange"]["accepted"] > 0)
        node.until(lambda node=node: node.status()["receipts"]["nodes"] == 1)
        assert node.status()["receipts"]["groups"] > 0
        node.until(lambda node=node: node.status()["health"]["different_versions"] == 1)
        assert node.status()["health"]["nodes"] == 1
    end(process)
    for node in nodes:
        before = node.status()["exchange"]["accepted"]
        node.until(lambda node=node, before=before: node.status()["exchange"]["accepted"] > before)
    for node in nodes:
        node.kill(signal.SIGTERM)
        node.summary()


def test_a_private_swarm_is_founded_joined_by_an_invitation_and_closed_to_who_has_only_the_address(
    seed: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path, swarmnode: Command
) -> None:
    def command(*arguments: str, home: str) -> str:
        done = swarmnode(*arguments, "--home", str(tmp_path / home))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def network(home: str) -> dict[str, Any]:
        return json.loads(command("status", "--json", home=home))["network"]

    command("swarm", "create", "friends", "--private", home="seed")
    founder, address = seed(free_port(), "--swarm", "friends")
    invitation = command("swarm", "invite", home="seed")
    friend, _ = seed(free_port(), invitation, home="friend")
    stranger, _ = seed(free_port(), address, "--swarm", "friends", home="stranger")
    for _ in range(60):
        if network("friend")["peers"] == network("seed")["peers"] == 1 and network("stranger")["peers"] == 0:
            break
        time.sleep(0.5)
    else:
        raise AssertionError((tmp_path / "seed.txt").read_text())
    assert [network(home)["private"] for home in ("seed", "friend", "stranger")] == [True, True, False]
    listed = command("swarm", "members", home="seed")
    for home in ("friend", "stranger"):
        peer_id = json.loads(command("identity", "show", "--json", home=home))["peer_id"]
        assert (peer_id in listed) == (home == "friend")
    assert invitation[20:60] not in (tmp_path / "seed.txt").read_text()
    for process in (stranger, friend, founder):
        end(process)


def test_a_seed_that_comes_back_has_the_address_it_had(
    seed: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path, swarmnode: Command
) -> None:
    port = free_port()
    process, address = seed(port)
    status = ("status", "--home", str(tmp_path / "seed"))
    assert "connecting others" in swarmnode(*status).stdout
    end(process)
    assert swarmnode(*status).returncode == 1
    again, same = seed(port)
    assert same == address
    end(again)


def test_a_stop_before_the_node_is_up_is_obeyed_as_ctrl_c_is(tmp_path: Path) -> None:
    """As the first process of a container it would not hear a signal that nobody handles."""
    command = [sys.executable, "-m", "swarmnode", "join", "--home", str(tmp_path), "--model", "tiny"]
    node = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert node.stderr is not None
    assert "created the identity" in node.stderr.readline(), "it has begun, and builds its policy for seconds"
    node.send_signal(signal.SIGTERM)
    _, story = node.communicate(timeout=60)
    assert node.returncode == 130 and "error: stopped before the node had started" in story, story
    assert "Traceback" not in story
