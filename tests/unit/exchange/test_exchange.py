"""Two and three exchanges on one in-memory network, end to end."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest

from swarmnode.errors import ConfigError, IdentityError
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.publisher import Publisher
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.limits import MAX_COMPLETION_CHARS
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.task import Task, draw_train
from swarmnode.types import Completion, Example, RolloutGroup, Scores, one_span
from tests.unit.exchange.conftest import Node, until


@pytest.fixture
def make_exchange(task, encoder, prompt_encoder, clock) -> Callable[..., Exchange]:
    def make(host: MemoryHost, key: NodeKey, *, tasks=None, shelf=None, **settings: object) -> Exchange:
        return Exchange(
            host,
            key,
            {task.name: task} if tasks is None else tasks,
            encode=encoder,
            prompt_ids=prompt_encoder,
            settings=ExchangeSettings(swarm="test", **{"patience_s": 30.0, **settings}),
            model_family="tiny",
            model_size=1000,
            clock=clock,
            rng=random.Random(key.seed),
            shelf=shelf,
        )

    return make


@pytest.fixture
def start(make_exchange):
    """Start node `number` on a network, connected to the nodes given."""

    @asynccontextmanager
    async def run(
        network: MemoryNetwork, number: int, *others: Node, policy_version: int = 0, **settings: object
    ) -> AsyncIterator[Node]:
        key = NodeKey(bytes([number]) * 32)
        async with network.host(key.peer_id) as host:
            for other in others:
                await host.connect(other.host.address)
            exchange = make_exchange(host, key, **settings)
            exchange.resume(policy_version)
            async with exchange:
                yield Node(key, host, exchange)

    return run


@pytest.fixture
def own_groups(groups_of):
    def make(node: Node, count: int, *, first: int = 0) -> list[RolloutGroup]:
        return [groups_of(node.key.peer_id, number=first + number) for number in range(count)]

    return make


async def collect(
    node: Node, groups: int, *, version: int = 0, deadline_s: float = 30.0
) -> list[RolloutGroup]:
    """Up to so many groups of one author, or of several who are new: their share is half of a draw."""
    return await node.exchange.collect(2 * groups, version, deadline_s)


async def test_what_one_node_publishes_another_collects(start, own_groups, as_learnt):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        published = own_groups(alice, 4)
        await alice.exchange.publish(published)
        collected = await collect(bob, 4)
        assert {group.example.key for group in collected} == {group.example.key for group in published}
        assert all(as_learnt(group) in collected for group in published)


async def test_exchange_goes_both_ways(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 2))
        await bob.exchange.publish(own_groups(bob, 2, first=10))
        assert {group.author for group in await collect(bob, 2)} == {alice.key.peer_id}
        assert {group.author for group in await collect(alice, 2)} == {bob.key.peer_id}


async def test_no_group_is_collected_twice(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 6))
        collected = await collect(bob, 4) + await collect(bob, 2)
        assert len({group.example.key for group in collected}) == 6
        assert await collect(bob, 1, deadline_s=0.05) == []


async def test_the_counters_tell_what_happened(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 3))
        await collect(bob, 3)
        sent, received = alice.exchange.stats(), bob.exchange.stats()
        assert (sent.published, sent.served, sent.unpublished) == (3, 3, {})
        assert (received.headers_seen, received.headers_accepted, received.headers_waiting) == (3, 3, 0)
        assert (received.fetched, received.accepted, received.drawn, received.buffered) == (3, 3, 3, 0)
        assert [(one.peer, one.accepted) for one in received.peers] == [(alice.key.peer_id, 3)]
        assert received.dropped == {}
        assert received.bytes_in == sent.bytes_out > 0


async def test_bodies_are_fetched_only_as_far_as_the_trainer_has_use_for_them(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice, prefetch_groups=2) as bob:
        await alice.exchange.publish(own_groups(alice, 20))
        await collect(bob, 3)
        await until(lambda: bob.exchange.stats().buffered == 4)
        await asyncio.sleep(0.05)
        stats = bob.exchange.stats()
        assert stats.headers_accepted == 20
        assert stats.fetched == stats.drawn + stats.buffered == 7


async def test_groups_of_tasks_that_we_need_are_fetched_first(start, task, groups_of):
    network, tasks = MemoryNetwork(), {name: replace(task, name=name) for name in ("easy", "hard")}
    async with (
        start(network, 1, tasks=tasks) as alice,
        start(network, 2, alice, tasks=tasks, prefetch_groups=0) as bob,
    ):
        groups = [groups_of(alice.key.peer_id, number=n, task=t) for n in range(6) for t in tasks.values()]
        await alice.exchange.publish(groups)
        await until(lambda: bob.exchange.stats().headers_waiting == 12)
        bob.exchange.prefer({"easy": 0.0, "hard": 1.0})
        collected = await collect(bob, 5)
        assert [group.example.key.task for group in collected] == ["hard"] * 5


async def test_who_has_a_right_answer_announces_it_again_to_who_came_too_late(start, groups_of):
    network = MemoryNetwork()
    async with start(network, 1) as knows:
        await knows.exchange.publish([groups_of(knows.key.peer_id, number=number) for number in range(3)])
        async with start(network, 2, knows) as late:
            assert await collect(late, 1, deadline_s=0.05) == [], "nobody says it twice unasked"
            stuck = groups_of(late.key.peer_id, seed=9, right=0, wrong=16)
            assert await late.exchange.ask_for_help([stuck]) == {stuck.example.key.task}
            assert late.exchange.stats().help.asked == 1
            await until(lambda: late.exchange.stats().headers_seen >= 3)
            (first, *_) = await collect(late, 3)
            assert first.author == knows.key.peer_id and max(filter(None, first.rewards)) == 1.0
            assert knows.exchange.stats().help.answered == 3
            assert knows.exchange.take_examples(4) == [stuck.example.key]
            assert knows.exchange.take_examples(4) == []
            stats = knows.exchange.stats()
            assert stats.dropped == {} and stats.banned_peers == ()


async def test_who_is_always_right_helps_those_who_asked_and_tells_nobody_else(start, groups_of):
    network = MemoryNetwork()
    async with (
        start(network, 1) as master,
        start(network, 2, master) as stuck,
        start(network, 3, master) as other,
    ):
        right = [groups_of(master.key.peer_id, number=number, right=4, wrong=0) for number in range(3)]
        await master.exchange.publish(right)
        assert master.exchange.stats().unpublished == {"zero_advantage": 3}
        asked = groups_of(stuck.key.peer_id, seed=9, right=0, wrong=16)
        assert await stuck.exchange.ask_for_help([asked]) == {asked.example.key.task}
        await until(lambda: stuck.exchange.stats().headers_seen >= 3)
        (first, *_) = await collect(stuck, 3)
        assert first.author == master.key.peer_id and set(first.rewards) == {1.0}
        await until(lambda: other.exchange.stats().dropped["no_spread"] == 3)
        assert stuck.exchange.stats().dropped == {}
        assert await collect(other, 1, deadline_s=0.05) == []


async def test_what_others_answered_to_an_example_of_ours_is_fetched_first(start, own_groups, groups_of):
    network = MemoryNetwork()
    settings = {"prefetch_groups": 0}
    async with start(network, 1) as alice, start(network, 2, alice, **settings) as bob:
        await bob.exchange.publish([groups_of(bob.key.peer_id, number=7, right=0, wrong=4)])
        await alice.exchange.publish(own_groups(alice, 12))
        await until(lambda: bob.exchange.stats().headers_waiting == 12)
        (met,) = await collect(bob, 1)
        assert met.example.key == own_groups(bob, 1, first=7)[0].example.key


async def test_a_small_buffer_bounds_what_is_fetched(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice, buffer_groups=2) as bob:
        await alice.exchange.publish(own_groups(alice, 20))
        assert len(await collect(bob, 4, deadline_s=0.2)) == 1
        await asyncio.sleep(0.05)
        assert bob.exchange.stats().fetched <= 2
        assert bob.exchange.stats().dropped == {}


async def test_one_author_is_not_fetched_from_beyond_what_it_may_hold_of_the_buffer(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice, buffer_groups=40) as bob:
        await alice.exchange.publish(own_groups(alice, 24))
        assert len(await collect(bob, 20, deadline_s=3.0)) == 16
        assert bob.dropped("over_share") == 0


async def test_in_a_swarm_of_two_half_of_a_draw_is_the_others(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 20))
        assert [len(await bob.exchange.collect(4, 0, 30.0)) for _ in range(3)] == [2, 2, 2]


async def test_a_node_that_wants_no_groups_fetches_none(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        assert await collect(bob, 0) == []
        await alice.exchange.publish(own_groups(alice, 5))
        await until(lambda: bob.exchange.stats().headers_accepted == 5)
        await asyncio.sleep(0.05)
        assert bob.exchange.stats().fetched == 0


async def test_groups_are_fetched_ahead_of_the_round_that_asks_for_them(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 4))
        await until(lambda: bob.exchange.stats().buffered == 2)
        assert len(await collect(bob, 2, deadline_s=0.0)) == 2


async def test_collect_gives_what_came_by_the_deadline(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 2))
        assert len(await collect(bob, 4, deadline_s=0.3)) == 2


async def test_a_node_alone_does_not_wait(start):
    async with start(MemoryNetwork(), 1) as alice, asyncio.timeout(30):
        assert await collect(alice, 4, deadline_s=600.0) == []


async def test_three_nodes_hear_each_other_through_the_one_in_the_middle(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob, start(network, 3, bob) as carol:
        await alice.exchange.publish(own_groups(alice, 2))
        await bob.exchange.publish(own_groups(bob, 2, first=10))
        authors = {group.author for group in await collect(carol, 4)}
        assert authors == {alice.key.peer_id, bob.key.peer_id}


async def test_loss_of_headers_loses_groups_and_nothing_else(start, own_groups):
    network = MemoryNetwork(seed=3, loss=0.5)
    async with (
        start(network, 1) as alice,
        start(network, 2, alice) as bob,
        start(network, 3, alice, bob) as carol,
    ):
        await alice.exchange.publish(own_groups(alice, 30))
        await bob.exchange.publish(own_groups(bob, 30, first=100))
        assert len(await collect(carol, 10)) >= 10
        seen = carol.exchange.stats().headers_seen
        assert 15 < seen < 45
        assert carol.exchange.stats().dropped == {}


async def test_a_partition_is_lived_through_and_healed(start, own_groups):
    network = MemoryNetwork()
    async with (
        start(network, 1) as alice,
        start(network, 2, alice) as bob,
        start(network, 3, alice, bob) as carol,
    ):
        network.partition([[alice.host], [bob.host, carol.host]])
        await alice.exchange.publish(own_groups(alice, 2))
        await bob.exchange.publish(own_groups(bob, 2, first=10))
        assert {group.author for group in await collect(carol, 2)} == {bob.key.peer_id}
        assert await collect(carol, 1, deadline_s=0.05) == []
        network.heal()
        await alice.exchange.publish(own_groups(alice, 2, first=20))
        assert {group.author for group in await collect(carol, 2)} == {alice.key.peer_id}


async def test_answers_that_would_be_too_long_for_a_node_like_us_are_not_announced(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1, max_tokens=4) as alice, start(network, 2, alice, max_tokens=4) as bob:
        [sampled] = own_groups(alice, 1)
        cut = [replace(one, said="\ufffd" * 4, finish="length") for one in sampled.completions]
        await alice.exchange.publish([replace(sampled, completions=tuple(cut))])
        assert alice.exchange.stats().unpublished == {"too_long": 1}
        assert bob.exchange.stats().dropped == {}


async def test_a_host_that_goes_down_costs_headers_but_raises_nothing(start, own_groups, caplog):
    caplog.set_level("INFO", logger=Publisher.__module__)
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        alice.host.go_down()
        await alice.exchange.publish(own_groups(alice, 2))
        assert alice.exchange.stats().unpublished == {"host_down": 2}
        assert await collect(alice, 2, deadline_s=60.0) == []
        alice.host.come_back()
        await alice.exchange.publish(own_groups(alice, 2, first=10))
        assert len(await collect(bob, 2)) == 2
    told = [record.message[:19] for record in caplog.records if record.name == Publisher.__module__]
    assert told == ["not announcing roll", "the network is back"], "once each"


async def test_headers_wait_while_the_host_is_down(start, own_groups, clock):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice, prefetch_groups=0) as bob:
        await alice.exchange.publish(own_groups(alice, 2))
        await until(lambda: bob.exchange.stats().headers_waiting == 2)
        bob.host.go_down()
        assert await collect(bob, 2, deadline_s=60.0) == []
        assert bob.exchange.stats().headers_waiting == 2
        bob.host.come_back()
        assert len(await collect(bob, 2)) == 2


async def test_an_exchange_may_start_while_its_host_is_down(start, own_groups, make_exchange):
    network = MemoryNetwork()
    key = NodeKey(b"\2" * 32)
    async with start(network, 1) as alice, network.host(key.peer_id) as host:
        await host.connect(alice.host.address)
        host.go_down()
        async with make_exchange(host, key) as exchange:
            bob = Node(key, host, exchange)
            host.come_back()
            async with asyncio.timeout(30):
                while not await collect(bob, 1, deadline_s=0.2):
                    await alice.exchange.publish(own_groups(alice, 1, first=exchange.stats().headers_seen))
                    await bob.exchange.publish(own_groups(bob, 1))
            assert await collect(alice, 1)


async def test_a_body_comes_from_a_third_node_when_its_author_is_gone(start, own_groups, as_learnt):
    network = MemoryNetwork()
    async with start(network, 2) as bob, start(network, 3, bob, prefetch_groups=0) as carol:
        async with start(network, 1, bob) as alice:
            published = own_groups(alice, 1)
            await alice.exchange.publish(published)
            await until(lambda: carol.exchange.stats().headers_waiting == 1)
            await until(lambda: bob.exchange.stats().accepted == 1)
        assert await collect(carol, 1) == [as_learnt(group) for group in published]
        assert bob.exchange.stats().served == 1


async def test_an_author_who_is_gone_is_counted_and_not_blamed(start, own_groups):
    network = MemoryNetwork()
    quiet = {"prefetch_groups": 0}
    async with start(network, 2, **quiet) as bob, start(network, 3, bob, **quiet) as carol:
        async with start(network, 1, bob) as alice:
            await alice.exchange.publish(own_groups(alice, 1))
            await until(lambda: bob.exchange.stats().headers_waiting == 1)
        await carol.exchange.publish(own_groups(carol, 1, first=10))
        assert [group.author for group in await collect(bob, 2, deadline_s=0.5)] == [carol.key.peer_id]
        assert bob.exchange.stats().dropped == {"unavailable": 1}
        assert bob.exchange.stats().banned_peers == ()


async def test_a_group_that_waits_too_many_of_our_versions_is_let_go(start, own_groups):
    network = MemoryNetwork()
    async with (
        start(network, 1) as alice,
        start(network, 2, alice, max_age_versions=2, prefetch_groups=4) as bob,
    ):
        await alice.exchange.publish(own_groups(alice, 2))
        await until(lambda: bob.exchange.stats().buffered == 2)
        assert len(await collect(bob, 1, version=2)) == 1
        assert await collect(bob, 1, version=3, deadline_s=0.05) == []
        assert bob.dropped("stale") == 1


async def test_headers_that_wait_too_long_are_let_go(start, own_groups, clock):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice, prefetch_groups=0) as bob:
        await alice.exchange.publish(own_groups(alice, 2))
        await until(lambda: bob.exchange.stats().headers_waiting == 2)
        clock.advance(1801)
        await until(lambda: bob.exchange.stats().headers_waiting == 0)
        assert bob.dropped("stale") == 2


async def test_what_is_heard_before_the_first_round_after_a_restart_is_not_stale(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice, policy_version=500) as bob:
        await alice.exchange.publish(own_groups(alice, 2))
        await until(lambda: bob.exchange.stats().buffered == 2)
        assert len(await collect(bob, 2, version=500)) == 2


async def test_key_and_host_must_be_one_identity(make_exchange, key: NodeKey, other_key: NodeKey):
    async with MemoryNetwork().host(key.peer_id) as host:
        with pytest.raises(IdentityError, match="the host runs as"):
            async with make_exchange(host, other_key):
                pass


@pytest.mark.parametrize("listed", ["addition", "x" * 65])
async def test_tasks_must_have_names_that_can_travel(make_exchange, key: NodeKey, task, listed: str):
    named = replace(task, name="x" * 65)
    with pytest.raises(ConfigError):
        make_exchange(MemoryNetwork().host(key.peer_id), key, tasks={listed: named})


async def test_an_exception_of_the_caller_comes_out_as_it_is(start):
    with pytest.raises(KeyError):
        async with start(MemoryNetwork(), 1):
            raise KeyError("the caller's own")


async def test_cancelling_the_caller_ends_the_exchange(start):
    entered = asyncio.Event()

    async def live() -> None:
        async with start(MemoryNetwork(), 1):
            entered.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(live())
        await entered.wait()
        living.cancel()
    assert living.cancelled()
    assert len(asyncio.all_tasks()) == 1


async def test_an_exchange_leaves_no_task_behind(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 20))
        await collect(bob, 2)
    assert len(asyncio.all_tasks()) == 1


async def test_equally_fast_nodes_do_not_wait_for_each_others_next_round(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice, patience_s=0.05) as bob:
        await alice.exchange.publish(own_groups(alice, 2))
        assert len(await collect(bob, 2)) == 2
        async with asyncio.timeout(10):
            assert await collect(bob, 4, deadline_s=1000.0) == []


async def test_a_fast_node_paces_itself_so_that_nobody_has_to_refuse_it(start, own_groups):
    network = MemoryNetwork()
    async with start(network, 1) as alice, start(network, 2, alice) as bob:
        await alice.exchange.publish(own_groups(alice, 200))
        stats = alice.exchange.stats()
        assert stats.published + stats.unpublished["paced"] == 200
        assert len(await collect(bob, 8)) == 8
        assert "rate_limited" not in bob.exchange.stats().dropped


async def test_groups_that_teach_nothing_do_not_use_up_the_pace(start, own_groups):
    async with start(MemoryNetwork(), 1) as alice:
        (group,) = own_groups(alice, 1)
        equal = replace(group, scores=tuple({"correct": 1.0} for _ in group.scores))
        await alice.exchange.publish([equal] * 500)
        await alice.exchange.publish([group])
        assert alice.exchange.stats().published == 1
        assert alice.exchange.stats().unpublished == {"zero_advantage": 500}


@dataclass(frozen=True)
class AtHome:
    """A task whose rollouts are not for others. `judged`: groups that it was asked about."""

    task: Task
    judged: list[Example] = field(default_factory=list[Example])
    exchangeable: bool = False

    name = property(lambda self: self.task.name)
    version = property(lambda self: self.task.version)

    def examples(self, seed: int) -> Iterator[Example]:
        return self.task.examples(seed)

    def score(self, example: Example, completions: Sequence[str]) -> list[Scores]:
        self.judged.append(example)
        return self.task.score(example, completions)


def voted_on(prompts: int = 400) -> Task:
    """Questions that nobody has an answer to: right is what most of a group say."""
    return as_task([{"prompt": f"{number} + 1 ="} for number in range(prompts)], ["majority_vote"])


async def test_a_strangers_own_majority_is_no_judgement_of_ours(start):
    """Name and version of such a task follow from its rows: a stranger's copy need not stay at home."""
    voted = voted_on()
    theirs = AtHome(voted, exchangeable=True)
    network = MemoryNetwork()
    async with (
        start(network, 1, tasks={voted.name: theirs}) as stranger,
        start(network, 2, stranger, tasks={voted.name: voted}, patience_s=0.1) as node,
    ):
        wrong, right = {"majority_vote": 1.0}, {"majority_vote": 0.0}
        for example in islice(draw_train(voted, 7), 4):
            said = tuple(Completion(text, (1,), None, one_span(0, 1), "stop") for text in "xxxxxyyy")
            scores = (wrong,) * 5 + (right,) * 3
            await stranger.exchange.publish([RolloutGroup(example, said, scores, stranger.key.peer_id, 0)])
        await until(lambda: node.exchange.stats().headers_seen == 4)
        assert await collect(node, 4, deadline_s=1.0) == []
        stats = node.exchange.stats()
        assert stats.dropped == {"not_exchanged": 4} and stats.banned_peers == ()
        assert (stats.headers_accepted, stats.fetched, stats.accepted) == (0, 0, 0)


async def test_what_stays_at_home_neither_leaves_nor_comes(start, own_groups, task):
    network = MemoryNetwork()
    at_home = AtHome(task)
    async with (
        start(network, 1) as open_node,
        start(network, 2, open_node, tasks={task.name: at_home}, patience_s=0.1) as node,
    ):
        await node.exchange.publish(own_groups(node, 2))
        await open_node.exchange.publish(own_groups(open_node, 2, first=5))
        await until(lambda: node.exchange.stats().headers_seen == 2)
        assert await collect(node, 2, deadline_s=1.0) == []
        assert node.exchange.stats().unpublished == {"not_exchanged": 2}
        assert node.dropped("not_exchanged") == 2 and at_home.judged == []
        assert open_node.exchange.stats().headers_seen == 0


async def test_of_right_answers_that_stay_at_home_nobody_can_have_a_body(start, groups_of):
    async with start(MemoryNetwork(), 1, private=True) as alice, start(MemoryNetwork(), 1) as open_handed:
        for node, bodies in ((alice, 0), (open_handed, 1)):
            await node.exchange.publish([groups_of(node.key.peer_id, right=4, wrong=0)])
            assert len(node.exchange._bodies.own) == bodies


@asynccontextmanager
async def careful_alone_and_open(start, task):
    """Three nodes, and their shelves: a task that stays at home, a private swarm, and neither."""
    shelves = Shelf(), Shelf(), Shelf()
    async with (
        start(MemoryNetwork(), 1, shelf=shelves[0], tasks={task.name: AtHome(task)}) as careful,
        start(MemoryNetwork(), 1, shelf=shelves[1], private=True) as alone,
        start(MemoryNetwork(), 1, shelf=shelves[2]) as open_handed,
    ):
        yield (careful, alone, open_handed), shelves


async def test_right_answers_to_a_task_that_stays_at_home_stay_there_too(start, groups_of, task):
    async with careful_alone_and_open(start, task) as (nodes, shelves):
        for node in nodes:
            await node.exchange.publish([groups_of(node.key.peer_id, right=4, wrong=0)])
            assert node.exchange.stats().unpublished == {"zero_advantage": 1}
        assert [len(node.exchange._bodies.own) for node in nodes] == [0, 0, 1]
        assert [shelf.size_bytes > 0 for shelf in shelves] == [False, False, True]


async def test_groups_to_a_task_that_stays_at_home_are_in_no_library(start, own_groups, task):
    async with careful_alone_and_open(start, task) as (nodes, shelves):
        for node in nodes:
            await node.exchange.publish(own_groups(node, 1))
        careful, alone, _ = nodes
        assert careful.exchange.stats().unpublished == {"not_exchanged": 1}
        assert alone.exchange.stats().unpublished == {"private": 1}
        assert [shelf.size_bytes > 0 for shelf in shelves] == [False, False, True]


async def test_of_answers_that_are_all_wrong_or_unscored_nothing_is_kept(start, groups_of):
    shelf = Shelf()
    async with start(MemoryNetwork(), 1, shelf=shelf) as node:
        wrong = groups_of(node.key.peer_id, right=0, wrong=4)
        unscored = replace(wrong, scores=tuple({"correct": None} for _ in wrong.scores))
        await node.exchange.publish([wrong, unscored])
        assert node.exchange.stats().unpublished == {"zero_advantage": 2}
        assert (len(node.exchange._bodies.own), shelf.size_bytes) == (0, 0)


async def test_right_answers_that_are_too_long_to_travel_are_left_and_stop_nothing(start, groups_of):
    async with start(MemoryNetwork(), 1) as node:
        right = groups_of(node.key.peer_id, right=4, wrong=0)
        long = tuple(replace(one, said="1" * (MAX_COMPLETION_CHARS + 1)) for one in right.completions)
        await node.exchange.publish([replace(right, completions=long), groups_of(node.key.peer_id)])
        stats = node.exchange.stats()
        assert (stats.published, stats.unpublished) == (1, {"zero_advantage": 1})
        assert len(node.exchange._bodies.own) == 1


async def test_a_group_that_cannot_travel_at_all_is_not_kept_as_a_right_one(start, groups_of):
    async with start(MemoryNetwork(), 1, max_tokens=100) as node:
        group = groups_of(node.key.peer_id)
        cut = replace(group, completions=tuple(replace(one, finish="abort") for one in group.completions))
        long = tuple(replace(one, said="1" * 500, finish="length") for one in group.completions)
        await node.exchange.publish([cut, replace(group, completions=long)])
        assert node.exchange.stats().unpublished == {"unfinished": 1, "too_long": 1}
        assert len(node.exchange._bodies.own) == 0
