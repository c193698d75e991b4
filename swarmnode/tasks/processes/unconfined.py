"""The right of programs in answers to run without a sandbox if there is none (setting tasks.sandbox).

worker.py -> [allow_unconfined] -> [is_unconfined_allowed] -> extensions/sandbox/sandbox.py
"""

_allowed = False


def allow_unconfined(allowed: bool) -> None:
    """Sets the right for this process."""
    global _allowed
    _allowed = allowed


def is_unconfined_allowed() -> bool:
    """Returns the right of this process; False until it is set."""
    return _allowed
