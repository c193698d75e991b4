"""What an exchange still knows after a restart, also after one that nobody announced."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.limits import PROVEN_AFTER
from swarmnode.exchange.peers.exchange_record import Record, Recorder, SavedStanding, load
from swarmnode.exchange.peers.reputation import BAN_BELOW
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import replace_file
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork

TOPIC = "/swarmnode/4/test/rollouts/0"
OURS = NodeKey(b"\2" * 32)
STRANGER = NodeKey(b"\7" * 32).peer_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "exchange.record"


@pytest.fixture
def live(task, encoder, prompt_encoder, clock, path):
    """One life of a node that remembers."""

    @asynccontextmanager
    async def run() -> AsyncIterator[tuple[Exchange, MemoryHost]]:
        async with MemoryNetwork().host(OURS.peer_id) as host:
            exchange = Exchange(
                host,
                OURS,
                {task.name: task},
                encode=encoder,
                prompt_ids=prompt_encoder,
                settings=ExchangeSettings(swarm="test", patience_s=0.05, prefetch_groups=20),
                model_family="tiny",
                model_size=1000,
                clock=clock,
                rng=random.Random(0),
                record=path,
            )
            async with exchange:
                yield exchange, host

    return run


@pytest.fixture
def sealed_of(groups_of, clock) -> Callable[..., tuple[bytes, bytes, bytes]]:
    def make(key: NodeKey, number: int) -> tuple[bytes, bytes, bytes]:
        group = groups_of(key.peer_id, number=number)
        sent = compose(group, key, swarm="test", model=ModelLabel("tiny", 1), now=clock())
        return sent.header.body_hash, sent.body, sent.sealed

    return make


def hear(life: tuple[Exchange, MemoryHost], key: NodeKey, sent: tuple[bytes, bytes, bytes]) -> None:
    exchange, host = life
    exchange._bodies.foreign.put(sent[0], sent[1])
    host.deliver(Message(TOPIC, key.peer_id, sent[2]))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.01)


async def test_groups_that_were_taken_are_not_taken_again_after_a_restart(live, sealed_of, key, clock):
    sent = [sealed_of(key, number) for number in range(8)]
    async with live() as first:
        for one in sent:
            hear(first, key, one)
        await until(lambda: first[0].stats().accepted == 8)
    async with live() as second:
        clock.advance(1.0)
        for one in sent:
            hear(second, key, one)
        hear(second, key, sealed_of(key, 20))
        await until(lambda: second[0].stats().accepted == 1)
        assert second[0].stats().dropped == {"duplicate": 8}
        assert second[0].stats().banned_peers == ()


async def test_headers_dated_ahead_are_known_again_after_a_restart(live, sealed_of, key, clock):
    clock.advance(100.0)
    ahead = sealed_of(key, 0)
    clock.advance(-100.0)
    async with live() as first:
        hear(first, key, ahead)
        await until(lambda: first[0].stats().accepted == 1)
    async with live() as second:
        hear(second, key, ahead)
        await until(lambda: second[0].stats().dropped == {"duplicate": 1})


async def test_a_node_that_is_killed_takes_nothing_that_it_may_have_heard_since_it_last_wrote(
    live, sealed_of, key, clock, path
):
    async with live() as first:
        hear(first, key, sealed_of(key, 0))
        await until(lambda: first[0].stats().accepted == 1)
    written = path.read_bytes()
    clock.advance(1.0)
    in_the_gap = [sealed_of(key, 10 + number) for number in range(5)]
    async with live() as killed:
        for one in in_the_gap:
            hear(killed, key, one)
        await until(lambda: killed[0].stats().accepted == 5)
    path.write_bytes(written)
    clock.advance(1.0)
    async with live() as again:
        for one in in_the_gap:
            hear(again, key, one)
        await until(lambda: again[0].stats().dropped == {"before_our_time": 5})


async def test_a_first_life_hears_what_was_announced_before_it(live, sealed_of, key, clock):
    before = sealed_of(key, 0)
    clock.advance(30.0)
    async with live() as first:
        hear(first, key, before)
        await until(lambda: first[0].stats().accepted == 1)


async def test_bans_and_proofs_outlive_a_restart(live, sealed_of, key):
    async with live() as first:
        for number in range(PROVEN_AFTER):
            hear(first, key, sealed_of(key, number))
        for _ in range(10):
            first[1].deliver(Message(TOPIC, STRANGER, b"junk"))
        await until(lambda: first[0].stats().accepted == PROVEN_AFTER)
        await until(lambda: first[0].stats().banned_peers == (STRANGER,))
    async with live() as second:
        assert second[0].stats().banned_peers == (STRANGER,)
        await until(lambda: second[1].bars(STRANGER))
        (known,) = second[0].stats().peers
        assert (known.accepted, known.trust) == (PROVEN_AFTER, "proven")


async def test_it_is_written_now_and_then_and_only_when_there_is_news(path: Path, monkeypatch):
    monkeypatch.setattr("swarmnode.exchange.peers.exchange_record.WRITE_EVERY_S", 0.01)
    records = [Record(), Record(groups=((b"k" * 16, 1.0),))]
    news = asyncio.Event()
    recorder = Recorder(path)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run(lambda: records[news.is_set()]))
        await until(path.exists)
        replace_file(path, b"not looked at")
        await asyncio.sleep(0.1)
        assert await asyncio.to_thread(path.read_bytes) == b"not looked at", "nothing was new"
        news.set()
        await until(lambda: path.read_bytes() != b"not looked at")
        running.cancel()
    assert load(path) == records[1]


async def test_a_life_that_is_killed_at_its_start_has_left_its_record(path: Path):
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Recorder(path).run(Record))
        await until(path.exists)
        running.cancel()
    assert load(path) == Record()


async def test_what_must_not_be_forgotten_is_written_before_its_time(path: Path, monkeypatch):
    monkeypatch.setattr("swarmnode.exchange.peers.exchange_record.WRITE_EVERY_S", 1e6)
    monkeypatch.setattr("swarmnode.exchange.peers.exchange_record.HURRY_S", 0.01)
    records = [Record(), Record(groups=((b"k" * 16, 1.0),))]
    recorder = Recorder(path)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run(lambda: records[0]))
        await until(path.exists)
        records.pop(0)
        recorder.hurry()
        await until(lambda: load(path) == records[0])
        running.cancel()


async def test_a_disk_that_is_full_is_told_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_bytes(b"")
    recorder = Recorder(tmp_path / "file" / "record")
    with caplog.at_level(logging.WARNING):
        await recorder.write(Record())
        await recorder.write(Record())
    assert len([one for one in caplog.records if "cannot write the record" in one.message]) == 1


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"what is left of it",
        msgspec.msgpack.encode((2,)),
        msgspec.msgpack.encode([1, [[b"short", 1.0]]]),
        msgspec.msgpack.encode(Record())[:-1],
        bytes(17 * 1024 * 1024),
    ],
    ids=["empty", "garbage", "format", "key", "cut", "long"],
)
def test_a_damaged_record_is_set_aside_and_still_tells_that_there_was_a_life_before(
    path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
):
    path.parent.mkdir()
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert load(path) == Record()
    assert "moved aside" in caplog.text
    assert not path.exists() and path.with_name("exchange.record.damaged").exists()


def test_no_record_is_a_first_life(path: Path):
    assert load(path) is None


def test_a_full_record_can_be_read_again(path: Path):
    keys = tuple((number.to_bytes(16, "big"), float(number)) for number in range(32_768))
    standings = tuple(
        SavedStanding(f"peer {number}", BAN_BELOW - 1, 1.0, True, 3, 9.0, False, 7) for number in range(4096)
    )
    record = Record(1, keys, keys, keys, standings)
    path.parent.mkdir()
    path.write_bytes(msgspec.msgpack.encode(record))
    assert load(path) == record
