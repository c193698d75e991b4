"""An attack from the outside: start it, read what it says, tell it to go on, end it.

tests/hostile, attacks.py -> [Attacker] -> python -m attackers
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


class Attacker:
    """A running attack.

    with Attacker("junk_gossip", [address], seconds=10) as attacker:
        attacker.wait_for("ready")
    """

    def __init__(
        self,
        name: str,
        targets: Sequence[str],
        *,
        seconds: float = 20.0,
        swarm: str = "commons",
        seed: int = 1,
        about: str = "",
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix`: a command to run it under, such as `nice`."""
        options = ["--seconds", str(seconds), "--swarm", swarm, "--seed", str(seed), "--about", about]
        for target in targets:
            options += ["--target", target]
        self._command = [*prefix, sys.executable, "-m", "attackers", name, *options]
        self._lines: Queue[dict[str, Any] | None] = Queue()

    def __enter__(self) -> Self:
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        # Its daemons die with it.
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def tell(self, line: str) -> None:
        """A line that an attack waits for."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def wait_for(self, event: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next event of this name; others before it are skipped."""
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except Empty:
                raise AssertionError(f"the attack did not say {event!r} within {timeout_s:.0f} s") from None
            assert line is not None, f"the attack ended before it said {event!r}"
            if line["event"] == event:
                return line

    def done(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """What it says at its end: `sent`, and `connected_after`."""
        return self.wait_for("done", timeout_s)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)
