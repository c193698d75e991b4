"""What a node and the process that runs a task's code say to each other, and how it is framed.

process.py (the node) <- [messages] -> worker.py (the task's code)

Each message is a length in four bytes and msgpack. Both ends are ours and on one machine; nothing of it ever
comes from or goes to the network.
"""

import socket
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from swarmnode.types import Message, Scores

MAX_FRAME_BYTES = 1 << 28
"""A group of 64 completions of the longest kind, or a few hundred examples, is far below."""

READ_BYTES = 1 << 16


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first request: run this task's code. `text`: of its file; None: it is not that of one file.
    `unconfined`: what its rewards run may run without a sandbox, where there is none. `memory_mb`: most that
    the process may take. `home`: where the node lives, if not where it would by itself. `strangers`: it
    judges what others sent (worker.py)."""

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
    """An example. `columns` are those that can be written down; the process that judges has all of them."""

    prompt: str
    columns: dict[str, Any]
    conversational: bool


class Score(msgspec.Struct, frozen=True, tag=True):
    """Judge completions of an example. The process draws it itself; `prompt` tells whether it is the one.
    `given`: the example where it stands in no draw, as a demonstrated one does."""

    seed: int
    index: int
    prompt: str
    completions: tuple[str, ...]
    given: DrawnExample | None = None


class Observe(msgspec.Struct, frozen=True, tag=True):
    """What does the environment answer to the last of these turns? Each is what was said, and the role and
    content of what was observed."""

    seed: int
    index: int
    prompt: str
    turns: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Draw everything anew and give one digest of it."""


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
    """Where in the task's code."""
    lost: bool = False


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What the process has loaded. `each_alone`: its rewards look at each answer by itself."""

    name: str
    version: str
    exchangeable: bool = True
    judges_groups: bool = False
    levels: int = 1
    evaluation_size: int = 0
    most_turns: int | None = None
    """None: it is no environment."""
    each_alone: bool = False


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """Answers `Draw`: as many rows as there are, and why there are no more where drawing them failed."""

    rows: tuple[DrawnExample, ...]
    failure: Failure | None


class Scored(msgspec.Struct, frozen=True, tag=True):
    scores: tuple[Scores, ...]


class Observed(msgspec.Struct, frozen=True, tag=True):
    """None: the episode is over. `lost`: it cannot be gone on with, and why."""

    messages: tuple[Message, ...] | None
    lost: str = ""


class OtherExample(msgspec.Struct, frozen=True, tag=True):
    """Answers `Score` and `Observe`: this process draws another example there."""


class Digested(msgspec.Struct, frozen=True, tag=True):
    """What is drawn, in short. `no_data`: columns that cannot be written down, and their types."""

    digest: str
    no_data: dict[str, str] = {}


Reply = Failure | Loaded | Drawn | Scored | Observed | OtherExample | Digested


def frame(message: Order | Reply) -> bytes:
    """A message as bytes to send."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


@dataclass(slots=True)
class MessageReader:
    """Whole messages out of a socket. What has come of one before a deadline is kept for the next attempt."""

    channel: socket.socket
    _bytes: bytearray = field(default_factory=bytearray)

    def read(self, deadline: float | None) -> bytes | None:
        """The next message; None: the other end is gone. Raises TimeoutError when it is `deadline`
        (time.monotonic)."""
        while (body := self._whole()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self.channel.settimeout(left)
            try:
                received = self.channel.recv(READ_BYTES)
            except ConnectionError:
                return None
            if not received:
                return None
            self._bytes += received
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
