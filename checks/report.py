"""What a check prints: one line a step, and last how many passed and failed.

install_check.py, docker_check.py -> [report] -> exit code of make
"""

import time
from dataclasses import dataclass, field


@dataclass
class Report:
    """The steps of one check so far. Several threads may record: each step is one append and one print."""

    started_s: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)

    def record(self, step: str, problem: str | None, note: str = "") -> bool:
        """Print one step, failed if there is a problem, with the problem's own words indented below it."""
        (self.failed if problem is not None else self.passed).append(step)
        seconds = time.monotonic() - self.started_s
        verdict = "ok    " if problem is None else "FAILED"
        lines = [f"{verdict} {step}{': ' + note if note else ''} [{seconds:.0f} s]"]
        lines += [f"       {line}" for line in (problem or "").splitlines()]
        print("\n".join(lines), flush=True)
        return problem is None

    def say(self, text: str) -> None:
        """Print something that is neither passed nor failed."""
        print(f"       {text}", flush=True)

    def finish(self) -> int:
        """Print the last line and give the exit code: 1 if anything failed or nothing was checked."""
        print(f"{len(self.passed)} passed, {len(self.failed)} failed", flush=True)
        return 0 if self.passed and not self.failed else 1
