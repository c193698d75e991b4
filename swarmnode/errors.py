"""Every error that a user or a caller may see, as one tree.

SwarmnodeError                     what happened; `hint`: what to do next
├── ConfigError                    a setting is unknown, mistyped or contradicts another
├── StorageError                   a disk is full, a folder cannot be written
├── IdentityError
│   └── IdentityInUse              another process runs on this key
├── NetworkError
│   ├── PortInUse                  the port we were told to listen on is taken
│   ├── HostDown                   the network process is not running (it is being restarted)
│   ├── PeerUnreachable            no connection to the peer, or it hung up
│   │   └── PeerBarred             we do not contact the peer for a while
│   ├── RequestTimeout             the peer did not answer before the deadline
│   └── MessageTooLarge            a frame exceeds its bound
├── TaskError                      a task cannot be found, loaded, drawn or scored
│   └── SandboxError               a stranger's program cannot be run, for example without isolation
├── JudgementLost                  the process of a task's code died or was ended, with no result
│   ├── StillLoading               its process was not ready yet
│   ├── JudgementOverran           it did not answer before its deadline
│   └── JudgementAbandoned         its group was given up before it began
├── ModelError                     a model cannot be found or loaded, or does not fit
├── EngineError                    a rollout engine is unavailable, refused something or stopped working
│   └── RequestRefused             the engine will never accept this request
├── CheckpointError                a checkpoint is damaged or belongs to something else
├── StoppedEarly                   a signal ended the process before its node was up
├── PipelineError                  a step that needs all members of a pipeline failed
└── Rejected                       what a peer sent was not accepted; `reason` is a short code for counters

The CLI prints `message` and `hint` on one line each and exits with `exit_code`. Nothing else is caught there.
"""

import traceback
from pathlib import Path

INTERRUPTED = 130
"""Exit code of a command ended by Ctrl-C, as in shells (128 + SIGINT)."""

_NOT_THEIRS = (str(Path(__file__).parent), str(Path(traceback.__file__).parent), "<frozen")
"""Prefixes of traceback paths that are ours or Python's and do not help the author of the failed code."""


class SwarmnodeError(Exception):
    """Base of the tree.

    >>> str(SwarmnodeError("the disk is full", hint="free 20 MB"))
    'the disk is full. free 20 MB'
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


def where(error: BaseException) -> str:
    """Returns the file and line of the user's code that raised an error, as a hint."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"see {error.filename} line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
    return f"see {frames[-1].filename} line {frames[-1].lineno}" if frames else ""


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Returns the notes of an error, which hold tracebacks of code that is not ours."""
    return tuple(getattr(error, "__notes__", ()))


class ConfigError(SwarmnodeError):
    exit_code = 2


class StorageError(SwarmnodeError):
    exit_code = 3


class IdentityError(SwarmnodeError):
    exit_code = 4


class IdentityInUse(IdentityError):
    pass


class NetworkError(SwarmnodeError):
    exit_code = 5


class PortInUse(NetworkError):
    pass


class HostDown(NetworkError):
    pass


class PeerUnreachable(NetworkError):
    pass


class PeerBarred(PeerUnreachable):
    """Contact with the peer is blocked for a while."""


class RequestTimeout(NetworkError):
    pass


class MessageTooLarge(NetworkError):
    pass


class TaskError(SwarmnodeError):
    exit_code = 6


class SandboxError(TaskError):
    pass


class JudgementLost(SwarmnodeError):
    exit_code = 6


class StillLoading(JudgementLost):
    """The judgement waited for a process that is still loading its task."""


class JudgementOverran(JudgementLost):
    pass


class JudgementAbandoned(JudgementLost):
    """The judgement was not started, because its group has been given up."""


class ModelError(SwarmnodeError):
    exit_code = 7


class EngineError(SwarmnodeError):
    exit_code = 8


class RequestRefused(EngineError):
    """The engine refuses this request because of the request itself; another example may work."""


class CheckpointError(SwarmnodeError):
    exit_code = 9


class StoppedEarly(SwarmnodeError):
    exit_code = INTERRUPTED


class PipelineError(SwarmnodeError):
    exit_code = 10


class Rejected(SwarmnodeError):
    """Input from a peer that was not accepted. Counted by `reason`, never fatal."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """`reason`: a member of `Reason` (exchange/drop_reasons.py) or another StrEnum, or its text, which
        equals it."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail
