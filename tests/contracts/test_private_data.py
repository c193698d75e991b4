"""The text of a data set never crosses the wire, and nothing at all of one that is private: every byte that a
node sends is read here, as it is sent and unpacked."""

import json
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.limits import MAX_HEADER_BYTES
from swarmnode.exchange.messages import decode_body, decode_header
from swarmnode.exchange.validation.header_check import HEADER_CONTEXT
from swarmnode.identity.envelope import unseal
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.task import Task, draw_train, score_strictly
from swarmnode.types import Completion, FinishReason, RolloutGroup, one_span

SECRETS = ("Zanzibar", "patient-file", "gold-standard", "Mombasa")
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"Zanzibar {number}: what is in the patient-file?"}],
        "answer": f"answer {number}",
        "source": "gold-standard",
        "notes": {"written in": "Mombasa"},
    }
    for number in range(64)
]


@dataclass
class Wire:
    """All that one node has sent."""

    gossip: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)

    def unpacked(self) -> str:
        """Everything once more as text: headers out of their envelopes, bodies decompressed."""
        sealed = [unseal(data, HEADER_CONTEXT, max_bytes=MAX_HEADER_BYTES) for data in self.gossip]
        headers = [decode_header(envelope.payload) for envelope in sealed]
        return repr((headers, [decode_body(data) for data in self.replies]))


class OverheardHost(MemoryHost):
    """A host whose every byte is kept."""

    wire: Wire

    async def publish(self, topic: str, data: bytes) -> None:
        self.wire.gossip.append(data)
        await super().publish(topic, data)

    async def handle(self, peer_id: str, protocol: str, request: bytes) -> bytes | None:
        reply = await super().handle(peer_id, protocol, request)
        if reply is not None:
            self.wire.replies.append(reply)
        return reply


def encode(text: str, finish: FinishReason) -> tuple[int, ...]:
    return tuple(text.encode()) + ((256,) if finish == "stop" else ())


def group_of(task: Task, author: str, number: int) -> RolloutGroup:
    """The `number`-th training example, answered rightly, wrongly, rightly and wrongly."""
    example = next(islice(draw_train(task, 5), number, None))
    texts = [str(example.columns["answer"]), "no idea"] * 2
    completions = tuple(
        Completion(text, encode(text, "stop"), None, one_span(1, len(text) + 1), "stop") for text in texts
    )
    return RolloutGroup(example, completions, score_strictly(task, example, texts), author, 1)


class Meeting:
    """Two nodes with the same data set: one publishes four groups, the other one draws what it can use."""

    def __init__(self, path: str, **settings: bool) -> None:
        self.wire = Wire()
        self.unpublished: Mapping[str, int] = {}
        self.collected: list[RolloutGroup] = []
        self._path = path
        self._settings = settings

    async def held(self) -> "Meeting":
        network, keys = MemoryNetwork(), [NodeKey(bytes([number]) * 32) for number in (1, 2)]
        sender = OverheardHost(network, keys[0].peer_id, 4001)
        sender.wire = self.wire
        receiver = MemoryHost(network, keys[1].peer_id, 4002)
        async with AsyncExitStack() as stack:
            exchanges: list[Exchange] = []
            for key, host in zip(keys, (sender, receiver), strict=True):
                await stack.enter_async_context(host)
                task = load_task(self._path)
                settings = ExchangeSettings(swarm="test", patience_s=0.5, **self._settings)
                exchange = Exchange(
                    host,
                    key,
                    {task.name: task},
                    encode=encode,
                    prompt_ids=lambda text: tuple(text.encode()),
                    settings=settings,
                    model_family="tiny",
                    model_size=1000,
                    rng=random.Random(0),
                )
                exchanges.append(exchange)
            await receiver.connect(sender.address)
            for exchange in exchanges:
                await stack.enter_async_context(exchange)
            task = load_task(self._path)
            await exchanges[0].publish([group_of(task, keys[0].peer_id, number) for number in range(4)])
            self.collected = await exchanges[1].collect(8, 0, 2.0)
            self.unpublished = exchanges[0].stats().unpublished
        return self


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "clinic.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return str(file)


async def test_a_data_set_is_exchanged_by_hash_and_number_and_its_text_stays_here(path: str) -> None:
    meeting = await Meeting(path).held()
    assert len(meeting.collected) == 4
    assert all("Zanzibar" in group.example.prompt for group in meeting.collected), "redrawn by the receiver"
    assert len(meeting.wire.gossip) == len(meeting.wire.replies) == 4
    sent, raw = meeting.wire.unpacked(), b"".join(meeting.wire.gossip + meeting.wire.replies)
    assert "no idea" in sent, "the completions do cross"
    assert load_task(path).version in sent
    for secret in SECRETS:
        assert secret not in sent
        assert secret.encode() not in raw


@pytest.mark.parametrize("of_the_task", [True, False])
async def test_nothing_of_a_private_one_leaves(path: str, of_the_task: bool) -> None:
    """Said in the task's name, or by tasks.private of the whole node."""
    private = {} if of_the_task else {"private": True}
    meeting = await Meeting(f"{path}?private=true" if of_the_task else path, **private).held()
    assert meeting.collected == []
    assert meeting.wire == Wire()
    assert meeting.unpublished == {"not_exchanged" if of_the_task else "private": 4}
