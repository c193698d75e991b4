"""One rule for foreign text that people will read: nothing in it may control a terminal."""

MAX_LINE_CHARS = 2000
"""Longest line in characters: longer than any of ours, and short enough that a thousand of them do no
harm."""


def printable(text: str, *, max_chars: int = MAX_LINE_CHARS) -> str:
    r"""Returns a text on one line, without control characters, changes of direction or lone surrogates.

    Characters that cannot be shown are escaped as in Python, and a text that is too long is cut, with a note.

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
    """Returns several lines, such as a traceback, each of them printable; the last ones if there are too
    many.

    >>> printable_lines("one\\ntwo\\x07")
    'one\\ntwo\\\\x07'
    """
    return "\n".join(printable(line) for line in text.split("\n")[-max_lines:])
