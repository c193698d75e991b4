"""The verdict on who can reach a node: what peers found, twice, and what follows from it in words."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarmnode.extensions.reach import reachability
from swarmnode.extensions.reach.dialback import DialBack, DialReport
from swarmnode.extensions.reach.reachability import (
    Reachability,
    ReachEstimate,
    ReachEvidence,
    conclude,
    helpers,
    tcp_port,
)
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork

SEEN = "203.0.113.9"
PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
SEED = f"/ip4/198.51.100.1/tcp/4001/p2p/{PEER}"
AT_HOME = ReachEvidence(
    PEER,
    (f"/ip4/192.168.1.20/tcp/4001/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"),
    peers=1,
    outside=1,
    through={},
    settled=True,
)
PUBLIC = replace(AT_HOME, addresses=(f"/ip4/{SEEN}/tcp/4001/p2p/{PEER}",))


def said(*outcomes: str) -> list[DialReport]:
    return [DialReport(outcome, SEEN) for outcome in outcomes]  # pyright: ignore[reportArgumentType]


def held_after(*rounds: Sequence[DialReport]) -> ReachEstimate:
    held = ReachEstimate()
    for answers in rounds:
        held = held.after(answers)
    return held


def test_nothing_is_held_true_before_two_rounds_agree():
    yes, no = said("reached"), said("silent")
    assert held_after(yes).reached is None
    assert held_after(yes, yes).reached is True
    assert held_after(yes, yes, no).reached is True
    assert held_after(yes, yes, no, yes, no).reached is True
    assert held_after(yes, yes, no, no).reached is False


def test_one_liar_among_three_changes_nothing():
    assert held_after(*[said("reached", "silent", "silent")] * 2).reached is False
    assert held_after(*[said("reached", "reached", "silent")] * 2).reached is True


def test_who_refuses_to_look_says_nothing():
    assert held_after(*[said("refused", "refused", "reached")] * 2) == ReachEstimate(True, 0, 1, SEEN)
    assert held_after(*[said("refused")] * 3).reached is None


def test_peers_of_one_network_are_asked_once_and_those_at_home_not_at_all():
    ends = {
        "a": ["/ip4/203.0.113.1/tcp/1"],
        "b": ["/ip4/203.0.7.2/tcp/1"],
        "c": ["/ip4/198.51.100.1/tcp/1", "/ip4/192.168.1.9/tcp/1"],
        "d": ["/ip4/192.168.1.7/tcp/1"],
        "e": [f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit"],
        "f": ["/ip6/2001:db8::1/tcp/1"],
    }
    chosen = helpers(ends, random.Random(0))
    assert len(chosen) == 3 and {"c", "f"} <= set(chosen)


def test_a_node_that_peers_reached_is_reachable_and_says_how_many_looked():
    assert conclude(ReachEstimate(True, 0, 3, SEEN), PUBLIC).as_line() == "reachable"
    assert (
        conclude(ReachEstimate(True, 0, 1, SEEN), PUBLIC).as_line()
        == "reachable (as far as one peer can tell)"
    )
    assert conclude(ReachEstimate(True, 0, 3, SEEN), PUBLIC).addresses == PUBLIC.addresses


def test_a_forwarded_port_that_nobody_is_told_of_is_named():
    reach = conclude(ReachEstimate(True, 0, 3, SEEN), AT_HOME)
    assert reach.addresses == (f"/ip4/{SEEN}/tcp/4001/p2p/{PEER}",)
    assert f"network.announce=/ip4/{SEEN}/tcp/4001" in reach.steps[0]


def test_behind_a_router_the_invitation_is_the_seed_that_hands_on():
    reach = conclude(ReachEstimate(False, 0, 3, SEEN), replace(AT_HOME, through={PEER: SEED}))
    assert reach.verdict == "relayed" and reach.addresses == (SEED,)
    assert reach.text.startswith("behind a NAT, others reach you through ")


def test_who_is_reached_by_nobody_is_told_what_to_do():
    reach = conclude(ReachEstimate(False, 0, 3, SEEN), AT_HOME)
    assert reach.verdict == "nobody" and reach.addresses == ()
    assert reach.as_line().startswith("nobody can reach you: (1) forward TCP port 4001")
    assert "(2) join a seed" in reach.as_line()


def test_alone_behind_a_router_nobody_reaches_us_and_alone_in_public_nobody_knows():
    alone = replace(AT_HOME, peers=0, outside=0)
    assert conclude(ReachEstimate(), alone).verdict == "nobody"
    assert conclude(ReachEstimate(), replace(alone, settled=False)).verdict == "unknown"
    in_public = conclude(ReachEstimate(), replace(PUBLIC, peers=0, outside=0))
    assert in_public.verdict == "unknown" and in_public.addresses == PUBLIC.addresses


def test_among_neighbours_only_the_verdict_is_about_them():
    assert conclude(ReachEstimate(), replace(AT_HOME, outside=0)).verdict == "local"


def test_a_node_that_listens_on_loopback_is_told_why():
    here = replace(AT_HOME, addresses=AT_HOME.addresses[1:])
    assert "network.listen" in conclude(ReachEstimate(), here).text


def test_quic_and_relayed_addresses_have_no_port_to_be_tried():
    circuit = f"/ip4/198.51.100.1/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
    assert tcp_port([circuit, "/ip4/192.0.2.7/udp/4001/quic-v1"]) is None


# ---- on a network ----


async def knock(ip: str, port: int, peer_id: str) -> bool:
    """Who is asked about the home at .9 finds nobody; all others can be dialled."""
    return ip != SEEN


def looking(host: MemoryHost, dialled: dict[str, str]) -> Reachability:
    return Reachability(host, lambda: dialled, dialback=DialBack(host, answers=knock), rng=random.Random(0))


async def until_verdict(one: Reachability, verdict: str) -> None:
    async with asyncio.timeout(20):
        while one.reach.verdict != verdict:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_home_hears_that_it_is_behind_a_router_and_its_seed_that_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(reachability, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(reachability, "AGAIN_S", 0.02)
    monkeypatch.setattr("swarmnode.extensions.reach.dialback.MAX_PER_ASKER", 1000)
    monkeypatch.setattr("swarmnode.extensions.reach.dialback.MAX_PER_ADDRESS", 1000)
    monkeypatch.setattr("swarmnode.extensions.reach.dialback.MAX_IN_ALL", 1000)
    network = MemoryNetwork()
    async with network.host(ip="198.51.100.1") as seed, network.host(ip=SEEN, dialable=False) as home:
        await home.connect(seed.address)
        of_seed, of_home = looking(seed, {}), looking(home, {seed.peer_id: seed.address})
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each.run()) for each in (of_seed, of_home)]
            await until_verdict(of_home, "relayed")
            await until_verdict(of_seed, "reachable")
            assert of_home.reach.addresses == (seed.address,)
            seed.go_down()
            await until_verdict(of_home, "unknown")
            for each in running:
                each.cancel()
