"""The service's socket and its client: this machine's user only, a question a connection, all bounded."""

import asyncio
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import ExitStack, aclosing, suppress
from pathlib import Path
from threading import Event
from typing import cast

import msgspec
import pytest

from swarmnode.extensions.serve import answering_client, answering_socket
from swarmnode.extensions.serve.answering_socket import MOST_CONNECTIONS, find_service, open_service
from swarmnode.extensions.serve.questions import AnswerEnded, Piece, Question, QuestionRefused
from swarmnode.extensions.serve.questions import Event as AnswerEvent
from swarmnode.node.building.callers import CallerSource
from swarmnode.rollout.engine import Output
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.shared_engine import SharedEngine
from swarmnode.testing.fake_engine import FakeEngine
from tests.served import Letters, Served, says, served
from tests.unit.rollout.test_shared_engine import until


async def events_of(path: str | None, question: Question) -> list[AnswerEvent]:
    async with aclosing(answering_client.ask(path, question)) as events:
        return [event async for event in events]


def connected(at: Served) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(at.path)
    client.settimeout(20)
    return client


async def test_a_question_is_answered_over_the_socket() -> None:
    with served(says("hello")) as at:
        events = await events_of(at.path, Question(text="hi", stream=True))
        assert await answering_client.models(at.path) == ("policy", "policy@0", "base")
    assert "".join(event.text for event in events if isinstance(event, Piece)) == "hello"


async def test_a_refusal_travels() -> None:
    with served(says("hello")) as at, pytest.raises(QuestionRefused, match="gpt-4"):
        await events_of(at.path, Question(model="gpt-4", text="hi"))
    for gone in (at.path, None):
        with pytest.raises(QuestionRefused, match="does not answer"):
            await events_of(gone, Question(text="hi"))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8,
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05" + msgspec.msgpack.encode({"a": 1}),
    ],
)
async def test_nonsense_ends_its_own_connection(content: bytes) -> None:
    with served(says("hello")) as at:
        with connected(at) as client:
            client.sendall(content)
            client.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while client.recv(1000):
                    pass
        assert len(await events_of(at.path, Question(text="hi"))) == 3


@pytest.mark.parametrize("trains", [True, False])
async def test_questions_wait_while_answers_use_more_than_their_share_of_a_core_beside_training(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(answering_socket.CpuAllowance, "rest_s", lambda *_: 0.25)
    monkeypatch.setattr(answering_socket.time, "sleep", rests.append)
    monkeypatch.setattr(SharedEngine, "training_is_first", trains)
    with served(says("hello")) as at:
        # The listener rests before it accepts, so this has happened when the answer is here.
        await events_of(at.path, Question(text="hi"))
    assert (0.25 in rests) == trains


async def test_whoever_hangs_up_is_no_longer_answered() -> None:
    class Stuck(FakeEngine):
        def step(self) -> Sequence[Output]:
            return ()

    engine = Stuck(lambda request: (1,))
    with served(engine) as at:
        async with aclosing(answering_client.ask(at.path, Question(text="hi"))) as events:
            await anext(events)
            assert at.shared.rows <= 1

        def is_forgotten() -> bool:
            return not at.service._samples and engine.stats().running + engine.stats().waiting == 0

        # Our loop must go on meanwhile: it is what closes the connection.
        await asyncio.to_thread(until, is_forgotten)


async def test_an_answer_that_lets_its_client_wait_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_for, looks = Event(), answering_socket._has_hung_up

    def look(client: socket.socket) -> bool:
        looked_for.set()
        return looks(client)

    class Slow(FakeEngine):
        def step(self) -> Sequence[Output]:
            assert looked_for.wait(30)
            return super().step()

    monkeypatch.setattr(answering_socket, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(answering_socket, "_has_hung_up", look)
    with served(Slow(lambda request: (1, 2, 3))) as at:
        events = await events_of(at.path, Question(token_ids=(7,), max_tokens=3))
    assert isinstance(events[-1], AnswerEnded)


async def test_connections_are_bounded_and_the_next_one_is_served_again() -> None:
    with served(says("hello")) as at:
        with ExitStack() as stack:
            held = [stack.enter_context(connected(at)) for _ in range(MOST_CONNECTIONS + 8)]
            assert _is_turned_away(held[-1])
        for _ in range(1000):
            with suppress(QuestionRefused):
                assert len(await events_of(at.path, Question(text="hi"))) == 3
                return
        raise AssertionError("nobody is served any more")


def _is_turned_away(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_a_running_service_is_found_by_its_note_and_only_its_user_may_enter(tmp_path: Path) -> None:
    shared = SharedEngine(says("hello"), members=1)
    shared.member("policy-0")
    source = CallerSource(shared, ["policy-0"], cast(Renderer, Letters()), 16, tmp_path)
    assert find_service(tmp_path) is None
    with open_service(source):
        path = find_service(tmp_path)
        assert path is not None
        assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(tmp_path / "service.json").st_mode) == 0o600
    assert find_service(tmp_path) is None and not Path(path).parent.exists()
    (tmp_path / "service.json").write_text("{")
    assert find_service(tmp_path) is None
