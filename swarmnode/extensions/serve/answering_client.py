"""Asks the answering service of a process of the same user on this machine.

api_routes.py, chat_command.py -> [ask, models] -> answering_socket.py
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from swarmnode.extensions.serve.answering_socket import LENGTH_BYTES
from swarmnode.extensions.serve.questions import (
    AnswerEnded,
    Event,
    ListModels,
    Models,
    NoAnswer,
    Question,
    QuestionRefused,
)

GONE = NoAnswer(503, "the node does not answer: it is shutting down or not up yet", "unavailable", None, 2)


async def ask(path: str | None, asked: Question | ListModels) -> AsyncGenerator[Event]:
    """Yields the events of an answer. Closing the generator ends the answer. Raises QuestionRefused if the
    question is not answered, or not to the end. `path` None: no service is available."""
    if path is None:
        raise QuestionRefused(GONE)
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise QuestionRefused(GONE) from error
    try:
        content = msgspec.msgpack.encode(asked)
        writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
        await writer.drain()
        left = asked.samples if isinstance(asked, Question) else 1
        while left:
            for event in await _events(reader):
                if isinstance(event, NoAnswer):
                    raise QuestionRefused(event)
                left -= isinstance(event, AnswerEnded | Models)
                yield event
    finally:
        writer.close()


async def models(path: str | None) -> tuple[str, ...]:
    """Returns the names of the models that can be asked. Raises QuestionRefused."""
    async with aclosing(ask(path, ListModels())) as events:
        async for event in events:
            if isinstance(event, Models):
                return event.names
    raise QuestionRefused(GONE)


async def _events(reader: asyncio.StreamReader) -> list[Event]:
    """Returns the next events. Raises QuestionRefused if there will be none."""
    try:
        length = await reader.readexactly(LENGTH_BYTES)
        content = await reader.readexactly(int.from_bytes(length, "big"))
        return msgspec.msgpack.decode(content, type=list[Event])
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
        raise QuestionRefused(GONE) from error
