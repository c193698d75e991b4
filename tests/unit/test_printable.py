"""Text of others on its way to a person, and the real log on a screen and in a file."""

import logging
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cli import app
from swarmnode.errors import EngineError
from swarmnode.node.showing.screen import Screen
from swarmnode.printable import MAX_LINE_CHARS, printable, printable_lines
from tests.full_disk import full_disk

STRANGERS = "gone\x1b[2J\x1b]0;owned\x07\r\n12:00:00 all is well\u202e\x9b31m"
HARMLESS = r"gone\x1b[2J\x1b]0;owned\x07\r\n12:00:00 all is well\u202e\x9b31m"

log = logging.getLogger("swarmnode.test")


@given(st.text(st.characters(codec=None)))
def test_nothing_that_steers_a_terminal_comes_through(text: str):
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= MAX_LINE_CHARS * len("\\U0010ffff") + 40
    shown.encode()


@given(st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=MAX_LINE_CHARS))
def test_plain_text_stays_as_it_is(text: str):
    assert printable(text) == text


def test_names_in_other_scripts_stay_as_they_are():
    assert printable("Grüße 世界 мир") == "Grüße 世界 мир"


def test_what_is_too_long_is_cut_and_says_so():
    assert printable("abcdef", max_chars=2) == "ab... (4 more characters)"
    assert len(printable_lines("a\n" * 1000).split("\n")) == 100


def test_a_line_of_the_log_stays_one_line_on_the_screen_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with Screen(tmp_path / "node.log", terminal=False):
        log.warning("member %s", STRANGERS)
    lines = (tmp_path / "node.log").read_text(), capsys.readouterr().err
    for written in lines:
        assert HARMLESS in written
        assert written.count("\n") == 1 and "\x1b" not in written and "\r" not in written


def test_a_log_file_on_a_full_disk_is_told_once_and_the_story_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with full_disk(), Screen(tmp_path / "node.log", terminal=False):
        log.info("first")
        log.info("second")
    first, told, second = (line.partition(" ")[2] for line in capsys.readouterr().err.splitlines())
    assert (first, second) == ("first", "second")
    assert told.startswith(f"cannot write {tmp_path / 'node.log'} (File too large)")


def test_a_traceback_shows_its_lines_and_none_of_them_looks_like_the_log(tmp_path: Path):
    with Screen(tmp_path / "node.log", terminal=False):
        try:
            raise EngineError(STRANGERS)
        except EngineError:
            log.exception("a request failed")
    first, *rest = (tmp_path / "node.log").read_text().split("\n")
    assert first.endswith("a request failed")
    assert rest.pop() == "" and len(rest) >= 3
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_an_error_that_ends_a_command_is_shown_on_its_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(**_: object) -> None:
        raise EngineError(STRANGERS, hint=STRANGERS)

    monkeypatch.setattr(app, "app", fail)
    monkeypatch.setattr(sys, "argv", ["swarmnode"])
    with pytest.raises(SystemExit):
        app.main()
    assert capsys.readouterr().err == f"error: {HARMLESS}\n  next: {HARMLESS}\n"
