"""A `swarmnode join` process on loopback in a home of its own; ended by pid, never by name.

tests/swarm, tests/hostile, benchmarks/attacks.py -> [JoinedNode] -> python -m swarmnode join
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import RunningNode, read_running
from swarmnode.node.building.page_client import fetch_from_node
from tests.warm_start import WarmProcess, WarmStart

PATIENCE_S = 180.0
"""For anything a busy machine may take long over. Nothing is measured with it."""


@contextmanager
def serving(home: Path, prefix: tuple[str, ...] = ()) -> Iterator[int]:
    """Runs `swarmnode serve` on a home; yields its port."""
    command = [*prefix, sys.executable, "-m", "swarmnode", "serve", "--home", str(home), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
        finally:
            process.terminate()


class JoinedNode:
    """One `swarmnode join` process."""

    process: "subprocess.Popen[bytes] | WarmProcess"

    def __init__(
        self,
        home: Path,
        *arguments: str,
        prefix: tuple[str, ...] = (),
        warm: WarmStart | None = None,
        data_bytes: int | None = None,
    ) -> None:
        """`prefix`: what the command is started with; `warm`: what starts it after the imports, with a script
        and what that takes as the prefix. `data_bytes`: what a warm one may write to beside its code."""
        self.home = home
        self.paths = resolve_paths(home)
        home.mkdir(parents=True, exist_ok=True)
        self._out, self._err = (home / name for name in ("stdout.txt", "stderr.txt"))
        command = ["join", "--home", str(home), *arguments]
        with self._out.open("w") as out, self._err.open("w") as err:
            if warm is not None:
                self.process = warm.start([*prefix, *command], out=out, err=err, data_bytes=data_bytes)
                return
            program = [*prefix, sys.executable, "-m", "swarmnode", *command]
            self.process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def story(self) -> str:
        return self._err.read_text()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def summary(self) -> dict[str, Any]:
        """The last line of a node that ended well."""
        assert self.wait() == 0, self.story
        return json.loads(self._out.read_text().splitlines()[-1])

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def running(self) -> RunningNode:
        found: list[RunningNode] = []

        def is_up() -> bool:
            note = read_running(self.paths.running)
            found.extend([note] if note and note.pid == self.process.pid else [])
            return bool(found)

        self.until(is_up)
        return found[0]

    def status(self) -> dict[str, Any]:
        try:
            _, answer = fetch_from_node(self.running(), "/status", within_s=10)
        except OSError as error:
            raise AssertionError(f"the node has no status: {self.story}") from error
        return msgspec.json.decode(answer)

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the node ended: {self.story}"
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {self.story}"
            time.sleep(0.05)

    def until_round(self, number: int) -> None:
        self.until(lambda: self.status()["progress"]["round"] >= number)

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that were written after rounds."""
        lines = (self.paths.logs / "metrics.jsonl").read_text().splitlines()
        return [found for line in lines if (found := json.loads(line))["event"] == "round"]

    def daemon(self) -> psutil.Process:
        """Its p2pd: its only child of that name."""
        (daemon,) = [child for child in psutil.Process(self.process.pid).children() if child.name() == "p2pd"]
        return daemon

    def vanish(self) -> None:
        """SIGKILL, and wait until the daemon has gone too: its port is that of the next life."""
        daemon = self.daemon()
        self.kill()
        self.process.wait()
        psutil.wait_procs([daemon], timeout=PATIENCE_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
