"""Who is kept away, how long, and how many at most."""

import pytest

from swarmnode.network import barred_peers
from swarmnode.network.barred_peers import BarredPeers


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_peer_is_barred_until_its_time_is_over():
    clock = Clock()
    peers = BarredPeers(clock)
    peers.bar("a", 60)
    assert peers.among(["a", "b"]) == {"a"}
    clock.now_s += 60
    assert "a" not in peers
    assert len(peers) == 0


def test_a_shorter_time_does_not_end_a_longer_one():
    clock = Clock()
    peers = BarredPeers(clock)
    peers.bar("a", 60)
    peers.bar("a", 1)
    clock.now_s += 30
    assert "a" in peers


def test_no_time_bars_nobody():
    peers = BarredPeers(Clock())
    peers.bar("a", 0)
    assert len(peers) == 0


def test_beyond_the_bound_the_one_whose_time_is_over_first_is_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(barred_peers, "MAX_BARRED", 2)
    peers = BarredPeers(Clock())
    for peer, for_s in (("a", 30), ("b", 10), ("c", 20)):
        peers.bar(peer, for_s)
    assert peers.among("abc") == {"a", "c"}
