"""An invitation says what was put in, and a damaged one says nothing."""

import base64
import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import NetworkError
from swarmnode.network.finding.invitation import Invitation, is_invitation, read_invitation

PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
SEEDS = (f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}", f"/dns4/seed.example.org/tcp/4001/p2p/{PEER}")


def packed(*fields: object) -> str:
    return "sn1:" + base64.urlsafe_b64encode(msgspec.msgpack.encode(fields)).decode().rstrip("=")


def test_what_goes_in_comes_out():
    invited = Invitation(name="friends", seeds=SEEDS, key=b"k" * 32)
    assert read_invitation(invited.text()) == invited
    assert is_invitation(invited.text())
    assert not is_invitation(SEEDS[0])


def test_an_invitation_is_no_longer_than_the_command_that_it_stands_for():
    assert len(Invitation(seeds=SEEDS[:1]).text()) < len(f"{SEEDS[0]} --swarm commons")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an invitation"),
        ("sn1:", "damaged"),
        ("sn1:k6hjb21tb25z", "damaged"),
        ("sn1:k6dmcmllbmRzkMQA=", "damaged"),
        ("sn1:k6dmcmllbmRzkMQB", "damaged"),
        ("sn1:k6dmcmllbmRz kMQA", "damaged"),
        ("sn2:k6dmcmllbmRzkMQA", "version 2"),
        ("sn1:" + "A" * 4000, "too long"),
        (packed("x" * 64, [], b""), "too long or missing"),
        (packed("", [], b""), "too long or missing"),
        (packed("a", [], b"k" * 73), "too long or missing"),
        (packed("a", [b""] * 5, b""), "5 addresses"),
        (packed("a", [], b"", 1), "damaged"),
        (packed("a", ["text"], b""), "damaged"),
        (packed("a", [bytes.fromhex("047f000001060fa1")], b""), "does not end in"),
        (packed("a", [b"\xff\xff"], b""), "."),
    ],
)
def test_what_is_none_is_refused_with_the_reason(text: str, says: str):
    with pytest.raises(NetworkError, match=says):
        read_invitation(text)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_be_refused(data: bytes):
    text = "sn1:" + base64.urlsafe_b64encode(data).decode().rstrip("=")
    with contextlib.suppress(NetworkError):
        read_invitation(text)


def test_what_nobody_could_read_is_not_written():
    with pytest.raises(NetworkError, match="5 addresses"):
        Invitation(seeds=SEEDS[:1] * 5).text()
