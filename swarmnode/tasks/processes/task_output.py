"""The printed lines of a task's code, made safe for a log."""

import time
from collections.abc import Callable
from io import BufferedReader

LINES_PER_S = 20
"""Most lines per second that are shown; the others are counted."""

MAX_LINE_BYTES = 2000

FLOOD_BYTES = 1 << 20
"""Bytes read at once while lines are left out: a task that prints without end must not occupy our
interpreter."""


def pass_on(output: BufferedReader, printed: Callable[[str], None]) -> None:
    """Passes on each line until the stream ends. Runs in a thread of its own."""
    second, lines = 0, 0
    with output:
        while line := output.read1(FLOOD_BYTES) if lines > LINES_PER_S else output.readline(MAX_LINE_BYTES):
            now = int(time.monotonic())
            second, lines = (second, lines + 1) if now == second else (now, 1)
            if lines <= LINES_PER_S and (text := readable(line[:MAX_LINE_BYTES])):
                printed(text)
            elif lines == LINES_PER_S + 1:
                printed("(further output left out)")


def readable(line: bytes) -> str:
    """Returns a line without control characters, which could move a cursor or ring a bell.

    >>> readable(b"right: 4\\x1b[2J\\n")
    'right: 4[2J'
    """
    return "".join(c for c in line.decode(errors="replace") if c.isprintable() or c == "\t").rstrip()
