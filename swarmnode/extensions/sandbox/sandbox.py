"""A sandbox for a stranger's program: it can do no harm, and it ends in time."""

import logging
import marshal
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Literal

from swarmnode.errors import SandboxError
from swarmnode.extensions.sandbox.isolation import (
    UNCONFINED,
    Isolation,
    candidates,
    interpreter,
    runtime_paths,
)
from swarmnode.tasks.processes.unconfined import is_unconfined_allowed

logger = logging.getLogger(__name__)

Limit = Literal["wall", "cpu", "memory", "output", "disk"]
"""Name of the limit that ended a program."""

GRACE_S = 2.0
"""Seconds that our own process has to end the program and itself, before all of it is killed from outside."""

DISK_LOOK_S = 0.05
"""Seconds between two looks at how much a program has written, if no file system bounds that."""

MOST_FILES = 1024

READ_BYTES = 1 << 16

_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
"""The whole environment of a program. Strings hash alike, so that it does the same on every node."""

_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from confinement.launch import main; "
    "sys.path.pop(); main(sys.argv[2])"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program's resources."""

    wall_s: float = 10.0
    """Seconds of wall-clock time, starting included."""
    cpu_s: int = 5
    """Whole seconds of a processor, for each program."""
    memory_bytes: int = 512 << 20
    """Address space of each program; an interpreter that does nothing has about 30 MB."""
    output_bytes: int = 1 << 20
    """Bytes of standard output and standard error together."""
    disk_bytes: int = 8 << 20
    """Bytes of all files together, and of the longest. Without namespaces, files deleted while open are
    counted one by one: `descriptors` of them at most."""
    descriptors: int = 32
    """Most open files and pipes."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end and the output of a program."""

    status: int | None
    """Its exit status, or minus the number of the signal that ended it. None: it was ended from outside."""
    stdout: str
    stderr: str
    ended_by: Limit | None
    """The limit that ended it. None: it ended by itself."""
    isolation: Isolation


def run(
    code: str,
    *,
    beside: str | None = None,
    limits: Limits | None = None,
    isolation: Isolation | None = None,
) -> ProgramEnd:
    """Runs an untrusted Python program and waits for its end. Raises SandboxError.

    `beside`: a second program, confined as the first is and from it, at the other end of a socket that both
    have as descriptor 3. It writes nowhere else and is ended when the first ends. `isolation` None: the
    strongest available one.

    >>> run("print(6 * 7)").stdout
    '42\\n'
    """
    limits = limits or Limits()
    isolation = _allowed() if isolation is None else isolation
    with _place() as place, _texts([code] if beside is None else [code, beside]) as codes:
        return _Running(codes, place, limits, isolation).finished()


def available() -> Isolation:
    """Returns the strongest isolation of this machine, found by trying. UNCONFINED: it has none."""
    with _looking:
        if not _found and (isolation := _find()).confines:
            logger.info("%s", isolation.describe())
            _found.append(isolation)
        return _found[0] if _found else UNCONFINED


_looking = threading.Lock()
_found: list[Isolation] = []


def _allowed() -> Isolation:
    isolation = available()
    if not isolation.confines and not is_unconfined_allowed():
        raise SandboxError(
            "this machine has no sandbox to run strangers' programs in",
            hint="allow this user landlock (Linux 5.13) or user namespaces, or let programs run with your"
            " permissions: --set tasks.sandbox=optional",
        )
    return isolation


def _find() -> Isolation:
    return next((one for one in candidates() if holds(one)), UNCONFINED)


_PATIENT = Limits(wall_s=60.0)
"""Generous limits for the probe: a busy machine has no less isolation."""

_PROBE = """
import os
try:
    os.listdir("/proc")
except OSError:
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        print("confined")
"""


def holds(isolation: Isolation) -> bool:
    """Returns True if a program runs in this isolation and can neither see processes nor signal the one that
    started it."""
    try:
        return run(_PROBE, isolation=isolation, limits=_PATIENT).stdout == "confined\n"
    except SandboxError:
        return False


@dataclass(slots=True)
class _Running:
    """A program from its start to its end."""

    codes: list[int]
    place: str
    limits: Limits
    isolation: Isolation
    _written: dict[str, bytearray] = field(default_factory=dict[str, bytearray])

    def finished(self) -> ProgramEnd:
        deadline = time.monotonic() + self.limits.wall_s
        report, theirs = os.pipe()
        with _unnamed("") as no_input, os.fdopen(report, "rb") as report_file:
            try:
                child = self._start(no_input, theirs)
            finally:
                os.close(theirs)
            with child:
                try:
                    ended_by = self._watch(child, deadline)
                finally:
                    _end(child)
            word, rest = _reported(report_file)
        return self._end_of(word, rest, ended_by)

    def _start(self, no_input: IO[bytes], report: int) -> subprocess.Popen[bytes]:
        command = [interpreter(), "-P", "-s", "-S", "-c", _BOOT, str(Path(__file__).parent)]
        order = {
            "codes": self.codes,
            "report": report,
            "parent": os.getpid(),
            "place": self.place,
            "readable": runtime_paths(),
            "namespaces": self.isolation.namespaces,
            "landlock": bool(self.isolation.landlock),
            "seccomp": self.isolation.seccomp,
            **asdict(self.limits),
        }
        try:
            return subprocess.Popen(
                [*command, marshal.dumps(order).hex()],
                stdin=no_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(*self.codes, report),
                env=_ENVIRONMENT | {"TMPDIR": "/tmp" if self.isolation.namespaces else self.place},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"cannot start a process for a program: {error.strerror}") from error

    def _watch(self, child: subprocess.Popen[bytes], deadline: float) -> Limit | None:
        """Reads the program's output until it ends or reaches a limit."""
        assert child.stdout is not None and child.stderr is not None
        self._written = {"stdout": bytearray(), "stderr": bytearray()}
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ, self._written["stdout"])
            selector.register(child.stderr, selectors.EVENT_READ, self._written["stderr"])
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    return "wall"
                for key, _ in selector.select(left if self.isolation.namespaces else min(left, DISK_LOOK_S)):
                    if not (data := os.read(key.fd, READ_BYTES)):
                        selector.unregister(key.fileobj)
                    key.data.extend(data)
                if sum(map(len, self._written.values())) > self.limits.output_bytes:
                    return "output"
                if not self.isolation.namespaces and not _fits(self.place, self.limits.disk_bytes):
                    return "disk"
        return None

    def _end_of(self, word: str, rest: str, ended_by: Limit | None) -> ProgramEnd:
        stdout, stderr = (self._text(name) for name in ("stdout", "stderr"))
        if word == "failed":
            raise SandboxError(f"the sandbox cannot be set up: {rest}")
        if ended_by is not None:
            return ProgramEnd(None, stdout, stderr, ended_by, self.isolation)
        if word != "ended":
            raise SandboxError(
                f"the sandbox ended before the program: {stderr.strip()[-500:] or 'no reason given'}"
            )
        status, cpu_s = (kind(text) for kind, text in zip((int, float), rest.split(), strict=True))
        ended_by = _limit_met(int(status), cpu_s, stderr, self.limits)
        return ProgramEnd(int(status), stdout, stderr, ended_by, self.isolation)

    def _text(self, name: str) -> str:
        return bytes(self._written[name][: self.limits.output_bytes]).decode(errors="replace")


def _limit_met(status: int, cpu_s: float, stderr: str, limits: Limits) -> Limit | None:
    """Returns the limit that ended a program which ended by itself or was killed by the kernel, or None.

    >>> _limit_met(-signal.SIGKILL, 5.0, "", Limits())
    'cpu'
    """
    if status == -signal.SIGKILL and cpu_s > limits.cpu_s - 0.5:
        return "cpu"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if status == 1 and last.startswith("MemoryError") else None


def _reported(report: IO[bytes]) -> tuple[str, str]:
    """Returns the first word of our own process's report, and the rest of its line. No program can write
    there."""
    word, _, rest = report.readline(READ_BYTES).decode(errors="replace").strip().partition(" ")
    return word, rest


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends our own process, which ends and reaps its children. If it does not, kills all of them at once."""
    with suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _fits(place: str, disk_bytes: int) -> bool:
    """Returns True if the files of a flat folder are within the limits."""
    used_bytes = 0
    with suppress(FileNotFoundError), os.scandir(place) as entries:
        for count, entry in enumerate(entries):
            with suppress(FileNotFoundError):
                used_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
            if used_bytes > disk_bytes or count >= MOST_FILES:
                return False
    return True


@contextmanager
def _place() -> Generator[str]:
    """Yields an empty temporary folder."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-", ignore_cleanup_errors=True) as place:
        yield os.path.realpath(place)


@contextmanager
def _texts(codes: Sequence[str]) -> Generator[list[int]]:
    """Yields one unnamed file for each text, to be read once."""
    with ExitStack() as files:
        yield [files.enter_context(_unnamed(code)).fileno() for code in codes]


def _unnamed(text: str) -> IO[bytes]:
    """Returns a read-only file that has no name any more."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(text.encode(errors="surrogatepass"))
        file.flush()
        return open(file.name, "rb")
