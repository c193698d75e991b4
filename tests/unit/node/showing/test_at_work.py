"""Health is a node's work, not its port."""

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import SwarmnodeError
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.showing.at_work import NETWORK_PATIENCE_S, PATIENCE_S, at_work
from swarmnode.node.showing.node_status import Network, NodeStatus, Phase, Speed
from tests.shown_page import STATUS, shown_page

NOW_S = 100_000.0
LATE_S = NOW_S - PATIENCE_S - 1


def in_phase(name: str, since: float, detail: str = "", **speed: float) -> NodeStatus:
    return replace(STATUS, phase=Phase(name, since, detail), speed=Speed(**speed))


def test_a_node_that_has_just_done_a_round_is_well_however_long_its_phase_lasts() -> None:
    overlapped = in_phase("training and generating", 0.0, done_at=NOW_S - 60)
    assert at_work(overlapped, NOW_S) == (True, "round 12 is done, training and generating")


def test_a_first_round_has_time_and_then_no_more() -> None:
    assert at_work(in_phase("generating", NOW_S - 60), NOW_S)[0]
    assert at_work(in_phase("generating", LATE_S, "8 groups of 8"), NOW_S) == (
        False,
        "no progress for 30 min: generating, 8 groups of 8",
    )


def test_a_slow_machine_is_measured_by_its_own_rounds() -> None:
    hung = {"done_at": LATE_S, "round_s": 1.0}
    assert not at_work(in_phase("training", LATE_S, **hung), NOW_S)[0]
    assert at_work(in_phase("training", LATE_S, **{**hung, "round_s": PATIENCE_S}), NOW_S)[0]


@pytest.mark.parametrize("phase", ["paused", "waiting for peers", "waiting for a place in the pipeline"])
def test_who_waits_and_says_for_what_is_well(phase: str) -> None:
    assert at_work(in_phase(phase, 0.0, "until 07:00"), NOW_S) == (True, f"{phase}, until 07:00")


def test_a_seed_is_well_while_its_network_is_up_or_comes_back() -> None:
    seed = replace(STATUS, learns=False, phase=Phase("connecting others", 0.0))
    down = replace(seed, network=Network("restarting", NOW_S - 5))
    assert at_work(replace(seed, network=Network("up", 0.0, peers=3)), NOW_S) == (True, "network up, 3 peers")
    assert at_work(down, NOW_S)[0] and not at_work(down, NOW_S + NETWORK_PATIENCE_S)[0]


def test_the_command_says_it_in_a_line_and_fails_when_nothing_is_done(tmp_path: Path) -> None:
    now = replace(STATUS, phase=Phase("generating", time.time()))
    asked = ["status", "--healthy", "--home", str(tmp_path)]
    with shown_page(lambda: now) as page:
        note = RunningNode(os.getpid(), now.peer_id, "127.0.0.1", page.port, (), page.token)
        write_running(resolve_paths(tmp_path).running, note)
        assert CliRunner().invoke(app, asked).stdout == "calm-blue-otter: round 12 is done, generating\n"
        now = STATUS
        failed = CliRunner().invoke(app, asked).exception
    assert isinstance(failed, SwarmnodeError) and "no progress for" in failed.message
    assert failed.exit_code == 1
