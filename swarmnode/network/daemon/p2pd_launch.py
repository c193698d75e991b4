"""Run as a script: becomes the daemon, after asking the kernel to end it when the node dies.

daemon_process.py -> [python p2pd_launch.py PARENT_PID GOMEMLIMIT BINARY ARGUMENT...] -> execve p2pd

It is a launcher rather than a `preexec_fn` because the node's process runs torch threads, and code between
fork and exec of a threaded process may deadlock. To the kernel, the parent is the thread that started us: the
one that runs the host's event loop. Only the standard library is used here: it runs with `python -I -S`.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1

NICENESS = 7
"""Niceness of the daemon. A flood keeps it busy; on a core shared with the node, the node keeps most of its
pace. The daemon runs on one thread (below): Go would use one per core, each with the weight of the node's."""


def main(parent_pid: int, memory_limit: str, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The node may have died before the request above took hold.
    if os.getppid() != parent_pid:
        sys.exit("the node that asked for this daemon is gone")
    with suppress(OSError):  # a sandbox may forbid it: then both have equal priority
        os.nice(NICENESS)
    # The daemon needs nothing of the node's environment.
    environment = {"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": memory_limit, "GOMAXPROCS": "1"}
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
