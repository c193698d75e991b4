"""What SIGINT, SIGTERM and SIGHUP mean to a running node: once, stop in order; again, stop at once.

run.py, seed_node.py -> [stop_on_signals] -> NodeLoop.request_stop
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable

from swarmnode.errors import INTERRUPTED

logger = logging.getLogger(__name__)

SAME_REQUEST_S = 1.0
"""Signals this close together are one request: a terminal and a supervisor often both send one."""


STOPPING = "stopping: the work in hand is ended and a checkpoint is written"


def stop_on_signals(request_stop: Callable[[], None], stopping: str = STOPPING) -> None:
    """Install the handlers on the running event loop. `stopping`: what is said at the first request.

    A second request does not wait for the work in hand, which may take minutes: the process ends there and
    then. The last checkpoint is whole, and the network daemon goes down with us.
    """
    loop = asyncio.get_running_loop()
    asked_at: float | None = None

    def stop() -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            logger.info("%s; again stops at once", stopping)
            request_stop()
        elif now - asked_at > SAME_REQUEST_S:
            logger.warning("stopped at once: the last checkpoint is where the next start goes on")
            logging.shutdown()
            sys.stdout.flush()
            os._exit(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
