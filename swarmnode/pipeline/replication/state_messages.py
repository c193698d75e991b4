"""What members ask each other about stage states, and what they answer. Bounded and strict.

states.py -> [state_messages] -> questions.py -> a member's states.py
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.pipeline.replication.holdings import Holding
from swarmnode.pipeline.wire.messages import Count, Digest

PROTOCOL = "/swarmnode/pipeline-states/1"
MAX_HOLDINGS = 32
"""The most holdings that one member may say it has."""

KEPT = b"kept"
"""The answer to a copy that is kept now; any other means that it is not."""


class AskHoldings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="holdings"):
    """What do you hold?"""


class AskState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="state"):
    """The bytes of a state from `offset` on."""

    digest: Digest
    offset: Count


class OfferCopy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="copy"):
    """Will you keep this? Answered when it is kept."""

    holding: Holding


Question = AskHoldings | AskState | OfferCopy

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_holdings = msgspec.msgpack.Decoder(Annotated[tuple[Holding, ...], Meta(max_length=MAX_HOLDINGS)])
_sizes = msgspec.msgpack.Decoder(Count)


def encode(message: Question | tuple[Holding, ...] | int) -> bytes:
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Raises Rejected: malformed."""
    try:
        return _questions.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("malformed", str(error)) from error


def decode_holdings(data: bytes) -> tuple[Holding, ...]:
    """Raises Rejected: malformed."""
    try:
        return _holdings.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("malformed", str(error)) from error


def decode_size(data: bytes) -> int:
    """The size of a state in bytes. Raises Rejected: wrong_size."""
    try:
        return _sizes.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("wrong_size", str(error)) from error
