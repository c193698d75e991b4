"""Python files of the user, run as modules: the only place where a task's code enters the process.

path -> [load_source] -> module -> loader.py, rewards.py, imported.py

Only local files that the user named are run; nothing from the wire ever reaches this module.
"""

import hashlib
import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from swarmnode.errors import SwarmnodeError, TaskError, where

T = TypeVar("T")

_MAX_SOURCE_BYTES = 1 << 20
"""Largest task file in bytes: nobody writes a megabyte of code, but a user may name a data set by mistake."""


_MOST_TRACEBACK_CHARS = 8000
"""Longest traceback in characters: a recursion may be deep, and an error may quote an answer."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was run, and the digest of exactly that text."""

    path: Path
    digest: str
    module: ModuleType


def load_source(path: Path, text: str | None = None) -> Source:
    """Runs a Python file and returns its module. Raises TaskError naming file and line.

    It may import files beside it, wherever the node was started. Installed packages come first, so that no
    file in the folder replaces a library.

    `text`: the file's text, if it was read before.
    """
    path = path.expanduser().absolute()
    text = read_source(path) if text is None else text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Source(path, digest, _run(path, text, digest))


def read_source(path: Path) -> str:
    """Returns the text of a file that could be a task. Raises TaskError."""
    try:
        if path.stat().st_size > _MAX_SOURCE_BYTES:
            raise TaskError(f"{path} is larger than {_MAX_SOURCE_BYTES} bytes", hint="is it a Python file?")
        # Universal newlines: a checkout on Windows must have the same digest as one on Linux.
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from error


def _run(path: Path, text: str, digest: str) -> ModuleType:
    module = ModuleType(f"_swarmnode_{path.stem}_{digest}")
    module.__file__ = str(path)
    # dataclasses and typing look up a class's module by name while the class is being made.
    sys.modules[module.__name__] = module
    linecache.checkcache(str(path))
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(text, str(path), "exec"), vars(module))
    except SyntaxError as error:
        raise TaskError(f"{path} has a syntax error: {error.msg}", hint=where(error)) from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"{path} cannot be loaded: {error!r}", hint=where(error)) from error
    return module


def of_theirs(what: str, call: Callable[[], T], hint: str = "") -> T:
    """Returns the result of a user's code. Raises TaskError for any error of it, with its place after `hint`;
    our own errors and MemoryError pass through. `what`: begins the message."""
    try:
        return call()
    except (SwarmnodeError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        place = where(error)
        raise TaskError(f"{what}: {error!r:.300}", hint=f"{hint} {place}".strip()) from error


def traceback_of(error: BaseException) -> str:
    """Returns the traceback of an error from the first line of the user's code on, shortened if too long."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (str(Path(__file__).parents[1]), "<frozen")
    first = next((at for at, frame in enumerate(frames) if not frame.filename.startswith(ours)), len(frames))
    shown = traceback.StackSummary.from_list(frames[first:]).format()
    lines = ["Traceback (most recent call last):\n", *shown, *traceback.format_exception_only(error)]
    text = "".join(lines).rstrip()
    half = _MOST_TRACEBACK_CHARS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"
