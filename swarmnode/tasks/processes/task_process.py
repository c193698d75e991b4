"""One process for the code of a task, which is ended if it does not answer in time.

isolated_task.py -> worker_pool.py -> [TaskProcess] -> socket -> worker.py
        -> examples(seed), reward(...) of the user

Nothing of a task file runs in the node: it can hang, hold the interpreter, catch every exception, start
threads or crash, and the loss is one judgement (JudgementLost). The process is restarted when it is next
needed.
"""

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from typing import IO, cast

import msgspec

from swarmnode.chat import asked_of, read_prompt
from swarmnode.errors import JudgementLost, JudgementOverran, StillLoading, TaskError
from swarmnode.tasks.processes import worker_messages as wire
from swarmnode.tasks.processes.task_output import pass_on
from swarmnode.tasks.specs import OWN_KINDS, parse_spec
from swarmnode.tasks.task_source import task_source

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Seconds after a deadline before the process is ended from outside. At the deadline it ends itself and
reports where it was."""

SLOW_S = 10.0
"""Seconds after which a judgement is logged as slow while it goes on, once per task."""

RELOAD_S = 600.0
"""Longest start of the process: a file may read a data set, or load a model that judges."""

SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment in which strings hash alike in all processes. Some data sets of reasoning-gym draw in the order
of a set, and their users cannot fix that code."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from swarmnode.tasks.processes.worker import main; main(*map(int, sys.argv[2:]))"
)

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
"""A frame of a traceback as faulthandler writes it."""


@dataclass(slots=True)
class KnownTask:
    """The task that its first process loaded. All other processes must load the same."""

    loaded: wire.Loaded | None = None


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Deadlines of a task's process, and options of its start."""

    timeout_s: float
    """Deadline of all requests except a turn and loading the task."""
    turn_timeout_s: float | None = None
    """Deadline of an environment's answer to one turn. None: `timeout_s`."""
    load_timeout_s: float | None = RELOAD_S
    """Longest time for loading the task. None: no limit."""
    load_wait_s: float | None = None
    """Longest wait of one request while the task is loaded. None: no limit."""
    random_hashes: bool = False
    """True if strings hash differently in each process, for tasks whose authors can fix code that depends on
    it."""
    printed: Callable[[str], None] | None = None
    """Receives each line that the task prints. None: lines are logged."""


class TaskProcess:
    """A process of one task. It starts on the first request, and again if it died. `ask` may be called by
    several threads, which wait for each other; `close` by any."""

    def __init__(self, load: wire.Load, options: ProcessOptions, known: KnownTask) -> None:
        """`known`: the task as it was loaded before; loading another is an error."""
        spec = parse_spec(load.spec)
        self.name, self._path = spec.short, spec.path
        self._same_hashes = spec.kind not in OWN_KINDS and task_source(spec.kind).same_hashes
        self._load = load
        self._options = options
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: wire.MessageReader | None = None
        self._trace: IO[bytes] | None = None
        self._loaded: wire.Loaded | None = None
        self._known = known
        self._spawned = 0.0
        self._interrupts = 0
        self._killed = False
        self._closed = False
        self._told_slow = False

    def start(self) -> wire.Loaded:
        """Starts the process and loads the task. Raises JudgementLost, or TaskError if the task cannot be
        loaded."""
        with self._turn:
            return self._ready()

    def ask(self, request: wire.Request) -> wire.Reply:
        """Sends a request and returns the reply. Raises TaskError for an error of the task, JudgementLost if
        it did not answer."""
        interrupts = self._interrupts
        with self._turn:
            if self._interrupts != interrupts:
                raise self._stopped()
            # A draw depends on nothing that died with a process.
            return self._asked(request, self._limit_s(request), again=isinstance(request, wire.Draw))

    @property
    def resident_bytes(self) -> int:
        """Returns the resident memory of the process in bytes. 0: it does not run."""
        import psutil

        child = self._child
        if child is None:
            return 0
        try:
            return psutil.Process(child.pid).memory_info().rss
        except psutil.Error:
            return 0

    def interrupt(self) -> None:
        """Ends the process at once; requests that wait for an answer raise JudgementLost."""
        self._interrupts += 1
        self._kill()

    def close(self) -> None:
        """Ends the process for good."""
        self._closed = True
        self.interrupt()
        with self._turn:
            self._end()

    def _ready(self) -> wire.Loaded:
        if self._closed:
            raise self._stopped()
        if self._killed or (self._child is not None and self._child.poll() is not None):
            self._end()
        if self._loaded is None:
            if self._child is None:
                self._spawn()
                limit = self._options.load_timeout_s
                self._send(
                    wire.Order(self._load, None), None if limit is None else self._spawned + limit + GRACE_S
                )
            self._loaded = self._reply_to_load()
        return self._loaded

    def _reply_to_load(self) -> wire.Loaded:
        limit, wait_s = self._options.load_timeout_s, self._options.load_wait_s
        last = math.inf if limit is None else self._spawned + limit
        deadline = last if wait_s is None else min(last, time.monotonic() + wait_s)
        try:
            reply = self._received(None if deadline == math.inf else deadline)
        except TimeoutError:
            if deadline < last:
                raise StillLoading(f"{self._load.spec} is still being loaded") from None
            self._end()
            raise JudgementOverran(
                f"{self._load.spec} did not load within {limit:g} s",
                hint="code at the top level of the file runs when it is loaded",
            ) from None
        except BaseException:  # Ctrl-C while a file loads.
            self._end()
            raise
        if reply is None:
            ending = self._ending()
            self._end()
            raise JudgementLost(f"the process of task {self.name} ended while loading: {ending}")
        if isinstance(reply, wire.Failure):
            self._end()
            raise _task_error(reply)
        assert isinstance(reply, wire.Loaded)
        if reply != (self._known.loaded or reply):
            self._end()
            raise TaskError(f"{self.name} was changed while the node was running", hint="restart the node")
        self._known.loaded = reply
        return reply

    def _asked(self, request: wire.Request, timeout_s: float, *, again: bool) -> wire.Reply:
        """`again`: if the process dies of the request, or during it, try once more in a new one."""
        self._ready()
        began, interrupts = time.monotonic(), self._interrupts
        deadline = began + timeout_s + GRACE_S
        self._send(wire.Order(request, timeout_s), deadline)
        try:
            reply = self._patiently_received(request, deadline)
        except TimeoutError:
            reply = None
        if reply is None:
            stopped = self._interrupts != interrupts
            lost = self._stopped() if stopped else self._lost(request, time.monotonic() - began)
            self._end()
            if again and not (stopped or isinstance(lost, JudgementOverran)):
                logger.warning("%s; trying once more", lost)
                return self._asked(request, timeout_s, again=False)
            raise lost
        if isinstance(reply, wire.Failure):
            if reply.lost:
                self._end()
                raise JudgementLost(f"{_doing(self.name, request)} {reply.message}", hint=reply.hint)
            raise _task_error(reply)
        return reply

    def _patiently_received(self, request: wire.Request, deadline: float) -> wire.Reply | None:
        slow = time.monotonic() + SLOW_S
        if self._told_slow or deadline <= slow:
            return self._received(deadline)
        try:
            return self._received(slow)
        except TimeoutError:
            self._told_slow = True
            what, limit = _doing(self.name, request), self._limit_s(request)
            logger.warning("%s has not returned for %g s; it is stopped after %g s", what, SLOW_S, limit)
        return self._received(deadline)

    def _received(self, deadline: float | None) -> wire.Reply | None:
        """Returns the next reply, or None if the process is gone."""
        assert self._reader is not None
        data = self._reader.read(deadline)
        try:
            return None if data is None else msgspec.msgpack.decode(data, type=wire.Reply)
        except msgspec.DecodeError as error:
            raise TaskError(f"task {self.name} returned an invalid value: {error}") from error

    def _lost(self, request: wire.Request, seconds: float) -> JudgementLost:
        what = _doing(self.name, request)
        if seconds < (limit := self._limit_s(request)):
            return JudgementLost(f"{what} ended its process: {self._ending()}")
        return JudgementOverran(f"{what} did not return within {limit:g} s", hint=self._where())

    def _limit_s(self, request: wire.Request) -> float:
        turn_s = self._options.turn_timeout_s if isinstance(request, wire.Observe) else None
        return self._options.timeout_s if turn_s is None else turn_s

    def _where(self) -> str:
        """Returns the line at which the task's code was given up, as a hint."""
        if self._trace is None:
            return ""
        self._trace.seek(0)
        return _innermost(self._trace.read(1 << 20).decode(errors="replace"), self._path)

    # ---- the process ----

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        files = theirs.fileno(), self._trace.fileno()
        hashes = ("-R",) if self._options.random_hashes and not self._same_hashes else ()
        numbers = map(str, (*files, os.getpid()))
        try:
            self._child = subprocess.Popen(
                [sys.executable, *hashes, "-c", _BOOT, json.dumps(sys.path), *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=files,
                env={**os.environ, **SAME_HASHES} if self._same_hashes else None,  # noqa: TID251  for Python
                # Ctrl-C in a terminal is for the node, and processes that a reward starts can be ended with
                # it.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise TaskError(f"cannot start a process for task {self.name}: {error.strerror}") from error
        finally:
            theirs.close()
        self._reader = wire.MessageReader(ours)
        output = cast(BufferedReader, self._child.stdout)
        printed = self._options.printed or partial(logger.info, "%s prints: %s", self.name)
        threading.Thread(target=pass_on, args=(output, printed), daemon=True).start()
        self._spawned = time.monotonic()
        self._killed = self._closed
        if self._closed:
            self._kill()

    def _send(self, order: wire.Order, deadline: float | None) -> None:
        """Sends an order. If the process is gone, or took nothing until the deadline, this is noticed on
        reading."""
        assert self._reader is not None
        self._reader.channel.settimeout(None if deadline is None else deadline - time.monotonic())
        with suppress(ConnectionError, TimeoutError):
            self._reader.channel.sendall(wire.frame(order))

    def _kill(self) -> None:
        child, self._killed = self._child, True
        if child is not None and child.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Ends the process and its children, and closes everything that belonged to it."""
        self._kill()
        if self._child is not None:
            self._child.wait()
        if self._reader is not None:
            self._reader.channel.close()
        if self._trace is not None:
            self._trace.close()
        self._child = self._reader = self._trace = self._loaded = None

    def _stopped(self) -> JudgementLost:
        return JudgementLost(f"task {self.name} was stopped")

    def _ending(self) -> str:
        assert self._child is not None
        try:
            code = self._child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "it closed the connection"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _doing(name: str, request: wire.Request) -> str:
    match request:
        case wire.Score(prompt=prompt):
            return f"the reward of task {name} on example {asked_of(read_prompt(prompt))!r:.80}"
        case wire.Observe(prompt=prompt):
            return f"the environment of task {name} on example {asked_of(read_prompt(prompt))!r:.80}"
        case wire.Draw(seed=seed):
            return f"examples({seed}) of task {name}"
        case _:
            return f"task {name}"


def _innermost(trace: str, path: str) -> str:
    """Returns the line of the task's file that was running, from faulthandler's report on all threads.

    >>> _innermost('File "/usr/re.py", line 7 in match\\nFile "/a/add.py", line 3 in reward', "/a/add.py")
    'it was at /a/add.py line 3, in reward'
    """
    for found in _FRAME.finditer(trace):
        if found["file"] == path:
            return f"it was at {path} line {found['line']}, in {found['function']}"
    return ""


def _task_error(failure: wire.Failure) -> TaskError:
    error = TaskError(failure.message, hint=failure.hint)
    if failure.traceback:
        error.add_note(failure.traceback)
    return error
