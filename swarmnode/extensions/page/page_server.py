"""The server of a node's page, in a thread of its own.

node/showing/page.py: open_page -> [PageServer] -> bounded_server.py -> access.py -> routes.py
"""

import secrets
import socket
import threading
from typing import Self

from swarmnode.extensions.page.access import AccessGuard
from swarmnode.extensions.page.bounded_server import bounded_server, listen_on, url_of
from swarmnode.extensions.page.routes import application
from swarmnode.node.showing.node_source import NodeSource

IDLE_S = 5
"""Seconds that a connection is kept for another request."""
CORE_SHARE = 0.02
"""Some ten requests a second; whoever looks at the page needs a fifth of it. It runs in the process that
trains, where a busy thread costs the others about twice what it uses."""


class PageServer:
    """Serves the page of a node. `with PageServer(source) as page:` runs it."""

    def __init__(self, source: NodeSource) -> None:
        self._source = source
        self._where = (source.config.node.http, source.config.node.http_port)
        self.token = secrets.token_urlsafe(32)
        """The secret of this start."""

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"{url_of(self._where[0], self._socket)}/"

    def __enter__(self) -> Self:
        self._socket = listen_on(*self._where, "--set node.http_port=...")
        guard = AccessGuard(
            application(self._source, self.token),
            bound=self._where[0],
            own_name=socket.gethostname(),
            password=self._source.config.node.http_password.get_secret_value(),
            token=self.token,
        )
        self._server = bounded_server(guard, idle_s=IDLE_S, core_share=CORE_SHARE)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="page", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
