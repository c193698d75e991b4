from swarmnode.exchange.gossip.header_pool import HeaderPool
from swarmnode.identity.node_key import NodeKey


def test_headers_wait_by_author_until_they_are_taken_out(announced, key: NodeKey, other_key: NodeKey):
    pool = HeaderPool()
    first, second, third = announced(key, 0), announced(key, 1), announced(other_key, 2)
    for announcement in (first, second, third):
        assert pool.add(announcement) == 0
    assert {author: list(headers) for author, headers in pool.waiting.items()} == {
        key.peer_id: [first, second],
        other_key.peer_id: [third],
    }
    pool.remove(first)
    pool.remove(third)
    assert list(pool.waiting) == [key.peer_id]
    assert len(pool) == 1


def test_an_author_cannot_fill_the_pool(announced, key: NodeKey, other_key: NodeKey):
    pool = HeaderPool(max_per_author=2)
    quiet = announced(other_key)
    pool.add(quiet)
    displaced = [pool.add(announced(key, number)) for number in range(5)]
    assert displaced == [0, 0, 1, 1, 1]
    assert list(pool.waiting[key.peer_id]) == [announced(key, 3), announced(key, 4)]
    assert list(pool.waiting[other_key.peer_id]) == [quiet]


def test_a_full_pool_takes_the_oldest_of_whoever_has_most(announced, key: NodeKey, other_key: NodeKey):
    pool = HeaderPool(max_headers=4)
    for number in range(3):
        pool.add(announced(key, number))
    pool.add(announced(other_key, 0))
    assert pool.add(announced(other_key, 1)) == 1
    assert len(pool) == 4
    assert list(pool.waiting[key.peer_id]) == [announced(key, 1), announced(key, 2)]


def test_a_full_pool_with_one_header_each_lets_the_oldest_author_go(announced):
    pool = HeaderPool(max_headers=3)
    keys = [NodeKey(bytes([number]) * 32) for number in range(5)]
    for author in keys:
        pool.add(announced(author))
    assert list(pool.waiting) == [author.peer_id for author in keys[2:]]


def test_what_is_not_wanted_any_more_is_dropped_and_counted(announced, key: NodeKey, other_key: NodeKey):
    pool = HeaderPool()
    for number in range(3):
        pool.add(announced(key, number, at=100.0 + number))
    pool.add(announced(other_key, at=100.0))
    assert pool.keep_only(lambda announcement: announcement.arrival.at > 100.0) == 2
    assert len(pool) == 2
    assert list(pool.waiting) == [key.peer_id]
