"""Exchanges of one process: what they give each other directly, and what strangers still see of each."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from swarmnode.errors import HostDown
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.tasks.task import Task
from swarmnode.types import Completion, RolloutGroup, Span, one_span

VERSION = 3


@dataclass(frozen=True)
class Node:
    key: NodeKey
    host: MemoryHost
    exchange: Exchange

    @property
    def author(self) -> str:
        return self.key.peer_id

    async def collect(self, groups: int) -> list[RolloutGroup]:
        return await self.exchange.collect(groups, 0, deadline_s=30.0)


@pytest.fixture
def start(task, encoder, prompt_encoder, clock):
    """Start node `number`, connected to the nodes given; those of one process share a neighbourhood."""

    @asynccontextmanager
    async def run(
        network: MemoryNetwork,
        number: int,
        *others: Node,
        neighbourhood: Neighbourhood | None = None,
        tasks: Mapping[str, Task] | None = None,
    ) -> AsyncIterator[Node]:
        key = NodeKey(bytes([number]) * 32)
        async with network.host(key.peer_id) as host:
            for other in others:
                await host.connect(other.host.address)
            exchange = Exchange(
                host,
                key,
                {task.name: task} if tasks is None else tasks,
                encode=encoder,
                prompt_ids=prompt_encoder,
                settings=ExchangeSettings(swarm="test", patience_s=0.2),
                model_family="tiny",
                model_size=1000,
                clock=clock,
                rng=random.Random(number),
                neighbourhood=neighbourhood,
            )
            async with exchange:
                yield Node(key, host, exchange)

    return run


@pytest.fixture
def own_groups(groups_of) -> Callable[..., list[RolloutGroup]]:
    def make(node: Node, count: int, *, first: int = 0) -> list[RolloutGroup]:
        return [groups_of(node.author, number=first + number, version=VERSION) for number in range(count)]

    return make


def sampled(group: RolloutGroup) -> RolloutGroup:
    """As an engine leaves it: other tokens than ours for the same text, log-probabilities, two versions."""

    def of(completion: Completion) -> Completion:
        spans = (Span(VERSION - 1, 0, 1), Span(VERSION, 1, 3))
        return replace(completion, token_ids=(7, 8, 256), logprobs=(-1.0, -2.0, -0.5), spans=spans)

    return replace(group, completions=tuple(map(of, group.completions)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.01)


async def test_policies_of_one_process_need_no_network_between_them(start, own_groups):
    network, home = MemoryNetwork(), Neighbourhood()
    async with (
        start(network, 1, neighbourhood=home) as alice,
        start(network, 2, neighbourhood=home) as bob,
        start(network, 3, neighbourhood=home) as carol,
    ):
        published = own_groups(alice, 4)
        await alice.exchange.publish(published)
        for other in (bob, carol):
            assert {group.example.key for group in await other.collect(4)} == {
                group.example.key for group in published
            }
            stats = other.exchange.stats()
            assert (stats.headers_seen, stats.accepted, stats.fetched, stats.bytes_in) == (4, 4, 0, 0)
            assert [(one.peer, one.accepted) for one in stats.peers] == [(alice.author, 4)]
        sent = alice.exchange.stats()
        assert (sent.published, sent.served, sent.bytes_out, sent.headers_seen) == (4, 0, 0, 0)


async def test_a_neighbours_group_has_the_tokens_that_were_sampled_and_no_logprobs_of_ours(start, own_groups):
    network, home = MemoryNetwork(), Neighbourhood()
    async with (
        start(network, 1, neighbourhood=home) as alice,
        start(network, 2, neighbourhood=home) as bob,
    ):
        group = sampled(own_groups(alice, 1)[0])
        await alice.exchange.publish([group])
        (taken,) = await bob.collect(1)
        assert (taken.author, taken.policy_version, taken.scores) == (alice.author, VERSION, group.scores)
        for ours, theirs in zip(taken.completions, group.completions, strict=True):
            assert (ours.text, ours.token_ids, ours.finish) == (theirs.text, (7, 8, 256), theirs.finish)
            assert (ours.logprobs, ours.spans) == (None, one_span(VERSION, 3))


async def test_a_stranger_hears_all_policies_of_a_process_as_nodes_of_their_own(start, own_groups):
    """Also those that it is not connected to: what they say goes through their neighbours."""
    network, home = MemoryNetwork(), Neighbourhood()
    async with (
        start(network, 1, neighbourhood=home) as alice,
        start(network, 2, alice, neighbourhood=home) as bob,
        start(network, 3, bob) as stranger,
    ):
        await bob.exchange.publish(own_groups(bob, 2, first=10))
        await alice.exchange.publish(own_groups(alice, 2))
        await until(lambda: stranger.exchange.stats().headers_accepted == 4)
        assert {group.author for group in await stranger.collect(8)} == {alice.author, bob.author}
        assert stranger.exchange.stats().dropped == {}
        assert alice.exchange.stats().served + bob.exchange.stats().served == 4


async def test_what_gossip_brings_of_a_neighbour_is_not_looked_at_again(start, own_groups):
    network, home = MemoryNetwork(), Neighbourhood()
    async with (
        start(network, 1, neighbourhood=home) as alice,
        start(network, 2, alice, neighbourhood=home) as bob,
        start(network, 3, bob) as stranger,
    ):
        await bob.exchange.publish(own_groups(bob, 1, first=10))
        await alice.exchange.publish(own_groups(alice, 3))
        await until(lambda: stranger.exchange.stats().headers_seen == 4)
        assert len(await bob.collect(3)) == 3
        stats = bob.exchange.stats()
        assert (stats.headers_seen, stats.headers_accepted, stats.dropped) == (3, 3, {})


async def test_nothing_is_gossiped_where_only_neighbours_would_hear_it(start, own_groups):
    network, home = MemoryNetwork(), Neighbourhood()
    async with (
        start(network, 1, neighbourhood=home) as alice,
        start(network, 2, alice, neighbourhood=home) as bob,
    ):
        overheard = await bob.host.subscribe("/swarmnode/4/test/rollouts/0")
        await alice.exchange.publish(own_groups(alice, 2))
        async with start(network, 3, alice):
            await alice.exchange.publish(own_groups(alice, 1, first=5))
            assert (await anext(overheard)).sender == alice.author
        assert alice.exchange.stats().published == 3
        assert len(await bob.collect(3)) == 3


async def test_a_neighbours_words_from_a_strangers_mouth_are_copied(start, own_groups):
    network, home = MemoryNetwork(), Neighbourhood()
    async with (
        start(network, 1, neighbourhood=home) as alice,
        start(network, 2, alice, neighbourhood=home) as bob,
        start(network, 3, bob) as thief,
    ):
        groups = own_groups(alice, 1)
        await alice.exchange.publish(groups)
        await until(lambda: bob.exchange.stats().accepted == 1)
        await thief.exchange.publish([replace(group, author=thief.author) for group in groups])
        await until(lambda: bob.exchange.stats().dropped.get("copied") == 1)
        assert [group.author for group in await bob.collect(2)] == [alice.author]


async def test_a_policy_with_other_tasks_leaves_a_neighbours_groups_alone(start, own_groups, task):
    network, home = MemoryNetwork(), Neighbourhood()
    other = replace(task, version="2")
    async with (
        start(network, 1, neighbourhood=home) as alice,
        start(network, 2, neighbourhood=home, tasks={other.name: other}) as bob,
    ):
        await alice.exchange.publish(own_groups(alice, 2))
        assert await bob.collect(2) == []
        assert bob.exchange.stats().dropped == {"other_version": 2}
        assert bob.exchange.stats().banned_peers == ()


async def test_a_neighbour_that_left_hears_nothing_more(start, own_groups):
    network, home = MemoryNetwork(), Neighbourhood()
    async with start(network, 1, neighbourhood=home) as alice:
        async with start(network, 2, neighbourhood=home) as bob:
            pass
        await alice.exchange.publish(own_groups(alice, 1))
        assert bob.exchange.stats().headers_seen == 0
        assert not home.has_others(alice.author)


async def test_a_policy_whose_network_is_down_still_reaches_its_neighbours(start, own_groups):
    network, home = MemoryNetwork(), Neighbourhood()
    async with start(network, 1, neighbourhood=home) as alice, start(network, 2, neighbourhood=home) as bob:
        alice.host.go_down()
        with pytest.raises(HostDown):
            await alice.host.peers()
        await alice.exchange.publish(own_groups(alice, 1))
        assert alice.exchange.stats().unpublished == {"host_down": 1}
        assert len(await bob.collect(1)) == 1


async def test_policies_of_one_process_share_what_does_not_leave_it(start, own_groups, task):
    class AtHome(type(task)):
        exchangeable = False

    network, home, at_home = MemoryNetwork(), Neighbourhood(), AtHome()
    async with (
        start(network, 1) as stranger,
        start(network, 2, stranger, neighbourhood=home, tasks={task.name: at_home}) as alice,
        start(network, 3, neighbourhood=home, tasks={task.name: at_home}) as bob,
    ):
        await alice.exchange.publish(own_groups(alice, 2))
        assert len(await bob.collect(2)) == 2
        assert stranger.exchange.stats().headers_seen == 0


async def test_right_answers_that_no_stranger_can_ask_for_are_not_held_for_one(start, groups_of):
    network, home = MemoryNetwork(), Neighbourhood()
    async with start(network, 1, neighbourhood=home) as alice, start(network, 2, neighbourhood=home):
        await alice.exchange.publish([groups_of(alice.author, right=4, wrong=0)])
        assert len(alice.exchange._bodies.own) == 0
        async with start(network, 3, alice):
            await alice.exchange.publish([groups_of(alice.author, right=4, wrong=0)])
            assert len(alice.exchange._bodies.own) == 1
