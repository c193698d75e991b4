"""A service over a scripted engine, and the endpoints on it, for tests of those who ask."""

import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from swarmnode.chat import Prompt, messages_of
from swarmnode.extensions.serve.answering_service import AnsweringService
from swarmnode.extensions.serve.answering_socket import AnsweringSocket
from swarmnode.extensions.serve.serve_command import api_server
from swarmnode.node.building.callers import CallerSource
from swarmnode.rollout.engine import Engine, Request
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.shared_engine import SharedEngine, SharedMember
from swarmnode.testing.fake_engine import FakeEngine

END = 0


class Letters:
    """A renderer whose tokens are characters."""

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return self.text_ids("\n".join(message["content"] for message in messages_of(prompt)))

    def text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != END)


def says(text: str, **limits: int) -> FakeEngine:
    """An engine that answers everything with this text."""
    return FakeEngine(lambda request: (*map(ord, text), END), **limits)


def repeats() -> FakeEngine:
    """An engine that answers with the question."""

    def answer(request: Request) -> Sequence[int]:
        return (*request.prompt_ids, END)

    return FakeEngine(answer, max_length=200)


@dataclass(frozen=True)
class Served:
    """A policy in training, and the service beside it."""

    policy: SharedMember
    service: AnsweringService
    shared: SharedEngine
    path: str


@contextmanager
def served(engine: Engine, state: Path = Path("/nowhere")) -> Iterator[Served]:
    """Runs a service on the only policy of an engine."""
    shared = SharedEngine(engine, members=1)
    policy = shared.member("policy-0")
    source = CallerSource(shared, ["policy-0"], cast(Renderer, Letters()), 16, state)
    with AnsweringService(source) as service, AnsweringSocket(service) as opened:
        yield Served(policy, service, shared, opened.path)


@contextmanager
def endpoints(path: str | None, *, key: str = "") -> Generator[str]:
    """Runs the endpoints on a service; yields their address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = api_server(lambda: path, "127.0.0.1", key)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()
