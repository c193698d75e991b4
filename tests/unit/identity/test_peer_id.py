import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import Rejected
from swarmnode.identity.keys import NodeKey
from swarmnode.identity.peer_id import peer_id_from_public_key, public_key_from_peer_id

GOOD = NodeKey(bytes(32)).peer_id


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_gives_its_public_key_back(public_key: bytes):
    assert public_key_from_peer_id(peer_id_from_public_key(public_key)) == public_key


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        GOOD[:-1],
        GOOD + "1",
        "1" + GOOD,
        GOOD + "\n",
        " " + GOOD,
        GOOD[:-1] + "0",
        "1" * 100_000,
        "\u0661" * 52,
        base58.b58encode(bytes.fromhex("0024080212") + b"\x20" + bytes(32)).decode(),
    ],
    ids=[
        "empty",
        "rsa",
        "short",
        "long",
        "padded",
        "newline",
        "space",
        "alphabet",
        "huge",
        "unicode",
        "secp256k1",
    ],
)
def test_what_is_no_ed25519_peer_id_is_rejected(peer_id: str):
    with pytest.raises(Rejected) as caught:
        public_key_from_peer_id(peer_id)
    assert caught.value.reason == "bad_peer_id"


@given(st.text(max_size=60))
def test_any_text_is_either_read_or_rejected(text: str):
    try:
        public_key_from_peer_id(text)
    except Rejected as rejected:
        assert rejected.reason == "bad_peer_id"
