"""The messages between a node and the process that runs a task's code, and their framing."""

import socket
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from swarmnode.chat import Message, Said, Turn
from swarmnode.errors import TaskError
from swarmnode.types import Scores

MAX_FRAME_BYTES = 1 << 28
"""Longest message in bytes, far above a group of 64 of the longest completions or a few hundred examples."""

READ_BYTES = 1 << 16


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first request: run this task's code. `text`: the content of its file; None: it is not a single
    file. `unconfined`: programs of its rewards may run without a sandbox if there is none. `memory_mb`: most
    memory of the process. `home`: the node's folder, if not the default. `strangers`: the process judges
    answers of peers (worker.py)."""

    spec: str
    text: str | None
    unconfined: bool = False
    memory_mb: int | None = None
    home: str | None = None
    strangers: bool = False


class Draw(msgspec.Struct, frozen=True, tag=True):
    """Examples [start, start + count) of a seed."""

    seed: int
    start: int
    count: int


class DrawnExample(msgspec.Struct, frozen=True):
    """An example, its prompt as chat.py writes it. `columns`: those that can be serialized; the process that
    judges has all of them."""

    prompt: str
    columns: dict[str, Any]
    conversational: bool


class Score(msgspec.Struct, frozen=True, tag=True):
    """Judge completions of an example. The process draws it itself; `prompt` shows whether it is the same
    one. `given`: the example if it belongs to no draw, such as a demonstrated one."""

    seed: int
    index: int
    prompt: str
    completions: tuple[Said, ...]
    given: DrawnExample | None = None


class Observe(msgspec.Struct, frozen=True, tag=True):
    """Ask the environment to answer the last of these turns."""

    seed: int
    index: int
    prompt: str
    turns: tuple[Turn, ...]


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Draw everything anew and return one digest of it."""


Request = Load | Draw | Score | Observe | Digest


class Order(msgspec.Struct, frozen=True):
    """A request with the seconds after which the process ends itself. None: never."""

    request: Request
    timeout_s: float | None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A TaskError; or JudgementLost, after which the process is of no more use."""

    message: str
    hint: str
    traceback: str = ""
    """Traceback within the task's code."""
    lost: bool = False


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The task that the process has loaded."""

    name: str
    version: str
    exchangeable: bool = True
    judges_groups: bool = False
    levels: int = 1
    evaluation_size: int = 0
    most_turns: int | None = None
    """Most turns of the policy. None: the task is not an environment."""
    demonstrations: Any = {}
    """Demonstrations of the task. A function of the example is not among them: its results are a column."""


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """Answers `Draw`: as many rows as there are, and the reason if drawing more failed."""

    rows: tuple[DrawnExample, ...]
    failure: Failure | None


class Scored(msgspec.Struct, frozen=True, tag=True):
    scores: tuple[Scores, ...]


class Observed(msgspec.Struct, frozen=True, tag=True):
    """The environment's answer. `messages` None: the episode is over. `lost`: the reason why it cannot
    continue."""

    messages: tuple[Message, ...] | None
    lost: str = ""


class OtherExample(msgspec.Struct, frozen=True, tag=True):
    """Answers `Score` and `Observe`: this process draws another example there."""


class Digested(msgspec.Struct, frozen=True, tag=True):
    """A digest of everything drawn. `no_data`: columns that cannot be serialized, with their types."""

    digest: str
    no_data: dict[str, str] = {}


Reply = Failure | Loaded | Drawn | Scored | Observed | OtherExample | Digested


def frame(message: Order | Reply) -> bytes:
    """Returns a message framed as bytes to send. Raises TaskError if it is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise TaskError(
            f"a message between a node and its task is longer than {MAX_FRAME_BYTES} bytes",
            hint="leave out large columns",
        )
    return len(body).to_bytes(4, "big") + body


@dataclass(slots=True)
class MessageReader:
    """Reads whole messages from a socket. It keeps a part that arrived before a deadline for the next one."""

    channel: socket.socket
    _bytes: bytearray = field(default_factory=bytearray)

    def read(self, deadline: float | None) -> bytes | None:
        """Returns the next message. None: the other end is gone, or sends something else. Raises TimeoutError
        at `deadline` (time.monotonic)."""
        try:
            while (body := self._whole()) is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self.channel.settimeout(left)
                received = self.channel.recv(READ_BYTES)
                if not received:
                    return None
                self._bytes += received
        except ConnectionError:
            return None
        return body

    def _whole(self) -> bytes | None:
        if len(self._bytes) < 4:
            return None
        end = 4 + int.from_bytes(self._bytes[:4], "big")
        if end > MAX_FRAME_BYTES:
            raise ConnectionError("a message between a node and its task is too large")
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[4:end])
        del self._bytes[:end]
        return body
