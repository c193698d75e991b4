from hypothesis import given
from hypothesis import strategies as st

from swarmnode.exchange.bodies.body_store import BodyStore


def test_a_body_is_found_by_its_hash():
    store = BodyStore(max_bytes=100, max_bodies=10)
    store.put(b"hash", b"body")
    assert store.get(b"hash") == b"body"
    assert store.get(b"other") is None


def test_the_oldest_bodies_leave_when_there_are_too_many_bytes():
    store = BodyStore(max_bytes=10, max_bodies=10)
    for name in (b"a", b"b", b"c"):
        store.put(name, bytes(4))
    assert store.get(b"a") is None
    assert (len(store), store.size_bytes) == (2, 8)


def test_the_oldest_bodies_leave_when_there_are_too_many():
    store = BodyStore(max_bytes=100, max_bodies=2)
    for name in (b"a", b"b", b"c"):
        store.put(name, b"body")
    assert store.get(b"a") is None
    assert store.get(b"c") == b"body"


def test_a_body_larger_than_the_store_is_not_kept():
    store = BodyStore(max_bytes=10, max_bodies=10)
    store.put(b"a", bytes(11))
    assert (len(store), store.size_bytes) == (0, 0)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.integers(0, 30)), max_size=50))
def test_the_bounds_always_hold(puts: list[tuple[bytes, int]]):
    store = BodyStore(max_bytes=64, max_bodies=5)
    bodies: dict[bytes, bytes] = {}
    for name, size in puts:
        bodies.setdefault(name, bytes(size))
        store.put(name, bodies[name])
        assert len(store) <= 5
        assert (
            store.size_bytes
            == sum(len(body) for name in bodies if (body := store.get(name)) is not None)
            <= 64
        )
