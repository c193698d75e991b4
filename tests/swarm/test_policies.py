"""Two policies in one process over real libp2p: two members of the swarm, and one of everything heavy."""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from swarmnode.machine.storage import Paths

Join = Callable[..., Any]

TWO = ("--policies", "2", "--seed", "0")

pytestmark = pytest.mark.slow


def adapters(paths: Paths) -> list[str]:
    return sorted(file.parts[-3] for file in paths.checkpoints.rglob("adapter_model.safetensors"))


def test_policies_learn_from_each_other_go_on_with_one_more_and_start_over_together(join: Join) -> None:
    first = join(*TWO, "--rounds", "6")
    found = first.summary()
    peers = [policy["peer"] for policy in found["policies"]]
    assert len(set(peers)) == 2
    for policy, other in zip(found["policies"], reversed(peers), strict=True):
        assert policy["rounds"] == policy["saved_round"] == 6
        assert set(policy["external_groups_trained"]) == {other}
        assert policy["external_groups_trained"][other] > 0
    assert found["totals"]["rounds"] == 12 and found["totals"]["failed"] == 0
    homes = [first.paths, first.paths.policy(1)]
    for home in homes:
        assert adapters(home)[-1] == "round-00000006"
    newest = [next(home.checkpoints.rglob("round-00000006/adapter/*.safetensors")) for home in homes]
    assert newest[0].read_bytes() != newest[1].read_bytes()

    short = ("--seed", "0", "--set", "exchange.external_groups=0")
    three = join("--policies", "3", "--rounds", "7", *short)
    again = three.summary()
    assert [policy["rounds"] for policy in again["policies"]] == [7, 7, 7]
    for number, before in enumerate(found["policies"]):
        after = again["policies"][number]
        assert f"policy {number}: resumed after round 6" in three.story
        assert (after["peer"], after["reward_first"]) == (before["peer"], before["reward_first"])
        assert after["tokens"] > before["tokens"]
    assert "policy 2: resumed" not in three.story
    one = join("--rounds", "1", "--fresh", *short)
    assert one.summary()["rounds"] == 1
    assert one.story.count("starting over") == 3


def test_status_shows_all_policies_and_one_signal_stops_them_with_checkpoints(
    join: Join, swarmnode: Callable[..., Any]
) -> None:
    node = join(*TWO)
    node.until_round(2)
    command = ("status", "--home", str(node.home))
    policies = json.loads(swarmnode(*command, "--json").stdout)["policies"]
    assert len({policy["peer_id"] for policy in policies}) == 2
    assert {policy["pid"] for policy in policies} == {node.process.pid}
    assert [(policy["policy"], policy["policies"]) for policy in policies] == [(0, 2), (1, 2)]
    page = swarmnode(*command).stdout
    assert all(policy["name"] in page for policy in policies)

    node.kill(signal.SIGTERM)
    for policy in node.summary()["policies"]:
        assert policy["stopped"] == "stopped on request"
        assert policy["saved_round"] == policy["rounds"] > 0
