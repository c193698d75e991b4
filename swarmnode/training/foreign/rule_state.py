"""A rule's state in bytes, under the name of the rule it is of.

rules -> [pack, unpack] -> checkpoint.py (rule.bin)
"""

import logging
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1

MAX_STATE_BYTES = 512 * 1024 * 1024
"""A whole state. A book of 2000 answers of 512 tokens takes some 6 MiB."""

MAX_NAME = 256
"""Characters of a rule's name, which may be an import path."""

State = TypeVar("State", bound=msgspec.Struct)


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    rule: Annotated[str, Meta(max_length=MAX_NAME)]
    state: msgspec.Raw


def pack(rule: str, state: msgspec.Struct) -> bytes:
    """The state of a rule, for `unpack`."""
    raw = msgspec.Raw(msgspec.msgpack.encode(state))
    return msgspec.msgpack.encode(_Packed(FORMAT, rule, raw))


def unpack(data: bytes, rule: str, kind: type[State]) -> State | None:
    """What `pack` was given; None for no bytes or the state of another rule. Raises CheckpointError."""
    if not data:
        return None
    try:
        if len(data) > MAX_STATE_BYTES:
            raise msgspec.ValidationError(f"{len(data)} bytes, at most {MAX_STATE_BYTES}")
        packed = msgspec.msgpack.decode(data, type=_Packed)
        if packed.rule != rule:
            logger.info("exchange.rule is %s and was %s: it starts with nothing", rule, packed.rule)
            return None
        if packed.format != FORMAT:
            raise msgspec.ValidationError(f"format {packed.format}, this version reads {FORMAT}")
        return msgspec.msgpack.decode(packed.state, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"what exchange.rule={rule} had learnt cannot be read: {error}", hint="use --fresh"
        ) from error
