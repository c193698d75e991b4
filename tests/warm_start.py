"""Our programs in processes that begin where the imports have ended, which take seconds of each start.

conftest.py's `warm` -> [WarmStart.start] -> request -> [serve], all imported -> fork -> `swarmnode ...`
                        WarmProcess       <- its exit status, on a pipe of its own

The suite starts some two hundred nodes, examples and commands. What they do after their imports is the same
as ever, with pipes, signals, daemons and children of their own; tests of starting itself start cold.
"""

import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "swarmnode.cli.app",
    "swarmnode.api",
    "swarmnode.node.building.run",
    "swarmnode.node.building.members",
    "swarmnode.node.commands.offline",
    "swarmnode.model.policy",
    "swarmnode.training.trainer",
    "swarmnode.rollout.decode.embedded",
    "swarmnode.network.daemon.p2pd_host",
    "swarmnode.extensions.pipeline.runtime.run_pipeline",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
)
MOST_BYTES = 2**16
"""Of a request: arguments and environment."""


class WarmProcess:
    """What `subprocess.Popen` tells of a process, of one that another process forked for us."""

    def __init__(self, report: IO[str]) -> None:
        self._report = report
        self.pid = int(report.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if (found := self._read(timeout)) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return found

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _read(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout_s)[0]:
            self.returncode = int(self._report.readline())
            self._report.close()
        return self.returncode


class WarmStart:
    """A process that has imported what a node imports, and forks one whenever it is asked to."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def start(
        self,
        arguments: Sequence[str],
        *,
        out: IO[Any],
        err: IO[Any],
        environment: Mapping[str, str] | None = None,
        data_bytes: int | None = None,
    ) -> WarmProcess:
        """`swarmnode ARGUMENTS`; or, where the first is the path of a script, that script. `data_bytes`: the
        most that it may write to beside its code."""
        ours, theirs = os.pipe()
        request = {
            "arguments": list(arguments),
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(Path.cwd()),
            "data_bytes": data_bytes,
        }
        try:
            fds = [out.fileno(), err.fileno(), theirs]
            socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
        finally:
            os.close(theirs)
        return WarmProcess(os.fdopen(ours))

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 170.0,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end; what it prints goes through files in `folder`."""
        names = folder / "warm.out", folder / "warm.err"
        with names[0].open("w") as out, names[1].open("w") as err:
            process = self.start(arguments, out=out, err=err, environment=environment)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(arguments), code, *(name.read_text() for name in names))

    def close(self) -> None:
        """End it, with everything that it started. On a busy machine it may still be importing."""
        self._requests.close()
        self._process.wait(120)


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a process for each request until nobody asks any more. Returns in these processes, with the
    request."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C in a terminal reaches all processes of the group: what it ends here are the forked ones.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reports: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(reports)
        if requests not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not data:
            _end(reports)
        out, err, report = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for fd in (out, err, report, woken, wakes, *reports.values()):
                os.close(fd)
            requests.close()
            return json.loads(data)
        os.write(report, f"{pid}\n".encode())
        os.close(out)
        os.close(err)
        reports[pid] = report


def _reap(reports: dict[int, int]) -> None:
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report = reports.pop(pid)
        # Nobody may be reading any more.
        with suppress(BrokenPipeError):
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(report)


def _end(reports: Mapping[int, int]) -> NoReturn:
    for pid in reports:
        os.kill(pid, signal.SIGKILL)
    raise SystemExit(0)


def become(request: Mapping[str, Any]) -> None:
    """Be the program that was asked for, in this process."""
    random.seed()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request["data_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (request["data_bytes"],) * 2)
    first, *_ = arguments = request["arguments"]
    if first.endswith(".py"):
        sys.argv = arguments
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
    else:
        sys.argv = ["swarmnode", *arguments]
        runpy.run_module("swarmnode", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in IMPORTED:
        __import__(name)
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
