"""A conversation in the terminal: what is a command, what is asked, and what is refused at once."""

import io
import os
from pathlib import Path

import msgspec
import pytest

from swarmnode.errors import SwarmnodeError
from swarmnode.extensions.serve.answering_socket import NOTE, SocketNote
from swarmnode.extensions.serve.chat_command import USE, _converse, _of, chat
from swarmnode.extensions.serve.questions import Question
from swarmnode.extensions.serve.standing_alone import Answering
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from tests.served import repeats, served


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *lines: str) -> list[str]:
    """What a conversation of these lines prints, with a policy that repeats all that was said."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    with served(repeats()) as at:
        _converse(Answering(lambda: at.path, "a test"), Question(stream=True))
    return capsys.readouterr().out.splitlines()


def test_a_model_that_is_none_is_refused_at_once_and_the_one_before_goes_on(monkeypatch, capsys) -> None:
    lines = said(monkeypatch, capsys, "/model foo", "/model", "hi", "/new", "/model base", "ho")
    assert lines[:2] == [
        f"there is no model {name!r}: choose one of policy, policy@0, base" for name in ("foo", "")
    ]
    assert lines[2:] == ["[policy@0] hi", "[base] ho"]


def test_a_command_is_never_asked_and_two_slashes_begin_a_text_with_one(monkeypatch, capsys) -> None:
    lines = said(monkeypatch, capsys, "/help", "/nwe", "//etc is a folder")
    assert lines == [USE, f"there is no command /nwe: {USE}", "[policy@0] /etc is a folder"]


def test_what_was_refused_is_no_part_of_the_conversation(monkeypatch, capsys) -> None:
    lines = said(monkeypatch, capsys, "x" * 5000, "hi")
    assert "too long" in lines[0] and lines[1:] == ["[policy@0] hi"]


def test_a_conversation_with_a_model_that_is_none_does_not_begin() -> None:
    with served(repeats()) as at:
        found = Answering(lambda: at.path, "a test")
        assert _of(found, Question(), "policy@0").model == "policy@0"
        with pytest.raises(SwarmnodeError, match="no model 'gpt-4'"):
            _of(found, Question(), "gpt-4")
    with pytest.raises(SwarmnodeError, match="does not answer"):
        _of(found, Question(), "base")


def test_the_policy_that_is_named_by_its_number_is_asked_of_the_running_node(tmp_path: Path, capsys) -> None:
    paths = resolve_paths(tmp_path)
    write_running(paths.policy(1).running, RunningNode(os.getpid(), "me", "127.0.0.1", 0))
    with served(repeats()) as at:
        paths.state.mkdir(parents=True, exist_ok=True)
        (paths.state / NOTE).write_bytes(msgspec.json.encode(SocketNote(os.getpid(), at.path)))
        with pytest.raises(SwarmnodeError, match="'policy-1'"):  # This one has one policy, without a number.
            chat("hi", policy=1, home=tmp_path)
        chat("hi", policy=1, ask_for="policy", home=tmp_path)
    assert capsys.readouterr().out.strip() == "[policy@0] hi"
