"""Who is never right asks; who has a right answer announces it again, others may try; and it costs little."""

import random

import pytest

from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.helping import (
    AGAIN_S,
    ASKS_BURST,
    CONTEXT,
    MAX_AGE_S,
    MAX_ASKERS,
    MAX_REQUEST_BYTES,
    NEW_ASKS_BURST,
    Helping,
    help_topic_of,
    never_right,
)
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.limits import PROVEN_AFTER
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.identity.envelope import seal, unseal
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryNetwork
from tests.unit.exchange.conftest import Addition, Clock, make_group

ASKER = NodeKey(b"\1" * 32)
HELPER = NodeKey(b"\2" * 32)
NEVER_HEARD = NodeKey(b"\3" * 32)


def helping(key: NodeKey, clock: Clock, version: str = "1") -> Helping:
    host, ledger = MemoryNetwork().host(key.peer_id), Ledger(Reputation(), clock)
    settings, rng = ExchangeSettings(swarm="test"), random.Random(0)
    return Helping(
        ExchangeContext(
            host, key, {"addition": Addition(version=version)}, settings, ledger, clock, rng, Neighbourhood()
        )
    )


def ask(key: NodeKey, clock: Clock, number: int = 0) -> bytes:
    stuck = make_group(key.peer_id, right=0, wrong=16, number=number)
    sealed = helping(key, clock).ask("addition", "1", 16, stuck.example.key)
    assert sealed is not None
    return sealed


def hear(one: Helping, sealed: bytes, sender: NodeKey = ASKER) -> None:
    one.hear(Message("help", sender.peer_id, sealed))


def test_only_groups_whose_known_rewards_are_all_wrong_are_asked_about() -> None:
    wrong, mixed = make_group("me", right=0, wrong=4), make_group("me", right=1, wrong=3)
    unknown = make_group("me", right=0, wrong=0)
    assert never_right([wrong, mixed, unknown]) == [wrong]


def test_the_same_is_not_asked_again_at_once(clock: Clock) -> None:
    one = helping(ASKER, clock)
    assert one.ask("addition", "1", 16) is not None
    assert one.ask("addition", "1", 16) is None
    clock.advance(AGAIN_S)
    assert one.ask("addition", "1", 16) is not None
    assert one.ask("unknown", "1", 16) is None
    clock.advance(-7200.0)
    assert one.ask("addition", "1", 16) is not None, "a clock that is set back does not silence us"


def test_what_was_asked_for_is_tried_once_and_one_example_of_an_author(clock: Clock) -> None:
    one = helping(HELPER, clock)
    hear(one, ask(ASKER, clock, 0))
    hear(one, ask(ASKER, clock, 1))
    newest = make_group("anyone", number=1).example.key
    assert one.take_examples(4, ()) == [newest]
    assert one.take_examples(4, ()) == []
    hear(one, ask(ASKER, clock, 1))
    assert one.take_examples(4, {newest}) == [], "we have answered it"


def test_a_flood_of_one_author_and_of_many_is_bounded(clock: Clock) -> None:
    one = helping(HELPER, clock)
    for number in range(4 * int(ASKS_BURST)):
        hear(one, ask(ASKER, clock, number))
    assert one.heard == ASKS_BURST
    for number in range(int(NEW_ASKS_BURST) + 50):
        other = NodeKey(number.to_bytes(32, "big"))
        hear(one, ask(other, clock), other)
    assert one.heard == NEW_ASKS_BURST
    assert len(one._wanted) == len(one._to_answer) == len(one._allowances) == MAX_ASKERS


def test_newcomers_together_do_not_silence_an_author_whose_groups_were_good(clock: Clock) -> None:
    one = helping(HELPER, clock)
    for _ in range(PROVEN_AFTER):
        one._context.ledger.accept(ASKER.peer_id)
    for number in range(2 * int(NEW_ASKS_BURST)):
        one.hear(Message("help", f"name {number}", b"junk"))
    assert one.heard == 0
    hear(one, ask(NEVER_HEARD, clock), NEVER_HEARD)
    assert one.heard == 0, "another newcomer"
    hear(one, ask(ASKER, clock))
    assert one.heard == 1


@pytest.mark.parametrize(
    "case", ["banned", "sender", "old", "garbage", "large", "other context", "other task"]
)
def test_what_is_wrong_with_a_request_costs_us_nothing(case: str, clock: Clock) -> None:
    one, sealed, sender = helping(HELPER, clock), ask(ASKER, clock), ASKER
    match case:
        case "sender":
            sender = HELPER
        case "old":
            clock.advance(MAX_AGE_S + 1)
        case "garbage":
            sealed = seal(ASKER, CONTEXT, b"\xc1")
        case "large":
            sealed = seal(ASKER, CONTEXT, b"x" * MAX_REQUEST_BYTES)
        case "other context":
            payload = unseal(sealed, CONTEXT, max_bytes=MAX_REQUEST_BYTES).payload
            sealed = seal(ASKER, "something else", payload)
        case "other task":
            changed = helping(ASKER, clock, "2").ask("addition", "2", 4)
            assert changed is not None
            sealed = changed
        case "banned":
            one._context.ledger.reputation.punish(ASKER.peer_id, 100, clock())
    hear(one, sealed, sender)
    assert (one.heard, one.dropped, one.take_examples(4, ()), one.take_replies()) == (0, 1, [], [])


def test_requests_have_a_topic_that_nodes_of_before_are_not_on() -> None:
    assert help_topic_of("test") == "/swarmnode/4/test/help/0"


def test_a_node_without_a_right_answer_has_nothing_to_repeat(clock: Clock) -> None:
    one = helping(HELPER, clock)
    hear(one, ask(ASKER, clock))
    assert one.take_replies() == []
