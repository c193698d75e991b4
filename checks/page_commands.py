"""The shell blocks of the pages, as commands: blocks without a language are shell, pictures are `text`.

README.md, docs/*.md, ... -> [blocks_of] -> [commands_of] -> tests/test_shell_blocks.py, pages_check.py
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class PageCommand:
    """One command of a block: its words, the variables before them, and its text."""

    words: list[str]
    variables: dict[str, str]
    text: str


def pages() -> list[Path]:
    """Returns all pages of the repository."""
    return sorted((*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md")))


def blocks_of(page: Path) -> list[str]:
    """Returns the text of each shell block of a page."""
    return [block for language, block in BLOCK.findall(page.read_text()) if language in ("", "sh")]


def commands_of(block: str) -> Iterator[PageCommand]:
    """Yields the commands of a block, those behind && one by one, without comments.

    >>> [(one.words, one.variables) for one in commands_of("A=1 swarmnode join x # why\\ncd y && make z")]
    [(['swarmnode', 'join', 'x'], {'A': '1'}), (['cd', 'y'], {}), (['make', 'z'], {})]
    """
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            one, words = words[:end], words[end + 1 :]
            variables: dict[str, str] = {}
            while "=" in one[0] and one[0].partition("=")[0].isidentifier():
                name, _, variables[name] = one.pop(0).partition("=")
            yield PageCommand(one, variables, line.strip())
