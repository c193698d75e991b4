"""One row of a library: what its author signed, and nothing else."""

import json
from base64 import b64decode, b64encode
from typing import Any

import pytest

from swarmnode.errors import Rejected
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.signed_group import (
    MAX_LINE_BYTES,
    SignedGroup,
    line_of,
    read_line,
    signed_group,
)
from swarmnode.identity.node_key import NodeKey
from tests.unit.exchange.conftest import make_group
from tests.unit.exchange.validation.conftest import resealed


def signed(number: int = 0, *, seed: int = 1) -> SignedGroup:
    key = NodeKey(bytes([seed]) * 32)
    group = make_group(key.peer_id, number=number)
    sent = compose(group, key, swarm="test", model=ModelLabel("tiny", 1000), now=1_700_000_000.0)
    return signed_group(sent.sealed, sent.body)


def changed(line: bytes, **parts: Any) -> bytes:
    return json.dumps(json.loads(line) | parts).encode() + b"\n"


def flipped(text: str) -> str:
    data = bytearray(b64decode(text))
    data[-1] ^= 1
    return b64encode(data).decode()


def test_a_line_gives_back_the_group() -> None:
    group = signed()
    assert read_line(line_of(group)) == group


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 3}, "other_protocol"),
        ({"body_bytes": 1}, "wrong_body"),
        ({"seed": 7}, "body_mismatch"),
        ({"group_size": 5}, "body_mismatch"),
    ],
)
def test_a_header_that_its_author_signed_must_fit_its_body(changes: dict[str, object], reason: str) -> None:
    group = signed()
    with pytest.raises(Rejected) as caught:
        signed_group(resealed(group, NodeKey(b"\1" * 32), **changes), group.body)
    assert caught.value.reason == reason


def test_what_was_changed_is_found_out() -> None:
    line, other = line_of(signed()), json.loads(line_of(signed(1)))
    row = json.loads(line)
    reasons = {
        "malformed": [b"", b"{}", b"\xff\xfe", b"[1]", changed(line, more=1), changed(line, header="????")],
        "bad_signature": [changed(line, header=flipped(row["header"]))],
        "wrong_body": [changed(line, body=flipped(row["body"])), changed(line, body=other["body"])],
        "body_mismatch": [
            changed(line, task="rev"),
            changed(line, version="2"),
            changed(line, author=signed(seed=2).author),
        ],
        "too_large": [b'{"task": "' + b"a" * MAX_LINE_BYTES],
    }
    for reason, lines in reasons.items():
        for damaged in lines:
            with pytest.raises(Rejected) as caught:
                read_line(damaged)
            assert caught.value.reason == reason, damaged[:80]
