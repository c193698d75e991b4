"""Questions to the page of a running node, here or elsewhere.

running.json -> [ask_page] -> [fetch] -> `swarmnode status`, pause, peers, report
HOST:PORT -> extensions/watch/ -> [fetch]

Whatever answers, its time and its size are bounded; it is followed nowhere, and no proxy stands between.
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
"""Between two tries."""
MOST_BYTES = 2**20
"""Largest answer; a status has some ten thousand bytes."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Address of a page, and the headers that let us in."""

    host: str
    port: int
    path: str = ""
    """Path that those of the page stand behind."""
    is_tls: bool = False
    headers: Mapping[str, str] | None = None


def page_of(note: RunningNode) -> PageAddress:
    """Returns the page of a node that runs on this machine."""
    return PageAddress(note.http_host, note.http_port, headers={"X-Swarmnode-Token": note.token})


def fetch(page: PageAddress, path: str, content: object = None) -> tuple[int, bytes]:
    """Returns the status and the content of an answer; with `content`, to a POST of it as JSON. Raises
    OSError, HTTPException, ValueError."""
    return _fetch_until(time.monotonic() + ANSWER_S, page, path, content)


def fetch_from_node(
    note: RunningNode, path: str, content: object = None, *, within_s: float = ANSWER_S
) -> tuple[int, bytes]:
    """Returns the same of a node that runs on this machine. Where too many ask it, it closes connections
    before it reads them: then it is asked again."""
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
    """Returns what the status page of a running node says, or why it says nothing: it may just have ended."""
    try:
        return msgspec.json.decode(ask_page(note, "/status", paths), type=NodeStatus)
    except SwarmnodeError as error:
        return error
    except msgspec.DecodeError as error:
        return SwarmnodeError(f"the node runs another version: {error}", hint="restart it")


def status_here(paths: Paths) -> NodeStatus | None:
    """Returns the status of the node that runs in this home. None: none does, or its page says nothing."""
    note = read_running(paths.running)
    status = None if note is None else ask_status(note, paths)
    return status if isinstance(status, NodeStatus) else None


def ask_page(note: RunningNode, path: str, paths: Paths, content: object = None) -> bytes:
    """Returns what the page of a running node answers; with `content`, to a POST of it as JSON. Raises
    SwarmnodeError if nobody answers, or the node refuses."""
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
