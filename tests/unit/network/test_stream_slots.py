"""Places for streams: who waits for nothing makes room, who is worked on stays."""

from swarmnode.network.stream_slots import StreamSlot, StreamSlots, StreamStage


class Streams:
    """Opens streams, and notes which were hung up."""

    def __init__(self, most: int = 8, most_per_peer: int = 4) -> None:
        self.slots = StreamSlots(most=most, most_per_peer=most_per_peer)
        self.ended: list[str] = []

    def open(self, peer_id: str, name: str = "") -> StreamSlot | None:
        return self.slots.take(peer_id, lambda: self.ended.append(name or peer_id))

    def work(self, peer_id: str) -> StreamSlot:
        slot = self.open(peer_id)
        assert slot is not None
        slot.reach(StreamStage.WORKED_ON)
        return slot


def test_when_all_places_wait_an_honest_peer_is_served_at_once():
    streams = Streams(most=8, most_per_peer=4)
    for number in range(8):
        streams.open(f"mallory {number % 2}")
    assert streams.open("honest") is not None
    assert len(streams.ended) == 1 and len(streams.slots) == 8


def test_as_many_identities_as_there_are_places_do_not_keep_an_honest_peer_out():
    streams = Streams(most=256)
    for number in range(256):
        streams.open(f"mallory {number}")
    honest = streams.open("honest")
    assert honest is not None and streams.ended == ["mallory 0"]
    for number in range(255):
        streams.open(f"another {number}")
    assert "honest" not in streams.ended


def test_the_peer_that_holds_the_most_makes_room():
    streams = Streams(most=4)
    streams.open("modest")
    for name in ("first", "second", "third"):
        streams.open("greedy", name)
    streams.open("honest")
    assert streams.ended == ["first"]


def test_a_peer_over_its_share_ends_its_own_oldest_stream():
    streams = Streams(most_per_peer=2)
    for name in ("first", "second", "third"):
        streams.open("greedy", name)
    assert streams.ended == ["first"]


def test_a_stream_without_a_request_makes_room_before_one_whose_answer_was_not_taken():
    streams = Streams(most=2)
    answered = streams.open("a", "answered")
    streams.open("a", "half open")
    assert answered is not None
    answered.reach(StreamStage.ANSWERED)
    streams.open("b")
    assert streams.ended == ["half open"]


def test_what_is_worked_on_never_makes_room():
    streams = Streams(most=2, most_per_peer=1)
    streams.work("a")
    assert streams.open("a") is None
    streams.work("b")
    assert streams.open("c") is None
    assert streams.ended == []


def test_a_place_that_was_given_back_is_free():
    streams = Streams(most=1)
    slot = streams.work("a")
    streams.slots.give_back(slot)
    streams.slots.give_back(slot)
    assert streams.open("b") is not None
