"""A Python file of the user, run as a module: the one place where a task's code enters the process.

path given by the user -> [load_source] -> loader.py, rewards.py

Only local files that the user named are run; nothing that came over the wire ever reaches this file.
"""

import hashlib
import linecache
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from swarmnode.errors import TaskError

_MAX_SOURCE_BYTES = 1 << 20
"""Nobody writes a task file of a megabyte; somebody may well point at a data set."""


_NOT_THEIRS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen")
"""Where a traceback's lines are ours or Python's, so of no help to the author of a task."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that has been run, and the digest of exactly the text that was run."""

    path: Path
    digest: str
    module: ModuleType


def load_source(path: Path, text: str | None = None) -> Source:
    """Run a Python file and return its module. Raises TaskError naming file and line.

    It may import what lies beside it, wherever the node was started; what is installed comes first, so that
    no file of the folder takes the place of a library.

    `text`: what stood in the file when it was read for the first time, where that was before.
    """
    path = path.expanduser().absolute()
    text = read_source(path) if text is None else text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Source(path, digest, _run(path, text, digest))


def read_source(path: Path) -> str:
    """The text of a file that could be a task. Raises TaskError."""
    try:
        if path.stat().st_size > _MAX_SOURCE_BYTES:
            raise TaskError(f"{path} is larger than {_MAX_SOURCE_BYTES} bytes", hint="is it a Python file?")
        # Universal newlines: a checkout on Windows must have the digest of one on Linux.
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror}", hint="is the path right?") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from error


def _run(path: Path, text: str, digest: str) -> ModuleType:
    module = ModuleType(f"_swarmnode_{path.stem}_{digest}")
    module.__file__ = str(path)
    # dataclasses and typing look a class's module up by name while the class is being made.
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


def where(error: BaseException) -> str:
    """File and line of the user's code that an error comes from, as a hint."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"see {error.filename} line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
    return f"see {frames[-1].filename} line {frames[-1].lineno}" if frames else ""
