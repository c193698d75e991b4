"""Several real nodes over real libp2p: they learn from each other, and no death takes the others along."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running

Join = Callable[..., Any]

pytestmark = pytest.mark.slow


def daemon_of(node: Any) -> psutil.Process:
    """The p2pd of a node: its only child of that name."""
    (daemon,) = [c for c in psutil.Process(node.process.pid).children() if c.name() == "p2pd"]
    return daemon


def test_three_nodes_train_on_groups_of_both_others(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarmnode", "swarm", "--nodes", "3", "--rounds", "30", "--seed", "0"]
    policy = ["--model", str(tiny_model), "--set", "rollout.max_tokens=10", "--set", "rollout.groups=8"]
    done = subprocess.run(
        [*command, *policy, "--home", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    nodes = json.loads(done.stdout.splitlines()[-1])["nodes"]
    peers = {node["peer"] for node in nodes}
    assert len(peers) == 3
    for node in nodes:
        told = {"knew", "learnt", "answers_of_others"}
        assert set(node) == {"peer", "reward_first", "reward_last", "external_groups_trained"} | told
        assert node["answers_of_others"] > 0
        assert set(node["external_groups_trained"]) == peers - {node["peer"]}
        assert all(count > 0 for count in node["external_groups_trained"].values())


def test_a_killed_node_comes_back_as_itself_and_the_others_never_stopped(
    join: Join, tiny_model: Path
) -> None:
    settings = ("--set", "node.checkpoint_every=2")
    first = join(*settings, "--seed", "1", home="first", model=tiny_model)
    address = first.running().addresses[0]
    second = join(address, *settings, "--seed", "2", home="second", model=tiny_model)
    victim = join(address, *settings, "--seed", "3", home="victim", model=tiny_model)
    others = (first, second)
    peer = victim.status()["peer_id"]
    for node in others:
        node.until(lambda node=node: node.status()["exchange"]["trained"].get(peer, 0) > 0)
    victim.until(lambda: victim.status()["checkpoint"]["round"] is not None)
    daemon = daemon_of(victim)
    saved = victim.status()["checkpoint"]["round"]

    victim.kill(signal.SIGKILL)
    victim.wait()
    rounds = [node.status()["progress"]["round"] for node in others]
    for node, round in zip(others, rounds, strict=True):
        node.until_round(round + 3)
    psutil.wait_procs([daemon], timeout=30)
    assert not daemon.is_running(), "the network process must not outlive its node"

    back = join(address, *settings, "--seed", "3", home="victim", model=tiny_model)
    status = back.status()
    assert status["peer_id"] == peer
    assert "resumed after round" in back.story
    assert status["progress"]["round"] >= saved
    trained = {node: node.status()["exchange"]["trained"].get(peer, 0) for node in others}
    for node in others:
        node.until(lambda node=node: node.status()["exchange"]["trained"].get(peer, 0) > trained[node])
    back.until(lambda: back.status()["network"]["peers"] == 2)


def test_training_goes_on_without_the_network_daemon_and_gossip_flows_again(
    join: Join, tiny_model: Path
) -> None:
    first = join("--seed", "1", home="first", model=tiny_model)
    second = join(first.running().addresses[0], "--seed", "2", home="second", model=tiny_model)
    peer = first.status()["peer_id"]
    second.until(lambda: second.status()["exchange"]["trained"].get(peer, 0) > 0)

    os.kill(daemon_of(first).pid, signal.SIGKILL)
    first.until(lambda: first.status()["network"]["restarts"] == 1, 30)
    round = first.status()["progress"]["round"]
    first.until_round(round + 2)
    first.until(lambda: first.status()["network"]["state"] == "up")

    trained = second.status()["exchange"]["trained"][peer]
    heard = first.status()["exchange"]["headers"]
    second.until(lambda: second.status()["exchange"]["trained"][peer] > trained + 16)
    first.until(lambda: first.status()["exchange"]["headers"] > heard)
    assert first.status()["peer_id"] == peer


def end_nodes_below(folder: Path) -> None:
    for home in folder.glob("node-*"):
        if (note := read_running(resolve_paths(home).running)) is not None:
            os.kill(note.pid, signal.SIGKILL)


def test_ctrl_c_on_a_local_swarm_stops_every_node_with_a_checkpoint(
    quick_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "swarmnode", "swarm", "--nodes", "2", "--rounds", "100000"]
    policy = ["--model", str(quick_model), "--set", "rollout.max_tokens=10", "--home", str(tmp_path)]
    with (tmp_path / "err").open("w") as err:
        swarm = subprocess.Popen(
            [*command, *policy],
            stdout=err,
            stderr=err,
            start_new_session=True,
            # A shell lets its background jobs ignore Ctrl-C, and the suite may be one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        deadline = time.monotonic() + 90
        logs = [tmp_path / f"node-{n}" / "state" / "logs" / "metrics.jsonl" for n in range(2)]
        while not all(log.exists() and '"round"' in log.read_text() for log in logs):
            assert time.monotonic() < deadline and swarm.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.1)
        os.killpg(swarm.pid, signal.SIGINT)
        assert swarm.wait(60) == 130
    finally:
        if swarm.poll() is None:
            swarm.kill()
            end_nodes_below(tmp_path)
    assert "Traceback" not in (tmp_path / "err").read_text()
    for n in range(2):
        assert list((tmp_path / f"node-{n}").rglob("round-*/state.json")), "each node saved where it was"
