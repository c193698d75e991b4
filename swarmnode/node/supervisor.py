"""Keeps a background service running: what it raises is logged with its traceback, and it is started again.

node.py -> [supervise] -> discovery and other services that must never take the node along

AGENTS.md (2) says where else a broad except may stand.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0


async def supervise(
    name: str,
    service: Callable[[], Awaitable[None]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run `service` until it returns. After an error it starts again, after a pause that doubles."""
    pause_s = FIRST_BACKOFF_S
    while True:
        try:
            await service()
            return
        except Exception:
            logger.exception("%s failed; starting it again in %.1f s, training goes on", name, pause_s)
        await sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
