"""Servers of this machine's user: whoever floods one takes little from what else runs here.

page_server.py, serve_command.py -> [BoundedListener, BoundedServer] -> bounded_protocol.py

A connection above the limit is closed before anything is made for it, and a thread that has used more of a
core than its share rests; meanwhile clients wait in the kernel.
"""

import asyncio
import socket
import time
from selectors import DefaultSelector, SelectorKey
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from swarmnode.errors import PortInUse
from swarmnode.extensions.page.bounded_protocol import BoundedProtocol

MOST_CONNECTIONS = 64
MOST_WAITING = 1024
"""Connections that the kernel keeps for us: one that finds no place among them tries again a second later."""
TURNED_AWAY_AT_ONCE = 64
MOST_HEADER_BYTES = 16 * 1024
LAST_ANSWERS_S = 2
"""Seconds at the end for answers under way."""
AT_ONCE_S = 0.2
"""CPU time that it may use at once, after it has rested."""
LONGEST_REST_S = 1.5


class BoundedListener(socket.socket):
    """Listens, and turns away whoever comes when all connections are taken."""

    _open: tuple[socket.socket, ...] = ()

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next connection that there is a place for."""
        for _ in range(TURNED_AWAY_AT_ONCE):
            connection, address = super().accept()
            self._open = tuple(one for one in self._open if one.fileno() >= 0)
            if len(self._open) < MOST_CONNECTIONS:
                self._open += (connection,)
                return connection, address
            connection.close()
        raise ConnectionAbortedError  # The event loop asks again, after it has looked at the others.


class BoundedServer(uvicorn.Server):
    """A server whose thread uses no more than a share of a core."""

    def __init__(self, config: uvicorn.Config, core_share: float) -> None:
        super().__init__(config)
        self._core_share = core_share

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is told to end."""
        with asyncio.Runner(loop_factory=self._loop) as runner:
            runner.run(self.serve(sockets))

    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(_ThriftySelector(self._core_share))


class CpuAllowance:
    """The rest of a thread after what it has used, so that it keeps to its share of a core.

    >>> allowance = CpuAllowance(0.1, now_s=0.0, used_s=0.0)
    >>> allowance.rest_s(now_s=1.0, used_s=0.2), allowance.rest_s(now_s=2.0, used_s=0.32)
    (0.0, 0.2)
    """

    def __init__(self, core_share: float, now_s: float, used_s: float) -> None:
        self._core_share, self._left_s = core_share, AT_ONCE_S
        self._now_s, self._used_s = now_s, used_s

    def rest_s(self, now_s: float, used_s: float) -> float:
        """Returns the seconds to rest now. `used_s`: CPU time of the thread so far."""
        earned_s = self._core_share * (now_s - self._now_s)
        self._left_s = min(AT_ONCE_S, self._left_s + earned_s) - (used_s - self._used_s)
        rest_s = round(min(LONGEST_REST_S, max(0.0, -self._left_s / self._core_share)), 6)
        self._left_s = max(0.0, self._left_s)
        self._now_s, self._used_s = now_s + rest_s, used_s
        return rest_s


class _ThriftySelector(DefaultSelector):
    """Lets its thread rest before it waits."""

    def __init__(self, core_share: float) -> None:
        super().__init__()
        self._allowance = CpuAllowance(core_share, time.monotonic(), time.thread_time())

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if rest_s := self._allowance.rest_s(time.monotonic(), time.thread_time()):
            time.sleep(rest_s)
        return super().select(timeout)


def listen_on(host: str, port: int, said_by: str = "--port") -> BoundedListener:
    """Returns the socket of a server. `said_by`: the option that says the port. Raises PortInUse."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = BoundedListener(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(MOST_WAITING)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise PortInUse(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint=f"choose another {said_by}, or 0 for any free one",
        ) from error
    return listening


def url_of(host: str, listening: socket.socket) -> str:
    """Returns the address by which clients find a server.

    >>> with listen_on("127.0.0.1", 0) as listening:
    ...     url_of("::1", listening) == f"http://[::1]:{listening.getsockname()[1]}"
    True
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def bounded_server(app: ASGIApp, *, idle_s: int, core_share: float) -> BoundedServer:
    """Returns a server of an application, not yet running. `idle_s`: seconds that a connection is kept for
    another request. `core_share`: what it uses of one core in the long run."""
    config = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", lifespan="off", interface="asgi3", log_config=None,
        log_level="error", access_log=False, server_header=False, proxy_headers=False, backlog=MOST_WAITING,
        timeout_keep_alive=idle_s, timeout_graceful_shutdown=LAST_ANSWERS_S,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
    )  # fmt: skip
    return BoundedServer(config, core_share)
