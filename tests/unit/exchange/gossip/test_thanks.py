"""Exchanges thank each other, and keep what was said over restarts."""

from pathlib import Path

from swarmnode.network.memory_network import MemoryNetwork
from tests.unit.exchange.conftest import StartNode, make_group, until


async def test_thanks_arrive_and_outlive_a_restart(start_node: StartNode, tmp_path: Path) -> None:
    network, record = MemoryNetwork(), tmp_path / "record"
    async with start_node(network, 1, record=record, receipts_every_s=0.01) as author:
        given = make_group(author.key.peer_id)
        await author.exchange.publish([given])
        async with start_node(network, 2, author.host, receipts_every_s=0.01) as reader:
            reader.exchange.receipts.note_learnt([(author.key.peer_id, given.example.key, 2)])
            await until(lambda: author.exchange.stats().receipts.nodes)
            assert reader.exchange.stats().receipts.sent == 1
    async with start_node(network, 1, record=record) as again:
        assert (again.exchange.stats().receipts.groups, again.exchange.stats().receipts.answers) == (1, 2)


async def test_who_keeps_its_rollouts_to_itself_thanks_nobody(start_node: StartNode) -> None:
    network = MemoryNetwork()
    async with start_node(network, 1) as author, start_node(network, 2, author.host, private=True) as reader:
        learnt = make_group(author.key.peer_id)
        reader.exchange.receipts.note_learnt([(learnt.author, learnt.example.key, 2)])
        await reader.exchange.receipts.run()
    assert reader.exchange.stats().receipts.sent == 0
