"""Notices on a desktop and to a webhook on loopback, and what may not be in them."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from swarmnode.errors import ConfigError, StorageError
from swarmnode.extensions.limits import notices
from swarmnode.extensions.limits.machine_guard import guard_machine
from swarmnode.extensions.limits.notices import send_notice
from swarmnode.extensions.limits.trouble_watch import BETWEEN_S, TroubleWatch, ended_by, trouble_of
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.at_work import PATIENCE_S
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.node.showing.node_status import NodeStatus, Phase, Saved
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from tests.shown_page import STATUS

SECRET_PATH = "/hook/4f3c-secret"
BEGAN_S = STATUS.phase.since
STUCK_S = BEGAN_S + PATIENCE_S + 60


class Hook:
    """A webhook: what came, and how it answers."""

    def __init__(self) -> None:
        self.came: list[tuple[str, dict[str, str]]] = []
        self.status = 200
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                hook.came.append((self.path, json.loads(content)))
                self.send_response(hook.status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}{SECRET_PATH}"


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def test_a_webhook_gets_the_words_and_nothing_else(hook: Hook) -> None:
    send_notice(hook.url, "calm-blue-otter: stuck")
    assert hook.came == [(SECRET_PATH, {"text": "calm-blue-otter: stuck"})]


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_a_webhook_that_refuses_or_sends_elsewhere_is_asked_once(
    hook: Hook, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    hook.status = status
    send_notice(hook.url, "words")
    assert len(hook.came) == 1
    assert f"the webhook answered {status}" in caplog.text and SECRET_PATH not in caplog.text


def test_a_webhook_that_is_not_there_is_told_of_without_its_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    send_notice(f"http://127.0.0.1:1{SECRET_PATH}", "words")
    assert "the webhook cannot be reached" in caplog.text and SECRET_PATH not in caplog.text


def test_a_webhook_that_answers_in_drops_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.5)
    left = threading.Event()

    def answer_in_drops(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            while not left.wait(0.01):
                caller.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_in_drops, args=(listener,))
        thread.start()
        send_notice(f"http://127.0.0.1:{listener.getsockname()[1]}{SECRET_PATH}", "words")
        left.set()
        thread.join()
    assert "the webhook cannot be reached" in caplog.text and SECRET_PATH not in caplog.text


def test_a_host_whose_name_is_none_does_not_end_the_looks(caplog: pytest.LogCaptureFixture) -> None:
    send_notice(f"http://{'a' * 80}/x", "words")
    assert "the webhook cannot be reached" in caplog.text


def test_a_notice_on_the_desktop_is_no_option_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    send_notice("desktop", "words")
    assert "there is no notify-send" in caplog.text
    program = tmp_path / "notify-send"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\n')
    program.chmod(0o755)
    send_notice("desktop", "--help")
    assert (tmp_path / "told").read_text() == "--app-name swarmnode -- swarmnode --help\n"
    program.write_text("#!/bin/sh\nexit 3\n")
    send_notice("desktop", "words")
    assert "notify-send ended with 3" in caplog.text


def test_nobody_is_told_where_nobody_is_named(caplog: pytest.LogCaptureFixture) -> None:
    send_notice("", "words")
    assert caplog.text == ""


@pytest.mark.parametrize(
    "to",
    [
        "phone", "file:///etc/passwd", "ftp://host/x", "http://", "https:x", "http://[u:secret/x",
        "https://u:secret@host/x", "https://host:99999/x", "https://host:secret/x", "https://host/\u00f6",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_being_shown(to: str) -> None:
    with pytest.raises(ConfigError, match="desktop, or an ASCII http") as caught:
        load_config(assignments=[f"node.notify={to}"], environ={})
    assert to not in str(caught.value)
    assert "secret" not in repr(Config.model_validate({"node": {"notify": f"https://host{SECRET_PATH}"}}))


def test_a_stage_that_is_stuck_is_named_with_its_beginning() -> None:
    assert trouble_of(STATUS, BEGAN_S + 10) == ""
    words = trouble_of(STATUS, STUCK_S)
    assert words.startswith("stuck: no progress for 31 min: generating, 32 groups of 8, since ")
    paused = msgspec.structs.replace(STATUS, phase=Phase("paused", BEGAN_S, "on battery"))
    assert trouble_of(paused, STUCK_S) == ""


def test_trouble_is_told_of_when_it_begins_and_not_more_often_than_every_ten_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    told: list[str] = []
    now, status = [BEGAN_S], [STATUS]
    watch = TroubleWatch(lambda: status[0], told.append, lambda: now[0])

    def looks(seen: NodeStatus, at_s: float) -> int:
        status[0], now[0] = seen, at_s
        watch.look()
        return len(told)

    full = msgspec.structs.replace(STATUS, checkpoint=Saved(10, 1000.0, "the disk /secret/place is full"))
    assert looks(STATUS, BEGAN_S + 1) == 0
    assert looks(full, BEGAN_S + 2) == looks(full, BEGAN_S + 3) == 1
    assert looks(STATUS, BEGAN_S + 4) == looks(full, BEGAN_S + 5) == 1
    assert looks(STATUS, BEGAN_S + 6) == 1 and looks(full, BEGAN_S + 2 + BETWEEN_S) == 2
    assert told[0] == "calm-blue-otter: its last checkpoint could not be written"
    assert len(caplog.records) == 3, "the log has each of them"


def test_the_end_by_an_error_is_told_without_its_text(hook: Hook, tmp_path: Path) -> None:
    config = Config.model_validate({"node": {"notify": hook.url}})
    source = NodeSource(lambda: STATUS, RunControl(lambda: None), config, {}, resolve_paths(tmp_path))
    error = ExceptionGroup("tasks", [StorageError("cannot write /secret/place", hint="")])
    with pytest.raises(ExceptionGroup), guard_machine(source):
        raise error
    words = ended_by(error, STATUS)
    assert words == "calm-blue-otter ended by StorageError in round 13, generating: see its log"
    assert hook.came == [(SECRET_PATH, {"text": words})]
