"""Connections to the page, bounded in number and in patience.

uvicorn -> [BoundedProtocol] -> access.py

uvicorn bounds headers, and reads no faster than they are used. It waits for ever for the rest of a request,
and for whoever does not read its answer.
"""

import asyncio
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 64
MOST_HEADER_BYTES = 16 * 1024
LAST_ANSWERS_S = 2
"""Seconds at the end for answers under way."""
PATIENCE_S = 10.0
"""Seconds in which a client sends its request, and takes something of an answer that waits for it."""


def bounded_server(app: ASGIApp, *, idle_s: int) -> uvicorn.Server:
    """Returns a server of an application, not yet running. `idle_s`: seconds that a connection is kept for
    another request."""
    return uvicorn.Server(
        uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", loop="asyncio", interface="asgi3",
            log_config=None, log_level="error", access_log=False, server_header=False, proxy_headers=False,
            backlog=MOST_CONNECTIONS, timeout_keep_alive=idle_s, timeout_graceful_shutdown=LAST_ANSWERS_S,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        )
    )  # fmt: skip


class BoundedProtocol(H11Protocol):
    """One connection. Whoever comes when all are taken is turned away, and whoever keeps us waiting is
    dropped."""

    patience_s = PATIENCE_S
    _look_again: asyncio.TimerHandle | None = None
    _waiting_bytes = 0
    """Bytes of the answer that waited for the client at the last look."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._look_again = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        reads_nothing = 0 < self._waiting_bytes <= waiting
        sends_nothing = not self.cycle or (self.cycle.more_body and not self.cycle.response_complete)
        if reads_nothing or sends_nothing:
            self.transport.abort()
            return
        self._waiting_bytes = waiting
        self._look_again = self.loop.call_later(self.patience_s, self._look)
