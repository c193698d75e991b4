"""Two people behind their routers learn from each other, whatever their routers do."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from swarmnode.extensions.private_swarms.swarm_record import founded
from swarmnode.extensions.trial_swarm.nat_lab import INTERNET, Lab, LabError, LabMachine
from swarmnode.identity.node_key import NodeKey
from tests.homes.conftest import NAT_PMP, SLOW_LINE, Running, until

Start = Callable[..., Running]
Beside = Callable[..., None]


def test_homes_exchange_groups_through_a_seed_and_thank_each_other_whatever_their_routers_do(
    lab: Lab, start: Start
) -> None:
    seed = start(lab.public(), seed=True)
    machines = [lab.home(nat)[0] for nat in ("cone", "cone", "symmetric", "symmetric")]
    homes = [start(machine, seed.address) for machine in (*machines, *lab.home(double=True))]
    until(lambda: all(one.has_from(other) >= 5 for one, other in permutations(homes, 2)))
    until(lambda: all(home.last["thanked_by"] == len(homes) - 1 for home in homes))
    assert all(other.peer not in one.last["peers"] for one, other in permutations(homes, 2))


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


def test_a_home_that_was_cut_off_and_one_that_gets_another_address_at_night_find_back(
    lab: Lab, start: Start
) -> None:
    """Both at once: it takes most of a minute until a connection that says nothing any more is given up."""
    seed = start(lab.public(), seed=True)
    (at_cut,), (at_moved,) = lab.home(), lab.home()
    cut, moved = start(at_cut, seed.address), start(at_moved, seed.address)
    other = start(lab.home()[0], seed.address)
    pairs = [(cut, other), (moved, other), (other, moved)]
    until(lambda: all(one.has_from(another) >= 2 for one, another in pairs))
    lab.move(at_moved)
    with at_cut.unplugged():
        until(lambda: not cut.last["peers"])
    before = [one.has_from(another) for one, another in pairs]
    # What was on its way when the address changed may still come.
    until(lambda: all(pair[0].has_from(pair[1]) >= had + 8 for pair, had in zip(pairs, before, strict=True)))


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
    # On a busy machine one of them may be ready ten seconds after the other: both still have to be there.
    command = [sys.executable, "-m", "swarmnode", "swarm", "--homes", "2", "--rounds", "60", "--seed", "0"]
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


def test_each_is_told_who_can_reach_it_and_invites_with_what_works(
    lab: Lab, start: Start, beside: Beside
) -> None:
    """So is a home whose router was told to forward a port, and one that asks its router to do so."""
    seed = start(lab.public(), seed=True)
    (at_asking,) = lab.home()
    outside = lab.move(at_asking)
    beside(LabMachine(at_asking.router, "192.168.1.1", "lan"), NAT_PMP, outside)
    home, alone = start(lab.home()[0], seed.address), start(lab.home()[0])
    public = start(lab.public(), seed.address)
    told = start(lab.home(forward=4001)[0], seed.address)
    asking = start(at_asking, seed.address, MEMBER_MAP_PORT="1")
    until(lambda: home.last["verdict"] == "relayed")
    until(lambda: all(one.last["verdict"] == "reachable" for one in (public, told, asking)))
    until(lambda: alone.last["verdict"] == "nobody")
    assert "behind a NAT" in home.last["told"] and home.last["invites"] == [seed.address]
    assert public.last["told"].startswith("reachable (as far as")
    assert public.last["invites"] == [public.address]
    assert "(1) forward TCP port 4001" in alone.last["told"] and alone.last["invites"] == []
    (to_told,), (to_asking,) = told.last["invites"], asking.last["invites"]
    assert "network.announce=" in told.last["told"] and "192.168." not in to_told
    assert outside in to_asking
    outsider = start(lab.public(), to_told, to_asking)
    until(lambda: {told.peer, asking.peer} <= set(outsider.last["peers"]))
