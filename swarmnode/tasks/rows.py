"""Rows of user tasks made into examples: pairs, dictionaries, prompts."""

from typing import Any, cast

from swarmnode.chat import ROLES, chat_text
from swarmnode.errors import TaskError
from swarmnode.types import CHAT_MARK, Example, ExampleKey, Message

_FORMS = 'yield (prompt, answer), {"prompt": ..., "answer": ...} or a prompt'


def read_row(row: Any, key: ExampleKey, origin: object) -> Example:
    """Returns the example that a row describes. `origin`: the row's source, for errors. Raises TaskError."""
    columns = dict(columns_of(row, origin))
    if "prompt" not in columns:
        raise TaskError(f"{origin}: examples yielded {row!r:.80}", hint=_FORMS)
    prompt = columns.pop("prompt")
    text = user_text(prompt, origin)
    return Example(key, text, columns, conversational=not isinstance(prompt, str))


def columns_of(row: Any, origin: object) -> dict[str, Any]:
    """Returns a row as columns: a pair is a prompt and its answer, a text a prompt. Raises TaskError."""
    match row:
        case str():
            return {"prompt": row}
        case (prompt, str() | int() | float() as answer):
            return {"prompt": prompt, "answer": answer}
        case dict():
            return cast(dict[str, Any], row)
        case _:
            raise TaskError(f"{origin} is {row!r:.80}", hint=_FORMS)


def user_text(prompt: Any, origin: object) -> str:
    """Returns a prompt as text: the user's message, or a text that stands for a conversation. Raises
    TaskError."""
    text = prompt if isinstance(prompt, str) else chat_text(_messages(prompt, origin))
    if not text:
        raise TaskError(
            f"{origin}: a prompt is {prompt!r:.80}",
            hint="a prompt is a text that is not empty, or messages that end with one of the user",
        )
    if isinstance(prompt, str) and prompt.startswith(CHAT_MARK):
        raise TaskError(
            f"{origin}: a prompt begins with a control character: {prompt!r:.80}", hint="strip it"
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TaskError(
            f"{origin}: a prompt has half a character in it (a lone surrogate): {prompt!a:.80}",
            hint="read files as UTF-8 without errors='surrogateescape', and cut texts between characters",
        )
    return text


def _messages(prompt: Any, origin: object) -> list[Message]:
    """Returns messages as in TRL's data sets. The last one is the user's and will be answered."""
    if not isinstance(prompt, list) or not prompt:
        raise TaskError(
            f"{origin}: a prompt is {prompt!r:.80}",
            hint="a prompt is a text that is not empty, or messages that end with one of the user",
        )
    messages = [_message(message, origin) for message in cast(list[Any], prompt)]
    if messages[-1]["role"] != "user" or not messages[-1]["content"]:
        raise TaskError(
            f"{origin}: a prompt does not end with a message of the user: {prompt!r:.80}",
            hint="leave out what the policy is to write by itself",
        )
    return messages


def _message(message: Any, origin: object) -> Message:
    match _said(message):
        case {"role": str(role), "content": str(content), **others} if role in ROLES and not others:
            return {"role": role, "content": content}
        case {"role": str(role), "content": [*parts], **others} if role in ROLES and not others:
            return {"role": role, "content": "".join(_text_part(part, origin) for part in parts)}
        case _:
            raise TaskError(
                f"{origin}: a prompt has a message {message!r:.80}",
                hint=f'a message is {{"role": ..., "content": a text}}, the role one of {", ".join(ROLES)}',
            )


def _text_part(part: Any, origin: object) -> str:
    match _said(part):
        case {"type": "text", "text": str(text), **others} if not others:
            return text
        case _:
            raise TaskError(
                f"{origin}: a message of a prompt has a part that is no text: {part!r:.80}",
                hint="policies here read text alone; leave pictures and sounds out",
            )


def _said(item: Any) -> dict[Any, Any]:
    """Returns the entries that somebody filled in: tables have every key in every row."""
    items = cast(dict[Any, Any], item).items() if isinstance(item, dict) else ()
    return {key: value for key, value in items if value is not None}
