"""Answers in OpenAI's format, whole or in chunks.

answering_client.py (events) -> [whole, chunks] -> api_routes.py
"""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from swarmnode.extensions.serve.openai_requests import Asked
from swarmnode.extensions.serve.questions import AnswerBegan, AnswerEnded, Event, NoAnswer, Piece

JsonObject = dict[str, Any]


class AnswerForm:
    """The format of one answer. `began` names the version that writes it."""

    def __init__(self, asked: Asked, began: AnswerBegan) -> None:
        self._asked, self._began = asked, began
        self._tokens = 0
        prefix, kind = ("chatcmpl-", "chat.completion") if asked.chat else ("cmpl-", "text_completion")
        self._head: JsonObject = {
            "id": prefix + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": began.model,
        }

    async def whole(self, events: AsyncIterator[Event]) -> JsonObject:
        """Returns the answer once it is complete."""
        pieces: dict[int, list[Piece]] = {number: [] for number in range(self._asked.question.samples)}
        finish: dict[int, str] = {}
        async for event in events:
            if isinstance(event, Piece):
                pieces[event.sample].append(event)
                self._tokens += len(event.token_ids)
            elif isinstance(event, AnswerEnded):
                finish[event.sample] = event.finish
        choices = [self._choice(number, found, finish[number]) for number, found in pieces.items()]
        return {**self._head, "choices": choices, "usage": self._usage(), **self._prompt_ids()}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncIterator[JsonObject]:
        """Yields the answer as it arrives."""
        if self._asked.chat:
            self._head["object"] = "chat.completion.chunk"
            for number in range(self._asked.question.samples):
                yield self._chunk([{"index": number, "delta": {"role": "assistant", "content": ""},
                                    "logprobs": None, "finish_reason": None}])  # fmt: skip
        async for event in events:
            if isinstance(event, Piece):
                self._tokens += len(event.token_ids)
                if event.text or self._asked.logprobs or self._asked.token_ids:
                    yield self._chunk([self._piece(event)])
            elif isinstance(event, AnswerEnded):
                empty: JsonObject = {"delta": {}} if self._asked.chat else {"text": ""}
                ended = {"index": event.sample, **empty, "logprobs": None, "finish_reason": event.finish}
                yield self._chunk([ended])
        if self._asked.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._head, "choices": choices, **usage}

    def _choice(self, number: int, pieces: Sequence[Piece], finish: str) -> JsonObject:
        text = "".join(piece.text for piece in pieces)
        said: JsonObject = {"text": text}
        if self._asked.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": number, **said, **self._about(pieces), "finish_reason": finish}

    def _piece(self, piece: Piece) -> JsonObject:
        said: JsonObject = {"delta": {"content": piece.text}} if self._asked.chat else {"text": piece.text}
        return {"index": piece.sample, **said, **self._about([piece]), "finish_reason": None}

    def _about(self, pieces: Sequence[Piece]) -> JsonObject:
        """Returns the information on tokens that was asked for."""
        found: JsonObject = {"logprobs": None}
        tokens = [token for piece in pieces for token in piece.tokens]
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        if self._asked.logprobs and self._asked.chat:
            content = [
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            found = {"logprobs": {"content": content, "refusal": None}}
        elif self._asked.logprobs:
            starts = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
            found = {"logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None,
                                  "text_offset": starts}}  # fmt: skip
        if self._asked.token_ids:
            found["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return found

    def _prompt_ids(self) -> JsonObject:
        return {"prompt_token_ids": list(self._began.prompt_ids)} if self._asked.token_ids else {}

    def _usage(self) -> JsonObject:
        prompt = len(self._began.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }


def error_content(refused: NoAnswer) -> JsonObject:
    """Returns an error in OpenAI's format."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}
