"""The server of a node's page, in a thread of its own.

node/showing/page.py: open_page -> [PageServer] -> uvicorn -> bounded_protocol.py -> access.py -> routes.py
"""

import secrets
import socket
import threading
from types import TracebackType
from typing import Self

from swarmnode.errors import PortInUse
from swarmnode.extensions.page.access import AccessGuard
from swarmnode.extensions.page.bounded_protocol import MOST_CONNECTIONS, bounded_server
from swarmnode.extensions.page.event_stream import OpenStreams
from swarmnode.extensions.page.routes import application
from swarmnode.node.showing.page import PageSource

IDLE_S = 5
"""Seconds that a connection is kept for another request."""


class PageServer:
    """Serves the page of a node. `with PageServer(source) as page:` runs it."""

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._where = (source.config.node.http, source.config.node.http_port)
        self.token = secrets.token_urlsafe(32)
        """The secret of this start."""
        self._streams = OpenStreams()

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        host = self._where[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def __enter__(self) -> Self:
        self._socket = self._listen()
        guard = AccessGuard(
            application(self._source, self.token, self._streams),
            bound=self._where[0],
            own_name=socket.gethostname(),
            password=self._source.config.node.http_password.get_secret_value(),
            token=self.token,
        )
        self._server = bounded_server(guard, idle_s=IDLE_S)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="page", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._streams.closing = self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _listen(self) -> socket.socket:
        host, port = self._where
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(place)
                listening.listen(MOST_CONNECTIONS)
            except OSError:
                listening.close()
                raise
        except OSError as error:
            raise PortInUse(
                f"the page cannot listen on {host}:{port}: {error.strerror}",
                hint="choose another --set node.http_port=..., or 0 for any free one",
            ) from error
        return listening
