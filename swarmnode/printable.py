"""One rule for text that is not ours on its way to a person: nothing in it may steer a terminal.

peers' words in log lines, errors, a NodeStatus -> [printable] -> screen.py, panel.py, cli/app.py

It is applied where text leaves us, to whole lines and whole records, because there the list of exits is short
and the list of what a peer may say is not.
"""

MAX_LINE_CHARS = 2000
"""Longer than any line of ours, and short enough that a thousand of them are no trouble."""


def printable(text: str, *, max_chars: int = MAX_LINE_CHARS) -> str:
    r"""The text on one line, without control characters, changes of direction or lone surrogates.

    What cannot be shown is written as Python would escape it, what is too long is cut and says so.

    >>> printable("\x1b[2J\nready")
    '\\x1b[2J\\nready'
    """
    surplus = len(text) - max_chars
    if surplus > 0:
        text = f"{text[:max_chars]}... ({surplus} more characters)"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str, *, max_lines: int = 100) -> str:
    """Several lines, such as a traceback, each of them printable; the last ones where there are too many.

    >>> printable_lines("one\\ntwo\\x07")
    'one\\ntwo\\\\x07'
    """
    return "\n".join(printable(line) for line in text.split("\n")[-max_lines:])
