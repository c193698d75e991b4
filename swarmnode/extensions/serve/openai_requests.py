"""Requests as OpenAI's clients write them, checked completely before anything is asked.

api_routes.py (bytes) -> [read_chat, read_completion] -> Asked -> answering_client.py

A field that would change the answer but is not supported here is refused by name, unless it has the value
that changes nothing.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.extensions.serve.questions import (
    LONGEST_STOP,
    MOST_SAMPLES,
    MOST_STOPS,
    NoAnswer,
    Question,
    QuestionRefused,
)

MOST_MESSAGES = 1000

T = TypeVar("T")
Zero = Annotated[float, Meta(ge=0, le=0)] | None
Empty = Annotated[list[msgspec.Raw], Meta(max_length=0)] | None
EmptyMap = Annotated[dict[str, msgspec.Raw], Meta(max_length=0)] | None
StopText = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 20)] | None
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints accept."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), lt=2**63 - MOST_SAMPLES)] | None = None
    user: str | None = None
    """Neither checked nor stored."""
    return_token_ids: bool | None = False
    """An extension of vLLM: the answer also has `prompt_token_ids` and `token_ids`."""
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: EmptyMap = None

    def question(self, **prompt: Any) -> Question:
        return Question(
            model=self.model,
            samples=self.n or 1,
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=self.seed,
            stream=bool(self.stream),
            **prompt,
        )


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart]
    name: None = None
    tool_calls: Empty = None
    refusal: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class PlainFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]


class ChatRequest(_Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Tokens = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    tools: Empty = None
    response_format: PlainFormat | None = None
    store: Literal[False] | None = None


class CompletionRequest(_Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId], Meta(min_length=1)]
    """A text, a list with one text, or token ids."""
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the wanted form of the answer."""

    question: Question
    chat: bool
    logprobs: bool
    include_usage: bool
    token_ids: bool


def read_chat(content: bytes) -> Asked:
    """Returns a request for a chat completion. Raises QuestionRefused."""
    request = _read(content, ChatRequest)
    question = request.question(messages=tuple((one.role, one.text) for one in request.messages))
    if request.max_completion_tokens is not None:
        question = msgspec.structs.replace(question, max_tokens=request.max_completion_tokens)
    return _asked(request, question, chat=True, logprobs=bool(request.logprobs))


def read_completion(content: bytes) -> Asked:
    """Returns a request for a completion of a text or of token ids. Raises QuestionRefused."""
    request = _read(content, CompletionRequest)
    if request.logprobs:
        why = "logprobs are only available for sampled tokens: ask for logprobs=0"
        raise QuestionRefused(NoAnswer(400, why, "unsupported_value", "logprobs"))
    match request.prompt:
        case (str() as text) | [str() as text]:
            question = request.question(text=text)
        case several:
            ids = tuple(one for one in several if isinstance(one, int))
            if len(ids) < len(several):
                raise QuestionRefused(
                    NoAnswer(400, "a request may have only one prompt", "invalid_value", "prompt")
                )
            question = request.question(token_ids=ids)
    return _asked(request, question, chat=False, logprobs=request.logprobs is not None)


def _asked(
    request: ChatRequest | CompletionRequest, question: Question, *, chat: bool, logprobs: bool
) -> Asked:
    if request.stream_options is not None and not request.stream:
        raise QuestionRefused(NoAnswer(400, "stream_options needs stream", "invalid_value", "stream_options"))
    usage = request.stream_options is not None and request.stream_options.include_usage
    return Asked(question, chat, logprobs, usage, bool(request.return_token_ids))


def _read(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        # msgspec's message contains the name of the field, as `$.name` or as an unknown field.
        found = re.search(r"\$\.(\w+)|field `(\w+)`", str(error))
        param = found and (found[1] or found[2])
        code = "invalid_value" if param else "invalid_json"
        raise QuestionRefused(NoAnswer(400, f"invalid request: {error}", code, param)) from error
