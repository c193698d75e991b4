"""Turns rows of user tasks into examples: pairs, dictionaries, prompts."""

from typing import Any, cast

from swarmnode.chat import ROLES, Message, Prompt, prompt_of, written_prompt
from swarmnode.errors import TaskError
from swarmnode.types import Example, ExampleKey

_FORMS = 'yield (prompt, answer), {"prompt": ..., "answer": ...} or a prompt'


def read_row(row: Any, key: ExampleKey, origin: object) -> Example:
    """Returns the example that a row describes. `origin`: the row's source, for errors. Raises TaskError."""
    columns = dict(columns_of(row, origin))
    if "prompt" not in columns:
        raise TaskError(f"{origin}: examples yielded a row without a prompt: {row!r:.80}", hint=_FORMS)
    prompt = columns.pop("prompt")
    asked = user_prompt(prompt, origin)
    return Example(key, asked, columns, conversational=not isinstance(prompt, str))


def columns_of(row: Any, origin: object) -> dict[str, Any]:
    """Returns a row as columns: a pair is a prompt and its answer, a text is a prompt. Raises TaskError."""
    match row:
        case str():
            return {"prompt": row}
        case (prompt, str() | int() | float() as answer):
            return {"prompt": prompt, "answer": answer}
        case dict():
            return cast(dict[str, Any], row)
        case _:
            raise TaskError(f"{origin} is not a row: {row!r:.80}", hint=_FORMS)


def user_prompt(prompt: Any, origin: object) -> Prompt:
    """Returns a user's prompt: a text, or messages. Raises TaskError."""
    asked = prompt if isinstance(prompt, str) else prompt_of(_messages(prompt, origin))
    if not asked:
        raise TaskError(
            f"{origin}: invalid prompt {prompt!r:.80}",
            hint="use a non-empty string, or messages that end with a user message",
        )
    if any("\ud800" <= character <= "\udfff" for character in written_prompt(asked)):
        raise TaskError(
            f"{origin}: a prompt contains a lone surrogate (half a character): {prompt!a:.80}",
            hint="read files as UTF-8 without errors='surrogateescape', and split strings between characters",
        )
    return asked


def _messages(prompt: Any, origin: object) -> list[Message]:
    """Returns messages in the format of TRL's data sets. The last one is the user's and will be answered."""
    if not isinstance(prompt, list) or not prompt:
        raise TaskError(
            f"{origin}: invalid prompt {prompt!r:.80}",
            hint="use a non-empty string, or messages that end with a user message",
        )
    messages = [_message(message, origin) for message in cast(list[Any], prompt)]
    if messages[-1]["role"] != "user" or not messages[-1]["content"]:
        raise TaskError(
            f"{origin}: a prompt does not end with a user message: {prompt!r:.80}",
            hint="leave out what the policy should write",
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
                f"{origin}: a prompt has an invalid message: {message!r:.80}",
                hint=f'write {{"role": ..., "content": "text"}}, with one of the roles {", ".join(ROLES)}',
            )


def _text_part(part: Any, origin: object) -> str:
    match _said(part):
        case {"type": "text", "text": str(text), **others} if not others:
            return text
        case _:
            raise TaskError(
                f"{origin}: a prompt has a message part that is not text: {part!r:.80}",
                hint="policies here read only text; leave out images and audio",
            )


def _said(item: Any) -> dict[Any, Any]:
    """Returns the entries that are filled in: tables have every key in every row."""
    items = cast(dict[Any, Any], item).items() if isinstance(item, dict) else ()
    return {key: value for key, value in items if value is not None}
