"""Text while it comes: whole characters, and nothing behind a stop text."""

from collections.abc import Sequence

import pytest

from swarmnode.extensions.serve.text_stream import TextStream


def by_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def told(text: str, stops: Sequence[str] = ()) -> tuple[str, bool]:
    stream = TextStream(by_bytes, stops)
    parts = [stream.add([byte])[1] for byte in text.encode()]
    return "".join(parts) + stream.end(), stream.stopped


@pytest.mark.parametrize("text", ["", "plain", "äöü €", "日本語", "🙂 and 🙂"])
def test_all_text_comes_and_no_half_character(text: str) -> None:
    assert told(text) == (text, False)
    stream = TextStream(by_bytes, ())
    assert all("\ufffd" not in stream.add([byte])[1] for byte in text.encode())


def test_bytes_that_are_no_character_come_as_what_stands_for_them() -> None:
    stream = TextStream(by_bytes, ())
    parts = [stream.add([byte])[1] for byte in b"a\xff\xff\xff\xff\xffb"]
    assert "".join(parts) + stream.end() == "a" + "\ufffd" * 5 + "b"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], ("one ", True)),
        ("one EN two", ["END"], ("one EN two", False)),
        ("one EN", ["END"], ("one EN", False)),
        ("aab", ["ab", "b"], ("a", True)),
        ("END", ["END"], ("", True)),
        ("aaaaab", ["aab"], ("aaa", True)),
    ],
)
def test_text_ends_before_a_stop_text_whatever_it_is_cut_into(
    text: str, stops: list[str], expected: tuple[str, bool]
) -> None:
    assert told(text, stops) == expected


def test_what_may_be_a_stop_text_is_not_told_before_it_is_certain() -> None:
    stream = TextStream(by_bytes, ["END"])
    assert stream.add(b"aE")[1] == "a"
    assert stream.add(b"N")[1] == ""
    assert stream.add(b"x")[1] == "ENx"
