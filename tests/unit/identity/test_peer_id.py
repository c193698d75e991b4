import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import Rejected
from swarmnode.identity.node_key import NodeKey
from swarmnode.identity.peer_id import peer_id_from_public_key, public_key_from_peer_id

GOOD = NodeKey(bytes(32)).peer_id


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_gives_its_public_key_back(public_key: bytes):
    assert public_key_from_peer_id(peer_id_from_public_key(public_key)) == public_key


NO_PEER_IDS = {
    "empty": "",
    "rsa": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "one short": GOOD[:-1],
    "one long": GOOD + "1",
    "leading one": "1" + GOOD,
    "newline": GOOD + "\n",
    "newline for a character": GOOD[:-1] + "\n",
    "leading space": " " + GOOD[1:],
    "zero is not in the alphabet": GOOD[:-1] + "0",
    "huge": "1" * 100_000,
    "digits of another script": "\u0661" * 52,
    "secp256k1": base58.b58encode(bytes.fromhex("002408021220") + bytes(32)).decode(),
    "public key alone": base58.b58encode(bytes(range(32))).decode(),
    "prefix alone": base58.b58encode(bytes.fromhex("002408011220")).decode(),
}


@pytest.mark.parametrize("peer_id", NO_PEER_IDS.values(), ids=NO_PEER_IDS)
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
