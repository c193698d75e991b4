"""The wire as a member without our checks would use it."""

from typing import Any, TypeVar

import msgspec

from swarmnode.extensions.pipeline.wire.frames import AnswerFrame, decode, encode, framed, receive_prefix
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.network.streams import ByteStream

T = TypeVar("T")


async def write(
    stream: ByteStream, service: MemberService, message: Any, *more: bytes, timeout_s: float = 5.0
) -> None:
    """Asks, with bytes behind the message."""
    body = message if isinstance(message, bytes) else encode(message)
    await stream.send(framed(service, body, timeout_s))
    for part in more:
        await stream.send(part)


async def read(stream: ByteStream, messages: type[T]) -> T:
    """The next message to us."""
    return decode(messages, await stream.receive((await receive_prefix(stream)).length))


async def say(stream: ByteStream, content: Any, *, body_bytes: int = 0) -> None:
    """Answers with a record, or with bytes that are none; those behind it are the caller's."""
    raw = content if isinstance(content, msgspec.Raw) else msgspec.Raw(encode(content))
    answer = AnswerFrame(keep=False, body_bytes=body_bytes, content=raw)
    await stream.send(framed(0, encode(answer)))


async def answer_on(stream: ByteStream) -> AnswerFrame:
    """What we are told."""
    return await read(stream, AnswerFrame)
