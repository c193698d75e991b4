"""Questions between members about stage states, and their answers. Bounded and strict.

state_service.py -> [state_messages] -> questions.py -> a member's state_service.py
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.replication.holdings import Holding
from swarmnode.extensions.pipeline.wire.hop_messages import Count, Digest

PROTOCOL = "/swarmnode/pipeline-states/1"
MAX_HOLDINGS = 32
"""Bound of the holdings that one member may report."""

KEPT = b"kept"
"""The answer to an offered copy that is now kept; any other answer means that it is not."""


class AskHoldings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="holdings"):
    """Asks a member which states it holds."""


class AskState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="state"):
    """Asks for the bytes of a state from `offset` on."""

    digest: Digest
    offset: Count


class OfferCopy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="copy"):
    """Asks a member to keep a copy of this state. Answered when it is kept."""

    holding: Holding


Question = AskHoldings | AskState | OfferCopy

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_holdings = msgspec.msgpack.Decoder(Annotated[tuple[Holding, ...], Meta(max_length=MAX_HOLDINGS)])
_sizes = msgspec.msgpack.Decoder(Count)


def encode(message: Question | tuple[Holding, ...] | int) -> bytes:
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Decode a question. Raises Rejected: malformed."""
    try:
        return _questions.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("malformed", str(error)) from error


def decode_holdings(data: bytes) -> tuple[Holding, ...]:
    """Decode the holdings of a member. Raises Rejected: malformed."""
    try:
        return _holdings.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("malformed", str(error)) from error


def decode_size(data: bytes) -> int:
    """Decode the size of a state in bytes. Raises Rejected: wrong_size."""
    try:
        return _sizes.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("wrong_size", str(error)) from error
