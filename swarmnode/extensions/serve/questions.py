"""Questions to a policy and its answers, as a node and its clients exchange them.

api_routes.py, chat_command.py: answering_client.py -> [Question] -> answering_socket.py
                                                   <- [AnswerBegan, Piece, AnswerEnded | NoAnswer]
"""

from typing import Annotated, Literal

import msgspec

MOST_FRAME_BYTES = 4 << 20
MOST_SAMPLES = 8
MOST_STOPS = 4
LONGEST_STOP = 200
"""Most characters of a text that ends an answer."""


class ListModels(msgspec.Struct, frozen=True, tag="models"):
    """Asks for the names that `Question.model` may have."""


class Question(msgspec.Struct, frozen=True, tag="question", kw_only=True):
    """A prompt and the settings for its answer. The prompt is one of `messages`, `text` and `token_ids`."""

    model: str = "policy"
    """`policy` (its newest version), `policy@12`, `policy-1` (the second of several) or `base`."""
    messages: tuple[tuple[str, str], ...] = ()
    """Roles and contents of a conversation."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    samples: Annotated[int, msgspec.Meta(ge=1, le=MOST_SAMPLES)] = 1
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: Annotated[tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_STOP)], ...],
                    msgspec.Meta(max_length=MOST_STOPS)] = ()  # fmt: skip
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), lt=2**63 - MOST_SAMPLES)] | None = None
    stream: bool = False
    """True if the answer is wanted in pieces, as they arrive."""
    caller: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """The client that asks. Clients share the engine fairly."""


class Models(msgspec.Struct, frozen=True, tag="names"):
    """The models that can be asked, with the newest version of each policy first."""

    names: tuple[str, ...]


class AnswerBegan(msgspec.Struct, frozen=True, tag="began"):
    """A question is accepted, and this version will answer it to the end."""

    model: str
    prompt_ids: tuple[int, ...]


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """The next piece of one sample. Text is sent only when it is certain, so it may lag behind the tokens."""

    sample: int
    text: str
    tokens: tuple[str, ...]
    """The text of each token."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class AnswerEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The end of one sample."""

    sample: int
    finish: Literal["stop", "length"]


class NoAnswer(msgspec.Struct, frozen=True, tag="refused"):
    """The reason why a question is not answered, or not to the end."""

    status: int
    """The HTTP status for this reason."""
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None


Event = Models | AnswerBegan | Piece | AnswerEnded | NoAnswer


class QuestionRefused(Exception):
    """Raised with the reply to send instead of an answer."""

    def __init__(self, refused: NoAnswer) -> None:
        super().__init__(refused.message)
        self.refused = refused
