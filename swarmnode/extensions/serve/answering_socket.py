"""Offers a process's answering service on a socket that only the same user on this machine can use.

serve_command.py, chat_command.py: answering_client.py -> [AnsweringSocket] -> answering_service.py

Each connection is one question. If the client hangs up, or does not read for ten seconds, the answer ends.
"""

import logging
import os
import select
import shutil
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Self

import msgspec
import psutil

from swarmnode.extensions.page.bounded_server import CpuAllowance
from swarmnode.extensions.serve.answering_service import AnsweringService, AnswerUnderWay
from swarmnode.extensions.serve.questions import (
    MOST_FRAME_BYTES,
    AnswerEnded,
    Event,
    ListModels,
    NoAnswer,
    Question,
    QuestionRefused,
)
from swarmnode.machine.storage import replace_file
from swarmnode.network.daemon.daemon_process import make_socket_folder
from swarmnode.node.building.callers import CallerSource

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 96
PATIENCE_S = 10.0
"""Seconds for a client to send its question, and to read some of an answer that waits for it."""
CORE_SHARE = 0.03
"""Share of one core that answers may use on average during training, without the engine. Beyond it, questions
wait."""
LOOK_EVERY_S = 0.25
"""Seconds within which we notice that a client has hung up."""
LENGTH_BYTES = 4
NOTE = "service.json"


class SocketNote(msgspec.Struct, frozen=True):
    """The note with which others find the service of a running node."""

    pid: int
    socket: str


def find_service(state: Path) -> str | None:
    """Returns the socket of the node that runs here, or None if there is none."""
    try:
        note = msgspec.json.decode((state / NOTE).read_bytes(), type=SocketNote)
    except (OSError, msgspec.DecodeError):
        return None
    return note.socket if psutil.pid_exists(note.pid) and Path(note.socket).exists() else None


@contextmanager
def open_service(source: CallerSource) -> Generator[None]:
    """Opens a node's engine to this machine's user."""
    with AnsweringService(source) as service, AnsweringSocket(service) as opened:
        note = source.state / NOTE
        try:
            replace_file(note, msgspec.json.encode(SocketNote(os.getpid(), opened.path)), mode=0o600)
        except OSError as error:
            logger.warning("`swarmnode chat` will not find this node: cannot write %s (%s)", note, error)
        try:
            yield
        finally:
            if find_service(source.state) == opened.path:
                note.unlink(missing_ok=True)


class AnsweringSocket:
    """Takes questions for a service. `with AnsweringSocket(service) as opened:` listens at `opened.path`."""

    def __init__(self, service: AnsweringService) -> None:
        self._service = service
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._closing = False
        self._used_s = 0.0
        """CPU time of the threads that have served a client."""
        self._thread = threading.Thread(target=self._listen, name="service socket", daemon=True)

    def __enter__(self) -> Self:
        self._folder = make_socket_folder()
        self.path = str(self._folder / "service")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(MOST_CONNECTIONS)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        self._socket.shutdown(socket.SHUT_RDWR)  # Wakes up the thread in `accept`.
        self._thread.join()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        allowance = CpuAllowance(CORE_SHARE, time.monotonic(), self._all_used_s())
        while not self._closing:
            rest_s = allowance.rest_s(time.monotonic(), self._all_used_s())
            if rest_s and self._service.gives_way:
                time.sleep(rest_s)
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if self._places.acquire(blocking=False):
                threading.Thread(
                    target=self._serve, args=(client,), name="service client", daemon=True
                ).start()
            else:
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                client.settimeout(PATIENCE_S)
                self._answer(client)
        except (OSError, EOFError) as error:
            logger.debug("a chat client disconnected: %s", error)
        finally:
            self._used_s += time.thread_time()
            self._places.release()

    def _all_used_s(self) -> float:
        return self._used_s + self._service.used_s + time.thread_time()

    def _answer(self, client: socket.socket) -> None:
        try:
            asked = msgspec.msgpack.decode(_frame(client), type=ListModels | Question)
            if isinstance(asked, ListModels):
                _send(client, [self._service.models()])
                return
            answer = self._service.ask(asked)
        except msgspec.DecodeError as error:
            _send(client, [NoAnswer(400, str(error), "invalid_value")])
            return
        except QuestionRefused as refusal:
            _send(client, [refusal.refused])
            return
        try:
            self._pass_on(answer, client)
        finally:
            self._service.cancel(answer)

    def _pass_on(self, answer: AnswerUnderWay, client: socket.socket) -> None:
        left = answer.question.samples
        while left and not self._closing:
            events: list[Event] = []
            try:
                events.append(answer.events.get(timeout=LOOK_EVERY_S))
                while not answer.events.empty():
                    events.append(answer.events.get())
            except Empty:
                if _has_hung_up(client):
                    return
                continue
            _send(client, events)
            if any(isinstance(event, NoAnswer) for event in events):
                return
            left -= sum(isinstance(event, AnswerEnded) for event in events)


def _has_hung_up(client: socket.socket) -> bool:
    # On a socket with a timeout, `recv` waits for that long whatever its flags say.
    poll = select.poll()
    poll.register(client, select.POLLIN)
    return bool(poll.poll(0)) and not client.recv(1, socket.MSG_PEEK)


def _frame(client: socket.socket) -> bytes:
    with client.makefile("rb") as sent:
        length = int.from_bytes(sent.read(LENGTH_BYTES), "big")
        content = sent.read(length) if length <= MOST_FRAME_BYTES else b""
    if len(content) < length:
        raise EOFError(f"hung up, or a frame of {length} bytes")
    return content


def _send(client: socket.socket, events: list[Event]) -> None:
    content = msgspec.msgpack.encode(events)
    client.sendall(len(content).to_bytes(LENGTH_BYTES, "big") + content)
