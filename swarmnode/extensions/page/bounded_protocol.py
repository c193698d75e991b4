"""Connections to the page, bounded in patience.

bounded_server.py -> uvicorn -> [BoundedProtocol] -> access.py

uvicorn bounds headers, and reads no faster than they are used. It waits for ever for the rest of a request,
and for whoever does not read its answer.
"""

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 10.0
"""Seconds in which a client sends its request, and takes something of an answer that waits for it."""


class BoundedProtocol(H11Protocol):
    """One connection. Whoever keeps us waiting is dropped."""

    patience_s = PATIENCE_S
    _look_again: asyncio.TimerHandle | None = None
    _waiting_bytes = 0
    """Bytes of the answer that waited for the client at the last look."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._look_again = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        reads_nothing = 0 < self._waiting_bytes <= waiting
        # Between two requests the timer of uvicorn runs; the first byte of the next one ends it.
        is_awaited = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        sends_nothing = is_awaited and self.timeout_keep_alive_task is None
        if reads_nothing or sends_nothing:
            self.transport.abort()
            return
        self._waiting_bytes = waiting
        self._look_again = self.loop.call_later(self.patience_s, self._look)
