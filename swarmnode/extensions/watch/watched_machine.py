"""One machine that is watched: a thread of its own asks it, so that none waits for another.

watch_command.py -> [WatchedMachine] -> the page of each policy there: GET /status
                           `-> [Seen] -> watch_command.py: the table

What answers may be anything: its time and its size are bounded, it is not followed elsewhere, and whoever
shows it has its text made printable.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running
from swarmnode.node.showing.node_status import NodeStatus

ASK_S = 5.0
"""Longest time for one answer."""
MOST_BYTES = 2**20
"""A status has some ten thousand bytes."""


@dataclass(frozen=True, slots=True)
class WatchedPage:
    """A page that is asked."""

    host: str
    port: int
    path: str = "/status"
    is_tls: bool = False
    headers: Mapping[str, str] | None = None


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

    def __init__(self, name: str, pages: Callable[[], Sequence[WatchedPage]], every_s: float) -> None:
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


def ask(page: WatchedPage) -> NodeStatus:
    """Returns the status that a page tells. Raises SwarmnodeError."""
    until = time.monotonic() + ASK_S
    kind = HTTPSConnection if page.is_tls else HTTPConnection
    try:
        with closing(kind(page.host, page.port, timeout=ASK_S)) as connection:
            connection.request("GET", page.path, headers=dict(page.headers or {}))
            answer = connection.getresponse()
            if answer.status in (401, 403):
                raise SwarmnodeError("it wants another password")
            if answer.status != 200:
                raise SwarmnodeError(f"it answers {answer.status} {answer.reason}")
            content = bytearray()
            while piece := answer.read1(2**16):
                content += piece
                if len(content) > MOST_BYTES or time.monotonic() > until:
                    raise SwarmnodeError("its answer is too long, or takes too long")
            return msgspec.json.decode(content, type=NodeStatus)
    except msgspec.DecodeError:
        raise SwarmnodeError("it is no node, or one of another version") from None
    except (OSError, HTTPException, ValueError) as error:
        raise SwarmnodeError(f"no answer: {error or type(error).__name__}") from None


def watched(text: str, password: str, every_s: float) -> WatchedMachine:
    """Returns the machine that a word names: the home of a node here, or the address of its page elsewhere.
    Raises ConfigError."""
    home = Path(text).expanduser()
    if home.is_dir():
        return WatchedMachine(text, lambda: pages_of(home), every_s)
    page = page_at(text, password)
    name = f"{page.host}:{page.port}{page.path.removesuffix('/status')}"
    return WatchedMachine(name, lambda: [page], every_s)


def pages_of(home: Path) -> list[WatchedPage]:
    """Returns the pages of all policies that run in a home now. Raises SwarmnodeError if there is none."""
    places = resolve_paths(home).policies()
    notes = [note for place in places if (note := read_running(place.running)) is not None]
    pages = [
        WatchedPage(note.http_host, note.http_port, headers={"X-Swarmnode-Token": note.token})
        for note in notes
        if note.http_port
    ]
    if not pages:
        raise SwarmnodeError("its page is off (node.page)" if notes else "no node runs here")
    return pages


def page_at(address: str, password: str = "") -> WatchedPage:
    """Returns the page at an address. A password in it goes before the other. Raises ConfigError.

    >>> page_at("otter.lan:8080"), page_at("https://[2001:db8::1]/node/").path
    (WatchedPage(host='otter.lan', port=8080, path='/status', is_tls=False, headers=None), '/node/status')
    """
    try:
        url = urlsplit(address if "://" in address else f"http://{address}")
        host, port = url.hostname, url.port
    except ValueError:
        host = port = url = None
    is_tls = url is not None and url.scheme == "https"
    if url is None or not host or url.scheme not in ("http", "https") or not (port or "://" in address):
        raise ConfigError(
            f"{address.rpartition('@')[2]} is neither a home of a node here nor an address of a page",
            hint="name a folder that exists, or HOST:PORT, or http://HOST:PORT as the node printed it",
        )
    secret = unquote(url.password or "") or password
    known = b64encode(f"watch:{secret}".encode()).decode()
    headers = {"Authorization": f"Basic {known}"} if secret else None
    return WatchedPage(
        host, port or (443 if is_tls else 80), f"{url.path.rstrip('/')}/status", is_tls, headers
    )
