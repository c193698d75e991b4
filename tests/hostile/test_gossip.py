"""Gossip that no honest node sends: nobody's daemon is restarted, and its author is shown the door."""

from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.hostile.conftest import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def test_a_packet_of_an_ecdsa_author_restarts_nobodys_daemon(pair: Pair) -> None:
    before = pair.restarts
    with pair.attacked_by("ecdsa_author", seconds=5) as attacker:
        assert attacker.done()["sent"]["packets"] > 0
    pair.go_on()
    assert pair.restarts == before


@pytest.mark.parametrize("attack", ["oversized_gossip", "junk_gossip"])
def test_who_wastes_our_time_is_disconnected_and_stays_so(pair: Pair, attack: str) -> None:
    with pair.attacked_by(attack, seconds=8) as attacker:
        pair.go_on()
        done = attacker.done()
    assert done["sent"]
    assert not done["connected_after"], "it dialled once more and was let stay"


def test_a_page_that_was_pointed_at_us_reads_nothing(pair: Pair) -> None:
    note = pair.victim.running()
    foreign = Request(f"http://127.0.0.1:{note.http_port}/status", headers={"Host": "rebound.example"})
    with pytest.raises(HTTPError) as refused:
        urlopen(foreign, timeout=10)
    with refused.value as answer:
        assert note.peer_id.encode() not in answer.read()
    assert pair.victim.status()["peer_id"] == note.peer_id, "whoever asks for us by our address is answered"
