import random

import pytest

from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.gossip.helping import Helping
from swarmnode.exchange.gossip.inbox import Inbox
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import (
    HEADERS_BURST,
    LATE_HEADERS_BURST,
    LATE_S,
    TOTAL_HEADERS_BURST,
    TOTAL_HEADERS_PER_S,
)
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryNetwork
from tests.unit.exchange.validation.conftest import resealed


@pytest.fixture
def ledger(clock) -> Ledger:
    return Ledger(Reputation(), clock)


@pytest.fixture
def inbox(ledger: Ledger, settings, task, clock) -> Inbox:
    host, key = MemoryNetwork().host(), NodeKey(bytes(32))
    context = ExchangeContext(
        host, key, {task.name: task}, settings, ledger, clock, random.Random(0), Neighbourhood()
    )
    return Inbox(context, Helping(context))


def test_a_crowd_of_strangers_is_not_listened_to_beyond_what_we_can_afford(
    inbox: Inbox, ledger: Ledger, clock
):
    for number in range(int(TOTAL_HEADERS_BURST) + 100):
        inbox.hear(Message("topic", f"stranger {number}", b""))
    assert ledger.dropped == {"malformed": TOTAL_HEADERS_BURST, "over_capacity": 100}
    clock.advance(1.0)
    for number in range(1000):
        inbox.hear(Message("topic", f"newcomer {number}", b""))
    assert ledger.dropped["malformed"] == TOTAL_HEADERS_BURST + TOTAL_HEADERS_PER_S
    assert ledger.headers_seen == TOTAL_HEADERS_BURST + 1100


def test_what_was_heard_is_counted_in_bytes(inbox: Inbox, ledger: Ledger, composed, key):
    inbox.hear(Message("topic", key.peer_id, composed.sealed))
    assert ledger.headers_accepted == 1
    assert ledger.bytes_in == len(composed.sealed)


def test_two_messages_over_the_bound_of_the_network_end_in_a_ban(inbox: Inbox, ledger: Ledger, clock):
    for _ in range(3):
        inbox.hear(Message("topic", "mallory", b"", oversized=True))
    assert ledger.dropped == {"gossip_too_large": 2, "banned": 1}
    assert ledger.reputation.is_banned("mallory", clock())


def test_a_clock_that_was_ahead_at_the_start_does_not_make_us_deaf_when_it_is_set_right(
    inbox: Inbox, ledger: Ledger, composed, key, clock
):
    inbox.born_at = clock() + 7200.0
    inbox.hear(Message("topic", key.peer_id, composed.sealed))
    assert ledger.dropped == {} and ledger.headers_accepted == 1


def test_a_message_that_was_heard_before_costs_nobody_anything(inbox: Inbox, ledger: Ledger, composed, key):
    for _ in range(int(TOTAL_HEADERS_BURST) + 2):
        inbox.hear(Message("topic", key.peer_id, composed.sealed))
    assert ledger.headers_accepted == 1
    assert ledger.dropped == {"duplicate": TOTAL_HEADERS_BURST + 1}


def test_a_group_that_is_announced_in_other_words_is_the_same(inbox: Inbox, ledger: Ledger, composed, key):
    for sealed in (composed.sealed, resealed(composed, key, created_ms=composed.header.created_ms + 1)):
        inbox.hear(Message("topic", key.peer_id, sealed))
    assert (ledger.headers_accepted, ledger.dropped) == (1, {"duplicate": 1})


def test_a_refused_message_is_remembered_if_its_sender_signed_it(inbox: Inbox, ledger: Ledger, composed, key):
    useless, forged = resealed(composed, key, version="2"), composed.sealed[:-1] + b"?"
    for sealed in (useless, useless, forged, forged):
        inbox.hear(Message("topic", key.peer_id, sealed))
    assert ledger.dropped == {"other_version": 1, "duplicate": 1, "bad_signature": 2}


def numbered(composed: SignedGroup, key: NodeKey, count: float) -> list[Message]:
    """Announcements of as many different groups."""
    hashes = (number.to_bytes(32, "big") for number in range(int(count)))
    return [Message("topic", key.peer_id, resealed(composed, key, body_hash=one)) for one in hashes]


def test_an_author_is_heard_at_the_rate_that_is_allowed_to_each(inbox: Inbox, ledger: Ledger, composed, key):
    for message in numbered(composed, key, HEADERS_BURST + 1):
        inbox.hear(message)
    assert (ledger.headers_accepted, ledger.dropped["rate_limited"]) == (HEADERS_BURST, 1)


def test_old_messages_are_charged_to_all_together_and_not_to_their_author(
    inbox: Inbox, ledger: Ledger, composed, key, clock
):
    clock.advance(LATE_S + 1.0)
    for message in numbered(composed, key, LATE_HEADERS_BURST + 1):
        inbox.hear(message)
    assert (ledger.headers_accepted, ledger.dropped["over_capacity"]) == (LATE_HEADERS_BURST, 1)
    fresh = resealed(composed, key, created_ms=int(clock() * 1000))
    inbox.hear(Message("topic", key.peer_id, fresh))
    assert ledger.headers_accepted == LATE_HEADERS_BURST + 1
