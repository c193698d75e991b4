"""A header as gossip brings it, checked by our settings; and the reason of a refusal."""

from dataclasses import replace

import msgspec
import pytest

from swarmnode.errors import Rejected
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.messages import Announcement, Arrival, encode_header
from swarmnode.exchange.validation.header_check import HEADER_CONTEXT, check_of_use, open_gossip
from swarmnode.identity.envelope import seal
from swarmnode.identity.node_key import NodeKey

NOW = 1_700_000_000.0


@pytest.fixture
def check(settings: ExchangeSettings, task):
    def run(data: bytes, sender: NodeKey, now: float = NOW, **changes: object) -> Announcement:
        ours = replace(settings, **changes)
        header = open_gossip(data, sender.peer_id, now, ours.max_age_s)
        check_of_use(sender.peer_id, header, ours, {task.name: task}, spread=True)
        return Announcement(sender.peer_id, header, data, Arrival(now, 0))

    return run


def reason_of(check, *arguments, **settings) -> str:
    with pytest.raises(Rejected) as caught:
        check(*arguments, **settings)
    return caught.value.reason


def resealed(composed: SignedGroup, key: NodeKey, **changes: object) -> bytes:
    return seal(key, HEADER_CONTEXT, encode_header(msgspec.structs.replace(composed.header, **changes)))
