"""One machine that is watched: a thread of its own asks it, so that none waits for another.

watch_command.py -> [WatchedMachine] -> the page of each policy there: GET /status
                           `-> [Seen] -> watch_command.py: the table

What answers may be anything: page_client.py bounds it, and whoever shows it has its text made printable.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from swarmnode.cli.status import running_nodes
from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.page_client import PageAddress, fetch, page_of
from swarmnode.node.showing.node_status import NodeStatus


@dataclass(frozen=True, slots=True)
class Seen:
    """The knowledge of a machine at a moment."""

    statuses: tuple[NodeStatus, ...] = ()
    """Of each policy, as they were told last."""
    at: float | None = None
    """When that was, in seconds since the epoch. None: never."""
    problem: str = ""
    """Why nothing newer is known. Empty: the last question was answered."""


class WatchedMachine:
    """Asks a machine again and again, until `end`."""

    def __init__(self, name: str, pages: Callable[[], Sequence[PageAddress]], every_s: float) -> None:
        self.name, self._pages, self._every_s = name, pages, every_s
        self.seen = Seen()
        self.asked = threading.Event()
        """Set once the first question was answered, or was not."""
        self._ending = threading.Event()
        # A daemon: one that hangs in a dead line holds up no exit.
        self._thread = threading.Thread(target=self._run, name=f"watch {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Asks no further. The question that is on its way is left behind."""
        self._ending.set()

    def look(self) -> None:
        """Asks once."""
        try:
            found = tuple(map(ask, self._pages()))
            self.seen = Seen(found, time.time())
        except SwarmnodeError as error:
            self.seen = replace(self.seen, problem=error.message)
        self.asked.set()

    def _run(self) -> None:
        self.look()
        while not self._ending.wait(self._every_s):
            self.look()


def ask(page: PageAddress) -> NodeStatus:
    """Returns the status that a page tells. Raises SwarmnodeError."""
    try:
        code, content = fetch(page, "/status")
        if code in (401, 403):
            raise SwarmnodeError("wrong password")
        if code == 421:
            raise SwarmnodeError("it answers only to its IP address or its own host name")
        if code != 200:
            raise SwarmnodeError(f"it answered with status {code}")
        return msgspec.json.decode(content, type=NodeStatus)
    except msgspec.DecodeError:
        raise SwarmnodeError("it is not a node, or one of another version") from None
    except (OSError, HTTPException, ValueError) as error:
        raise SwarmnodeError(f"no answer: {error or type(error).__name__}") from None


def watched(text: str, password: str, every_s: float) -> WatchedMachine:
    """Returns the machine that a word names: the home of a node here, or the address of its page elsewhere.
    Raises ConfigError."""
    home = Path(text).expanduser()
    if home.is_dir():
        return WatchedMachine(text, lambda: pages_of(home), every_s)
    page = page_at(text, password)
    return WatchedMachine(f"{page.host}:{page.port}{page.path}", lambda: [page], every_s)


def pages_of(home: Path) -> list[PageAddress]:
    """Returns the pages of all policies that run in a home now. Raises SwarmnodeError if there is none."""
    pages = [page_of(note) for note in running_nodes(resolve_paths(home)) if note.http_port]
    if not pages:
        raise SwarmnodeError("its page is off (node.page)")
    return pages


def page_at(address: str, password: str = "") -> PageAddress:
    """Returns the page at an address. A password in it goes before the other. Raises ConfigError.

    >>> page_at("otter:8080"), page_at("https://[2001:db8::1]/node/").path
    (PageAddress(host='otter', port=8080, path='', is_tls=False, headers=None), '/node')
    """
    try:
        url = urlsplit(address if "://" in address else f"http://{address}")
        host, port = url.hostname, url.port
    except ValueError:
        host = port = url = None
    is_tls = url is not None and url.scheme == "https"
    if url is None or not host or url.scheme not in ("http", "https") or not (port or "://" in address):
        raise ConfigError(
            f"{address.rpartition('@')[2]} is neither the home of a node here nor the address of a page",
            hint="name a folder that exists, or HOST:PORT, or http://HOST:PORT as the node printed it",
        )
    secret = unquote(url.password or "") or password
    known = b64encode(f"watch:{secret}".encode()).decode()
    headers = {"Authorization": f"Basic {known}"} if secret else None
    return PageAddress(host, port or (443 if is_tls else 80), url.path.rstrip("/"), is_tls, headers)
