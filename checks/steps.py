"""How a step of a check runs a command, fails, and is recorded.

images.py, containers.py, docker_*.py -> [steps] -> report.py
"""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from report import Report

COMMAND_TIMEOUT_S = 120


class StepFailed(Exception):
    """A step failed; the message is for the report."""


def run(command: Sequence[str | Path], timeout_s: float = COMMAND_TIMEOUT_S, **more: Any) -> str:
    """Standard output of a command. Raises StepFailed with the end of what it said."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **more,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailed(str(error)) from None
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "is ignored: it is" not in line]
        raise StepFailed("\n".join([f"{command[0]} ended with {done.returncode}", *lines[-12:]]))
    return done.stdout


def step(report: Report, name: str, check: Callable[[], str | None]) -> bool:
    """Record one step: `check` returns a note, or raises what is wrong."""
    try:
        return report.record(name, None, check() or "")
    except StepFailed as error:
        return report.record(name, str(error))
    except (
        OSError,
        ValueError,
        LookupError,
        NotImplementedError,
        subprocess.SubprocessError,
        psutil.Error,
    ) as error:
        return report.record(name, f"{type(error).__name__}: {error}")


def require(holds: object, otherwise: str) -> None:
    if not holds:
        raise StepFailed(otherwise)
