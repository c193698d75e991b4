"""What commands say and do about one of several policies."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.cli.settings import of_policy
from swarmnode.errors import ConfigError
from swarmnode.extensions.trial_swarm.local_swarm import SwarmPlan, run_local_swarm
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.showing.node_status import NodeStatus, Phase
from swarmnode.settings.config_layers import load_settings
from tests.shown_page import shown_page

STATUS = NodeStatus(
    peer_id="peer", name="otter", swarm="commons", model="tiny", version="1", pid=1, started_at=0.0,
    phase=Phase("training", 0.0),
)  # fmt: skip
UNUSED_PORT = 1


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return resolve_paths(tmp_path)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def shows(stack: ExitStack, place: Paths, status: NodeStatus) -> None:
    """A policy with a note and a page."""
    server = stack.enter_context(shown_page(lambda: status))
    leaves_a_note(place, server.port)


def leaves_a_note(place: Paths, port: int) -> None:
    import os

    write_running(place.running, RunningNode(os.getpid(), "peer", "127.0.0.1", port))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout


def test_status_of_several_policies_is_a_list_also_while_only_one_is_left(
    paths: Paths, tmp_path: Path, stack: ExitStack
) -> None:
    leaves_a_note(paths, UNUSED_PORT)
    shows(stack, paths.policy(1), replace(STATUS, policy=1, policies=2))
    code, text = run("status", "--home", str(tmp_path), "--json")
    assert code == 0
    assert [policy["policy"] for policy in json.loads(text)["policies"]] == [1]


def test_status_of_one_policy_is_that_policy(paths: Paths, tmp_path: Path, stack: ExitStack) -> None:
    shows(stack, paths, STATUS)
    assert json.loads(run("status", "--home", str(tmp_path), "--json")[1])["peer_id"] == "peer"


def test_where_no_page_answers_status_says_so(paths: Paths, tmp_path: Path) -> None:
    leaves_a_note(paths, UNUSED_PORT)
    assert run("status", "--home", str(tmp_path))[0] != 0


def test_each_policy_has_its_own_identity(tmp_path: Path) -> None:
    def peer(*more: str) -> str:
        return json.loads(run("identity", "show", "--home", str(tmp_path), "--json", *more)[1])["peer_id"]

    assert peer() == peer("--policy", "0") != peer("--policy", "1")


def test_eval_and_export_are_about_the_policy_that_is_named(paths: Paths, tmp_path: Path) -> None:
    paths.policy(1).data.mkdir(parents=True)
    settings = load_settings(home=tmp_path, assignments=["policy.model=tiny", "tasks.mixes=['rev', 'gcd']"])
    second = of_policy(settings, 1)
    assert (second.paths, second.config.tasks.names) == (paths.policy(1), ("gcd",))
    assert of_policy(settings, 0).paths == paths
    with pytest.raises(ConfigError, match="no policy 2"):
        of_policy(settings, 2)


def test_a_local_swarm_has_one_policy_a_node(tmp_path: Path) -> None:
    plan = SwarmPlan(nodes=2, rounds=1, seed=0, assignments=("node.policies=2",))
    with pytest.raises(ConfigError, match="one policy"):
        run_local_swarm(plan, tmp_path, show=print)
