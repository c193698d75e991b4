"""Frames: the same prefix in every version and bounded answers."""

import pytest

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.frames import (
    VERSION,
    AnswerFrame,
    check_version,
    decode,
    encode,
)
from swarmnode.extensions.pipeline.wire.refusals import MAX_DETAIL_CHARS, MemberRefused, Refusal, Refused
from swarmnode.extensions.pipeline.wire.services import LIMITS


@pytest.mark.parametrize("refused", [None, *(Refused(reason, "x" * MAX_DETAIL_CHARS) for reason in Refusal)])
def test_an_answer_is_read_as_it_was_said(refused: Refused | None):
    data = encode(AnswerFrame(refused=refused, keep=True))
    assert decode(AnswerFrame, data) == AnswerFrame(refused=refused, keep=True)
    assert all(len(data) <= limits.max_answer_bytes for limits in LIMITS.values())


@pytest.mark.parametrize("reason", [Refusal.TOO_LARGE, "wrong_size"])
def test_a_refusal_says_its_reason_once(reason: str):
    refused = MemberRefused(Refused.of(Rejected(reason, "9 bytes")))
    assert str(refused).count(reason) == 1 and str(refused).endswith(": 9 bytes")


DEEP = b"\x94\xc0\xc2\x00" + b"\x91" * 2000 + b"\xc0"
"""An answer of lists in lists."""


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", DEEP, encode([None, True, -1, 0]), encode([["gone", ""], True, 0])]
)
def test_other_bytes_are_no_answer(data: bytes):
    with pytest.raises(Rejected, match="malformed"):
        decode(AnswerFrame, data)


def test_members_of_different_versions_are_told_to_install_the_same():
    check_version(VERSION)
    with pytest.raises(Rejected, match=rf"version 1 .* meets version {VERSION}: install the same swarmnode"):
        check_version(1)
