"""A node sees the swarm by what it hears anyway, and a crowd of names costs it no memory."""

import pytest

from swarmnode.exchange.exchange_stats import HealthStats, NodesOf
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.messages import Header
from swarmnode.exchange.peers.swarm_health import (
    AGAIN_S,
    HEARD_S,
    MAX_NODES,
    MAX_TASKS_OF_NODE,
    MOST_NAMES,
    SwarmHealth,
)
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryNetwork
from tests.unit.exchange.conftest import Addition, Clock, StartNode, make_group, until

KEY = NodeKey(b"\1" * 32)


def header(task: str = "addition", swarm: str = "test") -> Header:
    group = make_group(KEY.peer_id, task=Addition(name=task))
    return compose(group, KEY, swarm=swarm, model=ModelLabel("tiny", None), now=0.0).header


def seen(health: SwarmHealth, clock: Clock) -> HealthStats:
    clock.advance(AGAIN_S)
    return health.figures(("one",), {"one": True, "other": False}.get)


def test_nodes_are_counted_by_task_version_and_reach(clock: Clock) -> None:
    health = SwarmHealth("test", clock)
    for author, task in (("one", "addition"), ("one", "chess"), ("other", "addition"), ("third", "addition")):
        health.note_header(author, header(task))
    health.note_version("other", "0.2")
    found = seen(health, clock)
    assert (found.nodes, found.known, found.reached, found.out_of_reach) == (3, 1, 1, 1)
    assert found.reachable_share == 0.5
    assert found.tasks == (NodesOf("addition", 3), NodesOf("chess", 1))
    assert found.versions == (NodesOf("0.2", 1),)
    assert (found.different_tasks, found.different_versions) == (2, 1)


def test_what_is_not_known_is_unknown_and_not_zero(clock: Clock) -> None:
    found = SwarmHealth("test", clock).figures((), lambda peer: None)
    assert (found.nodes, found.reachable_share, found.headers_per_s) == (0, None, None)


def test_who_is_silent_is_not_counted_any_more(clock: Clock) -> None:
    health = SwarmHealth("test", clock)
    health.note_header("one", header())
    assert seen(health, clock).nodes == 1
    clock.advance(HEARD_S)
    assert seen(health, clock).nodes == 0


@pytest.mark.parametrize("seconds", [20, 300])
def test_the_rate_is_right_soon_and_later(clock: Clock, seconds: int) -> None:
    health, one = SwarmHealth("test", clock), header()
    for _ in range(4 * seconds):
        clock.advance(0.25)
        health.note_header("one", one)
    assert health.figures((), lambda peer: None).headers_per_s == pytest.approx(4, rel=0.02)


def test_headers_of_another_swarm_are_not_counted(clock: Clock) -> None:
    health = SwarmHealth("test", clock)
    health.note_header("one", header(swarm="elsewhere"))
    assert seen(health, clock).nodes == 0


def test_a_crowd_of_names_and_tasks_is_bounded(clock: Clock) -> None:
    health, one = SwarmHealth("test", clock), header()
    for number in range(MAX_NODES + 100):
        health.note_header(f"name {number}", one)
    for number in range(50):
        health.note_header("one", header(f"task {number}"))
        health.note_version(f"name {number}", f"version {number}")
    found = seen(health, clock)
    assert found.nodes == MAX_NODES
    assert found.different_tasks == 1 + MAX_TASKS_OF_NODE
    assert len(found.tasks) <= MOST_NAMES and len(found.versions) == MOST_NAMES


async def test_a_node_counts_also_those_whose_task_it_does_not_have(
    start_node: StartNode, clock: Clock
) -> None:
    network, far = MemoryNetwork(), Addition(version="2")
    async with start_node(network, 3) as node:
        for number, sender in enumerate((KEY, NodeKey(b"\2" * 32))):
            group = make_group(KEY.peer_id, task=far, number=number)
            sent = compose(group, KEY, swarm="test", model=ModelLabel("tiny", None), now=1_700_000_000.0)
            node.hear(sender, sent.sealed)
        await until(lambda: node.dropped("other_version") and node.dropped("sender_mismatch"))
        clock.advance(AGAIN_S)
        assert node.exchange.stats().health.nodes == 1
