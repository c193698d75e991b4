"""What a task's code prints, line by line, made fit for a log.

worker.py, stdout and stderr -> [pass_on] -> log, or the terminal of `swarmnode task check`
"""

import time
from collections.abc import Callable
from io import BufferedReader

LINES_PER_S = 20
"""More would push everything else out of sight; what is left out is counted."""

MAX_LINE_BYTES = 2000

FLOOD_BYTES = 1 << 20
"""Read at once of what is left out: a task that prints without end must not take our interpreter."""


def pass_on(output: BufferedReader, printed: Callable[[str], None]) -> None:
    """Hand over each line until the stream ends. Runs in a thread of its own."""
    second, lines = 0, 0
    with output:
        while line := output.read1(FLOOD_BYTES) if lines > LINES_PER_S else output.readline(MAX_LINE_BYTES):
            now = int(time.monotonic())
            second, lines = (second, lines + 1) if now == second else (now, 1)
            if lines <= LINES_PER_S and (text := readable(line[:MAX_LINE_BYTES])):
                printed(text)
            elif lines == LINES_PER_S + 1:
                printed("(more than that is left out)")


def readable(line: bytes) -> str:
    """The line without what moves a cursor or rings a bell.

    >>> readable(b"right: 4\\x1b[2J\\n")
    'right: 4[2J'
    """
    return "".join(c for c in line.decode(errors="replace") if c.isprintable() or c == "\t").rstrip()
