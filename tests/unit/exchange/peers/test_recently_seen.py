from swarmnode.exchange.peers.recently_seen import RecentlySeen


def test_a_key_is_new_once():
    seen = RecentlySeen(max_keys=10, ttl_s=60.0)
    assert seen.add(b"a", 0.0)
    assert not seen.add(b"a", 59.0)
    assert seen.add(b"b", 59.0)


def test_a_key_is_forgotten_after_its_time_even_when_it_kept_coming():
    seen = RecentlySeen(max_keys=10, ttl_s=60.0)
    seen.add(b"a", 0.0)
    seen.add(b"a", 30.0)
    assert seen.add(b"a", 60.0)
    assert len(seen) == 1


def test_it_never_holds_more_than_its_bound():
    seen = RecentlySeen(max_keys=3, ttl_s=60.0)
    for number in range(10):
        seen.add(bytes([number]), 0.0)
    assert len(seen) == 3
    assert not seen.add(bytes([9]), 0.0)
    assert seen.add(bytes([0]), 0.0)
