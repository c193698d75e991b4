"""Two people behind their routers learn from each other, whatever their routers do."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnode.extensions.private_swarms.swarm_record import founded
from swarmnode.extensions.trial_swarm.nat_lab import INTERNET, Lab, LabError, LabMachine
from swarmnode.identity.node_key import NodeKey
from tests.homes.conftest import NAT_PMP, SLOW_LINE, Running, until

Start = Callable[..., Running]
Beside = Callable[..., None]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"nat": "cone"}, {"nat": "cone"}),
        ({"nat": "cone"}, {"nat": "symmetric"}),
        ({"nat": "symmetric"}, {"nat": "symmetric"}),
        ({"double": True}, {"nat": "cone"}),
    ],
    ids=["cone-cone", "cone-symmetric", "symmetric-symmetric", "behind-two-routers"],
)
def test_two_homes_exchange_groups_through_a_seed_and_thank_each_other(
    lab: Lab, start: Start, one: dict[str, Any], other: dict[str, Any]
) -> None:
    seed = start(lab.public(), seed=True)
    a, b = start(lab.home(**one)[0], seed.address), start(lab.home(**other)[0], seed.address)
    until(lambda: a.has_from(b) >= 5 and b.has_from(a) >= 5)
    until(lambda: a.last["thanked_by"] == b.last["thanked_by"] == 1)
    assert b.peer not in a.last["peers"] and a.peer not in b.last["peers"]


def test_homes_go_on_through_a_member_that_can_be_reached_when_the_seed_is_gone(
    lab: Lab, start: Start
) -> None:
    seed = start(lab.public(), seed=True)
    third = start(lab.public(), seed.address)
    a, b = start(lab.home()[0], seed.address), start(lab.home()[0], seed.address)
    until(lambda: third.peer in a.last["peers"] and third.peer in b.last["peers"])
    seed.process.kill()
    seed.process.wait()
    until(lambda: len(a.last["peers"]) == 1 and len(b.last["peers"]) == 1)
    before = a.has_from(b), b.has_from(a)
    until(lambda: a.has_from(b) >= before[0] + 5 and b.has_from(a) >= before[1] + 5)


def test_a_home_that_was_cut_off_finds_back(lab: Lab, start: Start) -> None:
    seed = start(lab.public(), seed=True)
    (cut,) = lab.home()
    a, b = start(cut, seed.address), start(lab.home()[0], seed.address)
    until(lambda: a.has_from(b) >= 2)
    with cut.unplugged():
        until(lambda: not a.last["peers"])
    before = a.has_from(b)
    until(lambda: a.has_from(b) >= before + 3)


def test_a_home_that_gets_another_address_at_night_finds_back(lab: Lab, start: Start) -> None:
    seed = start(lab.public(), seed=True)
    (inside,) = lab.home()
    a, b = start(inside, seed.address), start(lab.home()[0], seed.address)
    until(lambda: a.has_from(b) >= 2 and b.has_from(a) >= 2)
    lab.move(inside)
    before = a.has_from(b), b.has_from(a)
    # What was on its way when the address changed may still come.
    until(lambda: a.has_from(b) >= before[0] + 8 and b.has_from(a) >= before[1] + 8)


def test_two_machines_of_one_home_that_are_told_of_nobody_find_each_other(lab: Lab, start: Start) -> None:
    one, other = (start(machine) for machine in lab.home(machines=2))
    until(lambda: one.has_from(other) >= 3 and other.has_from(one) >= 3)
    assert other.peer in one.last["peers"]


def test_homes_learn_over_lossy_and_slow_lines(lab: Lab, start: Start, beside: Beside) -> None:
    """One loses packets; the other sends and receives 32 kB/s, 0.2 s later."""
    at_seed, line = lab.public(), lab.public()
    seed = start(at_seed, seed=True)
    beside(line, SLOW_LINE, "4001", at_seed.address, "4001", "0.2", "32000")
    lossy = start(lab.home(loss=0.02)[0], seed.address)
    slow = start(lab.home()[0], seed.address.replace(at_seed.address, line.address))
    until(lambda: lossy.has_from(slow) >= 5 and slow.has_from(lossy) >= 5)


def test_a_router_that_is_asked_to_forwards_a_port(lab: Lab, start: Start, beside: Beside) -> None:
    seed = start(lab.public(), seed=True)
    (inside,) = lab.home()
    outside = lab.move(inside)
    beside(LabMachine(inside.router, "192.168.1.1", "lan"), NAT_PMP, outside)
    home = start(inside, seed.address, MEMBER_MAP_PORT="1")
    until(lambda: home.last["verdict"] == "reachable")
    (address,) = home.last["invites"]
    assert outside in address
    outsider = start(lab.public(), address)
    until(lambda: home.peer in outsider.last["peers"])


def test_homes_of_a_private_swarm_exchange_through_its_seed_and_a_home_without_the_key_gets_nothing(
    lab: Lab, start: Start
) -> None:
    friends = founded("commons", NodeKey.generate(), ())
    seed = start(lab.public(), seed=True, record=friends)
    a, b = (start(lab.home()[0], seed.address, record=friends) for _ in range(2))
    stranger = start(lab.home()[0], seed.address)
    until(lambda: a.has_from(b) >= 5 and b.has_from(a) >= 5)
    assert a.has_from(stranger) == b.has_from(stranger) == 0
    assert stranger.last["authors"] == {} and stranger.peer not in (*a.last["peers"], *b.last["peers"])


@pytest.mark.slow
def test_two_nodes_of_a_local_swarm_in_homes_learn_from_each_other(
    lab: Lab, tmp_path: Path, tiny_model: Path
) -> None:
    command = [sys.executable, "-m", "swarmnode", "swarm", "--homes", "2", "--rounds", "30", "--seed", "0"]
    command += ["--model", str(tiny_model), "--set", "rollout.max_tokens=10"]
    done = subprocess.run(
        [*command, "--home", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    one, other = json.loads(done.stdout.splitlines()[-1])["nodes"]
    assert one["external_groups_trained"][other["peer"]] > 0
    assert other["external_groups_trained"][one["peer"]] > 0
    assert {"reward_last", "alone_reward_last"} <= set(one)


def test_nobody_dials_into_a_home(lab: Lab) -> None:
    public, (inside,) = lab.public(), lab.home()
    knock = "import socket, sys; socket.create_connection((sys.argv[1], 4001), 2)"
    with pytest.raises(LabError):
        public.run(["python3", "-c", knock, inside.address])
    with pytest.raises(LabError, match=r"timed out|TimeoutError|refused"):
        public.run(["python3", "-c", knock, f"{INTERNET}.2"])


def test_each_is_told_who_can_reach_it_and_invites_with_what_works(lab: Lab, start: Start) -> None:
    seed = start(lab.public(), seed=True)
    home, alone = start(lab.home()[0], seed.address), start(lab.home()[0])
    public = start(lab.public(), seed.address)
    until(lambda: home.last["verdict"] == "relayed")
    until(lambda: public.last["verdict"] == "reachable")
    until(lambda: alone.last["verdict"] == "nobody")
    assert "behind a NAT" in home.last["told"] and home.last["invites"] == [seed.address]
    assert public.last["told"].startswith("reachable (as far as") and public.last["invites"] == [
        public.address
    ]
    assert "(1) forward TCP port 4001" in alone.last["told"] and alone.last["invites"] == []


def test_a_port_that_a_router_forwards_is_found(lab: Lab, start: Start) -> None:
    seed = start(lab.public(), seed=True)
    (inside,) = lab.home(forward=4001)
    home = start(inside, seed.address)
    until(lambda: home.last["verdict"] == "reachable")
    (address,) = home.last["invites"]
    assert "network.announce=" in home.last["told"] and "192.168." not in address
    outsider = start(lab.public(), address)
    until(lambda: home.peer in outsider.last["peers"])
