"""The peer book remembers, forgets the right ones, and decides whom to dial."""

import logging
import random
from pathlib import Path

import pytest

from swarmnode.errors import NetworkError, StorageError
from swarmnode.network.finding.peer_book import (
    ALONE_RETRY_S,
    FIRST_RETRY_S,
    MAX_ADDRESSES,
    MAX_RETRY_S,
    PeerBook,
    next_dials,
    retry_delay_s,
)
from swarmnode.network.multiaddr import MAX_ADDRESSES_PER_PEER, peer_id_from_bytes

NOW = 1_800_000_000.0


def peer(number: int) -> str:
    return peer_id_from_bytes(bytes.fromhex("002408011220") + number.to_bytes(32, "big"))


def address(number: int, port: int = 4001) -> str:
    return f"/ip4/192.0.2.7/tcp/{port}/p2p/{peer(number)}"


def book_of(*addresses: str) -> PeerBook:
    book = PeerBook()
    for known in addresses:
        book.learn(known, "kademlia")
    return book


def test_every_due_peer_is_dialled_until_there_are_enough():
    book = book_of(*(address(number) for number in range(5)))
    assert set(next_dials(book, (), NOW, target=8)) == {address(number) for number in range(5)}
    assert len(next_dials(book, (), NOW, target=2)) == 2
    assert next_dials(book, [peer(8), peer(9)], NOW, target=2) == ()


def test_a_connected_peer_is_not_dialled_and_counts():
    book = book_of(address(1), address(2), address(3))
    dials = next_dials(book, [peer(1)], NOW, target=2)
    assert len(dials) == 1
    assert address(1) not in dials


def test_a_peer_is_dialled_at_one_address_at_a_time_and_the_next_one_after_a_failure():
    book = book_of(address(1, port=1), address(1, port=2))
    (first,) = next_dials(book, (), NOW, target=8)
    book.failed(first, NOW, random.Random(0))
    (second,) = next_dials(book, (), NOW, target=8)
    assert {first, second} == {address(1, port=1), address(1, port=2)}


def test_seeds_come_first_then_who_was_seen_last():
    book = book_of(address(1), address(2), address(3))
    book.learn(address(4), "seed")
    book.succeeded(address(2), NOW - 10)
    book.succeeded(address(3), NOW - 5)
    assert next_dials(book, (), NOW, target=8) == tuple(address(number) for number in (4, 3, 2, 1))


def test_a_failed_address_waits_longer_each_time_and_a_success_forgives():
    rng = random.Random(0)
    book = book_of(address(1))
    waits_s: list[float] = []
    for _ in range(12):
        book.failed(address(1), NOW, rng)
        (known,) = book
        waits_s.append(known.retry_at - NOW)
        assert next_dials(book, (), known.retry_at - 0.1, target=8) == ()
        assert next_dials(book, (), known.retry_at, target=8) == (address(1),)
    assert FIRST_RETRY_S / 2 <= waits_s[0] <= FIRST_RETRY_S
    assert waits_s[4] > 4 * waits_s[0]
    assert MAX_RETRY_S / 2 <= waits_s[-1] <= MAX_RETRY_S
    book.succeeded(address(1), NOW)
    (known,) = book
    assert (known.failures, known.retry_at, known.last_seen) == (0, 0.0, NOW)


def test_the_jitter_is_that_of_the_given_generator():
    waits_s = [[retry_delay_s(3, rng) for _ in range(5)] for rng in map(random.Random, (1, 1, 2))]
    assert waits_s[0] == waits_s[1] != waits_s[2]
    assert retry_delay_s(10_000, random.Random(0)) <= MAX_RETRY_S


def test_learning_an_address_again_keeps_its_history():
    book = book_of(address(1))
    book.succeeded(address(1), NOW)
    book.learn(address(1), "mdns")
    book.learn(address(1), "seed")
    (known,) = book
    assert (known.source, known.last_seen) == ("seed", NOW)


def test_a_malformed_address_is_not_learnt():
    book = PeerBook()
    with pytest.raises(NetworkError):
        book.learn("/ip4/192.0.2.7/tcp/4001", "kademlia")
    assert len(book) == 0


def test_one_peer_cannot_fill_the_book():
    book = book_of(address(1))
    for port in range(1, 1000):
        book.learn(address(2, port), "kademlia")
    assert len(book) == 1 + MAX_ADDRESSES_PER_PEER


def test_a_full_book_forgets_the_worst_and_never_a_seed():
    book = PeerBook()
    book.learn(address(0), "seed")
    book.failed(address(0), NOW, random.Random(0))
    book.learn(address(1), "kademlia")
    book.succeeded(address(1), NOW)
    book.learn(address(2), "kademlia")
    book.failed(address(2), NOW, random.Random(0))
    for number in range(3, MAX_ADDRESSES + 50):
        book.learn(address(number), "kademlia")
    known = {known.address for known in book}
    assert len(known) == MAX_ADDRESSES
    assert {address(0), address(1)} <= known
    assert address(2) not in known


def test_what_worked_is_known_after_a_restart(tmp_path: Path):
    path = tmp_path / "state" / "peers.json"
    book = PeerBook.load(path)
    book.learn(address(1), "kademlia")
    book.learn(address(2), "seed")
    book.succeeded(address(1), NOW)
    book.save()
    (known,) = PeerBook.load(path)
    assert (known.address, known.source, known.last_seen) == (address(1), "cache", NOW)
    assert [file.name for file in path.parent.iterdir()] == ["peers.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b'{"version": 2, "peers": []}',
        b'{"version": 1, "peers": [{"address": "/ip4/1.2.3.4/tcp/1", "last_seen": 1.0}]}',
        b'{"version": 1, "peers": [{"address": 7, "last_seen": 1.0}]}',
        b"\xff" * (1024 * 1024 + 1),
    ],
)
def test_a_damaged_book_is_set_aside_and_does_not_stop_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
):
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        book = PeerBook.load(path)
    assert len(book) == 0
    assert "damaged" in caplog.text
    assert (tmp_path / "peers.json.damaged").read_bytes() == content
    book.learn(address(1), "kademlia")
    book.save()
    assert len(PeerBook.load(path)) == 0


def test_a_book_that_cannot_be_written_says_so(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="peer book"):
        PeerBook(tmp_path / "file" / "peers.json").save()


def test_who_is_connected_to_nobody_tries_again_soon_however_often_it_failed() -> None:
    book, rng = PeerBook(), random.Random(0)
    book.learn(address(1), "seed")
    for _ in range(20):
        book.failed(address(1), 0.0, rng, alone=True)
    (known,) = book
    assert known.retry_at <= ALONE_RETRY_S
    book.failed(address(1), 0.0, rng)
    (known,) = book
    assert known.retry_at > ALONE_RETRY_S


def test_names_that_nobody_tried_displace_no_address_that_worked_and_failed_once():
    book = book_of(address(1))
    book.succeeded(address(1), NOW)
    book.failed(address(1), NOW + 1, random.Random(0))
    for number in range(2, MAX_ADDRESSES + 50):
        book.learn(address(number), "kademlia")
    assert address(1) in {known.address for known in book} and len(book) == MAX_ADDRESSES


def test_addresses_that_work_no_more_do_not_keep_new_ones_of_a_peer_out():
    book = PeerBook()
    for port in range(1, 2 * MAX_ADDRESSES_PER_PEER):
        book.learn(address(1, port), "kademlia")
        book.succeeded(address(1, port), NOW + port)
        book.failed(address(1, port), NOW + port + 1, random.Random(0))
        assert address(1, port) in {known.address for known in book}
    assert len(book) == MAX_ADDRESSES_PER_PEER


def test_a_wait_ends_when_the_clock_is_set_back_before_it():
    book = book_of(address(1))
    book.failed(address(1), NOW + 7200.0, random.Random(0))
    assert next_dials(book, (), NOW, target=8) == (address(1),)
