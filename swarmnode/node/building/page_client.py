"""Requests to the page of a running node, here or elsewhere.

running.json -> [ask_page] -> [fetch] -> `swarmnode status`, pause, peers, report
HOST:PORT -> extensions/watch/ -> [fetch]

Each answer is bounded in time and size. Redirects are not followed, and no proxy is used.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection

import msgspec

from swarmnode.errors import SwarmnodeError
from swarmnode.machine.storage import Paths
from swarmnode.node.building.node_process import RunningNode, read_running
from swarmnode.node.showing.node_status import NodeStatus

ANSWER_S = 5.0
"""Longest time for one answer."""
AGAIN_S = 0.1
"""Pause between two attempts."""
MOST_BYTES = 2**20
"""Largest answer; a status takes some ten thousand bytes."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """The address of a page, and the headers that grant access to it."""

    host: str
    port: int
    path: str = ""
    """Prefix of the page's paths."""
    is_tls: bool = False
    headers: Mapping[str, str] | None = None


def page_of(note: RunningNode) -> PageAddress:
    """Returns the address of the page of a node on this machine."""
    return PageAddress(note.http_host, note.http_port, headers={"X-Swarmnode-Token": note.token})


def fetch(page: PageAddress, path: str, content: object = None) -> tuple[int, bytes]:
    """Returns the status and the body of an answer. With `content`, it is POSTed as JSON. Raises OSError,
    HTTPException, ValueError."""
    return _fetch_until(time.monotonic() + ANSWER_S, page, path, content)


def fetch_from_node(
    note: RunningNode, path: str, content: object = None, *, within_s: float = ANSWER_S
) -> tuple[int, bytes]:
    """Returns the answer of a node on this machine, as `fetch` does. A node with too many requests closes
    connections before it reads them; then the request is repeated."""
    until = time.monotonic() + within_s
    while True:
        try:
            return _fetch_until(until, page_of(note), path, content)
        except (ConnectionResetError, BrokenPipeError):
            if time.monotonic() + AGAIN_S > until:
                raise
            time.sleep(AGAIN_S)


def _fetch_until(until: float, page: PageAddress, path: str, content: object) -> tuple[int, bytes]:
    headers = {**(page.headers or {}), "Content-Type": "application/json"}
    method, body = ("GET", None) if content is None else ("POST", msgspec.json.encode(content))
    kind = HTTPSConnection if page.is_tls else HTTPConnection
    with closing(kind(page.host, page.port, timeout=max(AGAIN_S, until - time.monotonic()))) as connection:
        connection.request(method, f"{page.path}{path}", body, headers)
        answer = connection.getresponse()
        found = bytearray()
        while piece := answer.read1(2**16):
            found += piece
            if len(found) > MOST_BYTES or time.monotonic() > until:
                raise HTTPException("its response is too long or too slow")
        return answer.status, bytes(found)


def ask_status(note: RunningNode, paths: Paths) -> NodeStatus | SwarmnodeError:
    """Returns the status of a running node, or the error why there is none: the node may just have ended."""
    try:
        return msgspec.json.decode(ask_page(note, "/status", paths), type=NodeStatus)
    except SwarmnodeError as error:
        return error
    except msgspec.DecodeError as error:
        return SwarmnodeError(f"the node runs another version: {error}", hint="restart it")


def status_here(paths: Paths) -> NodeStatus | None:
    """Returns the status of the node that runs in this home. None: none runs, or its page does not answer."""
    note = read_running(paths.running)
    status = None if note is None else ask_status(note, paths)
    return status if isinstance(status, NodeStatus) else None


def ask_page(note: RunningNode, path: str, paths: Paths, content: object = None) -> bytes:
    """Returns the answer of the page of a running node. With `content`, it is POSTed as JSON. Raises
    SwarmnodeError if nobody answers or the node refuses."""
    hint = f"see {paths.logs}/node.log"
    if not note.http_port:
        raise SwarmnodeError("this node has no page", hint=f"{hint}, and set node.page")
    try:
        status, answer = fetch_from_node(note, path, content)
    except (OSError, HTTPException, ValueError) as error:
        where = f"{note.http_host}:{note.http_port}"
        raise SwarmnodeError(f"no node responds at {where}: {error}", hint=hint) from error
    if status != 200:
        raise SwarmnodeError(f"the node refused: {answer[:1000].decode(errors='replace').strip()}")
    return answer
