"""Who learnt says thanks; the author counts what can be true, once, and a liar gains and costs nothing."""

import random
from collections.abc import Mapping
from itertools import count
from typing import Any

import msgspec
import pytest

from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.header_gossip import receipts_topic_of
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.limits import MAX_CLOCK_SKEW_S, MAX_NAME_CHARS, PROVEN_AFTER
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.extensions.contribution.receipts import (
    CONTEXT,
    MAX_AGE_S,
    MAX_NODES,
    MAX_RECEIPT_BYTES,
    MAX_SENDERS,
    MAX_THANKS,
    RECEIPTS_BURST,
    WEEK_S,
    Receipt,
    Receipts,
    Thanks,
)
from swarmnode.identity.envelope import seal, unseal
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.types import ExampleKey
from tests.unit.exchange.conftest import Clock

AUTHOR, READER, OTHER = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))
TOPIC = receipts_topic_of("test")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def receipts(key: NodeKey, clock: Clock, gave: int = 0, **settings: Any) -> Receipts:
    """The receipts of a node that gave so many groups of four answers."""
    host = MemoryNetwork().host(key.peer_id)
    ledger, found = Ledger(Reputation(), clock), ExchangeSettings(swarm="test", **settings)
    made = Receipts(ExchangeContext(host, key, {}, found, ledger, clock, random.Random(0), Neighbourhood()))
    for _ in range(gave):
        made.note_given("addition", 4)
    return made


_numbers = count()


def example(task: str = "addition") -> ExampleKey:
    """An example that nobody has answered yet."""
    return ExampleKey(task, "1", 0, next(_numbers))


def says(reader: Receipts, clock: Clock, groups: int = 1, answers: int = 2) -> bytes:
    """What a reader says a second after it learnt of so many more groups."""
    reader.note_learnt([(AUTHOR.peer_id, example(), answers) for _ in range(groups)])
    clock.advance(1)
    sealed = reader.to_say()
    assert sealed is not None
    return sealed


def hear(author: Receipts, sealed: bytes, sender: NodeKey = READER) -> None:
    author.hear(Message(TOPIC, sender.peer_id, sealed))


def heard(author: Receipts) -> tuple[int, int, int, int]:
    found = author.stats()
    return found.groups, found.answers, found.nodes, found.dropped


def forged(clock: Clock, key: NodeKey = READER, **changed: Any) -> bytes:
    now_ms = int(clock() * 1000)
    thanks = (Thanks(AUTHOR.peer_id, "addition", 1, 1),)
    parts: Mapping[str, Any] = {
        "protocol": 4, "swarm": "test", "software": "1", "since_ms": now_ms - 5000, "until_ms": now_ms,
        "thanks": thanks, **changed,
    }  # fmt: skip
    return seal(key, CONTEXT, msgspec.msgpack.encode(Receipt(**parts)))


def test_what_was_learnt_is_counted_by_its_author(clock: Clock) -> None:
    author, reader, other = receipts(AUTHOR, clock, 5), receipts(READER, clock), receipts(OTHER, clock)
    hear(author, says(reader, clock, groups=2))
    hear(author, says(reader, clock))
    hear(author, says(other, clock), OTHER)
    assert heard(author) == (4, 8, 2, 0)
    assert reader.to_say() is None, "nothing new was learnt"


def test_a_group_that_is_learnt_from_again_after_its_author_had_left_the_book_is_thanked_for_once(
    clock: Clock,
) -> None:
    author, reader = receipts(AUTHOR, clock, 1), receipts(READER, clock)
    group = (AUTHOR.peer_id, example(), 2)
    reader.note_learnt([group])
    reader.note_learnt([group])
    sealed = reader.to_say()
    assert sealed is not None
    hear(author, sealed)
    assert heard(author) == (1, 2, 1, 0)
    reader.note_learnt([group])
    assert reader.to_say() is None


def test_a_receipt_that_was_lost_is_made_up_for_by_the_next(clock: Clock) -> None:
    author, reader = receipts(AUTHOR, clock, 5), receipts(READER, clock)
    says(reader, clock, groups=3)
    hear(author, says(reader, clock))
    assert heard(author) == (4, 8, 1, 0)


def test_the_thanks_of_a_sender_go_on_after_its_restart(clock: Clock) -> None:
    author, reader = receipts(AUTHOR, clock, 5), receipts(READER, clock)
    hear(author, says(reader, clock, groups=2))
    clock.advance(60)
    hear(author, says(receipts(READER, clock), clock))
    assert heard(author) == (3, 6, 1, 0)


def test_own_groups_and_those_of_the_other_policies_of_this_process_are_not_thanked_for(clock: Clock) -> None:
    reader = receipts(READER, clock)
    reader._context.neighbourhood.enter(OTHER.peer_id, lambda *given: None)
    reader.note_learnt([(READER.peer_id, example(), 4), (OTHER.peer_id, example(), 4)])
    assert reader.to_say() is None


def test_the_longest_names_fit_and_what_is_left_over_is_said_next(clock: Clock) -> None:
    reader = receipts(READER, clock)
    names = [f"{n:0{MAX_NAME_CHARS}}" for n in range(MAX_THANKS + 1)]
    reader.note_learnt([(AUTHOR.peer_id, example(name), 2**37) for name in names])
    first, second = reader.to_say(), reader.to_say()
    assert first is not None and len(first) <= MAX_RECEIPT_BYTES
    assert second is not None and reader.to_say() is None
    payload = unseal(second, CONTEXT, max_bytes=MAX_RECEIPT_BYTES).payload
    assert len(msgspec.msgpack.decode(payload, type=Receipt).thanks) == 1


def test_the_same_receipt_and_an_older_one_count_once(clock: Clock) -> None:
    author, reader = receipts(AUTHOR, clock, 9), receipts(READER, clock)
    first, second = says(reader, clock), says(reader, clock)
    for sealed in (second, first, second):
        hear(author, sealed)
    assert heard(author) == (2, 4, 1, 2)


def test_a_start_that_is_said_to_overlap_the_one_before_counts_nothing_twice(clock: Clock) -> None:
    author = receipts(AUTHOR, clock, 9)
    hear(author, forged(clock))
    clock.advance(1)
    hear(author, forged(clock))
    assert heard(author) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    "thanks",
    [
        [Thanks(AUTHOR.peer_id, "addition", 6, 6)],
        [Thanks(AUTHOR.peer_id, "addition", 5, 21)],
        [Thanks(AUTHOR.peer_id, "addition", 2, 1)],
        [Thanks(AUTHOR.peer_id, "never given", 1, 1)],
        [Thanks(AUTHOR.peer_id, "addition", 1, 1), Thanks(AUTHOR.peer_id, "never given", 1, 1)],
    ],
    ids=["groups", "answers", "fewer answers than groups", "another task", "one true, one not"],
)
def test_nobody_thanks_for_more_than_was_given(thanks: list[Thanks], clock: Clock) -> None:
    author = receipts(AUTHOR, clock, 5)
    hear(author, forged(clock, thanks=tuple(thanks)))
    assert heard(author) == (0, 0, 0, 1)


def test_over_many_starts_nobody_thanks_for_more_than_was_given(clock: Clock) -> None:
    author = receipts(AUTHOR, clock, 5)
    for _ in range(9):
        clock.advance(60)
        hear(author, forged(clock))
    assert heard(author) == (5, 5, 1, 4)


@pytest.mark.parametrize(
    "case",
    ["banned", "sender", "old", "ahead", "backwards", "garbage", "large", "other context", "other swarm"],
)
def test_what_is_wrong_with_a_receipt_costs_us_nothing(case: str, clock: Clock) -> None:
    author, sender, sealed = receipts(AUTHOR, clock, 5), READER, forged(clock)
    now_ms = int(clock() * 1000)
    match case:
        case "banned":
            author._context.ledger.reputation.punish(READER.peer_id, 100, clock())
        case "sender":
            sender = OTHER
        case "old":
            clock.advance(MAX_AGE_S + 1)
        case "ahead":
            sealed = forged(clock, until_ms=now_ms + int(MAX_CLOCK_SKEW_S * 1000) + 1)
        case "backwards":
            sealed = forged(clock, since_ms=now_ms + 1)
        case "garbage":
            sealed = seal(READER, CONTEXT, b"\xc1")
        case "large":
            sealed = seal(READER, CONTEXT, b"x" * MAX_RECEIPT_BYTES)
        case "other context":
            payload = unseal(sealed, CONTEXT, max_bytes=MAX_RECEIPT_BYTES).payload
            sealed = seal(READER, "something else", payload)
        case _:
            sealed = forged(clock, swarm="elsewhere")
    hear(author, sealed, sender)
    assert heard(author) == (0, 0, 0, 1)
    assert author._context.ledger.reputation.score(OTHER.peer_id, clock()) == 100


def test_a_flood_of_one_sender_and_of_many_names_is_bounded_and_displaces_nobody_we_know(
    clock: Clock,
) -> None:
    author = receipts(AUTHOR, clock, 500)
    for _ in range(3 * int(RECEIPTS_BURST)):
        clock.advance(0.1)
        hear(author, forged(clock, since_ms=0, thanks=(Thanks(AUTHOR.peer_id, "addition", 1, 1),)))
    assert author.dropped == 2 * RECEIPTS_BURST
    for _ in range(PROVEN_AFTER):
        author._context.ledger.reputation.note_accepted(READER.peer_id)
        author._context.ledger.reputation.note_accepted(OTHER.peer_id)
    for number in range(MAX_NODES + 200):
        clock.advance(1)
        name = NodeKey(number.to_bytes(32, "big"))
        hear(author, forged(clock, name), name)
    assert len(author._thanked) == MAX_NODES and len(author._allowances) <= MAX_SENDERS
    kept = dict(author._thanked)
    hear(author, forged(clock, OTHER, thanks=(Thanks(AUTHOR.peer_id, "addition", 501, 501),)), OTHER)
    assert author._thanked == kept, "false thanks displace nobody"
    clock.advance(1)
    hear(author, forged(clock, OTHER), OTHER)
    assert {READER.peer_id, OTHER.peer_id} <= author._thanked.keys()
    assert len(author._thanked) == MAX_NODES


def test_who_thanked_lately_is_told_from_who_did_once(clock: Clock) -> None:
    author = receipts(AUTHOR, clock, 5)
    hear(author, forged(clock))
    clock.advance(WEEK_S + 1)
    hear(author, forged(clock, OTHER), OTHER)
    assert (author.stats().nodes, author.stats().nodes_lately) == (2, 1)


def test_damaged_thanks_of_an_earlier_life_are_forgotten_with_a_word(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    author = receipts(AUTHOR, clock, 5)
    hear(author, forged(clock))
    again = receipts(AUTHOR, clock)
    again.restore(msgspec.Raw(b"\x93\x01\x02\x03"))
    assert again.stats().nodes == 0 and "going on without them" in caplog.text
    again.restore(author.saved())
    assert again.stats() == msgspec.structs.replace(author.stats(), dropped=0)
