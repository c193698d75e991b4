import random

import pytest

from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.gossip.helping import Helping
from swarmnode.exchange.gossip.inbox import Inbox
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.limits import TOTAL_HEADERS_BURST, TOTAL_HEADERS_PER_S
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryNetwork


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
