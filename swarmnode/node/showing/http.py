"""The status page of a running node, on this machine unless told otherwise.

node_status.py -> [http] -> `swarmnode status`, Prometheus, a health check

GET /healthz   200 while the node lives      GET /status    NodeStatus as JSON
GET /metrics   the same numbers for Prometheus

A page in a browser on this machine may point a name of its own at our address (DNS rebinding) and read our
answers. So who asks must ask for us: by address, as localhost, or by the name in `node.http`. /healthz says
nothing worth protecting and answers everybody, whatever a load balancer calls us.
"""

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from swarmnode.errors import PortInUse
from swarmnode.node.showing.node_status import NodeStatus, measurements

LABELLED = {
    "exchange.dropped": "reason",
    "exchange.unpublished": "reason",
    "exchange.trained": "peer",
    "reward.eval_tasks": "task",
    "reward.parts": "reward",
    "reward.parts_std": "reward",
    "network.skipped": "cause",
}
"""Maps in the status whose keys are labels, not metric names."""

CLIENT_TIMEOUT_S = 10.0

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
"""A Host header: a name or an address, IPv6 in brackets, and perhaps a port."""


class StatusServer:
    """Serves what `read` returns. `with StatusServer(...) as server:` runs it in a thread."""

    def __init__(self, read: Callable[[], NodeStatus], host: str, port: int) -> None:
        self._read = read
        self._where = (host, port)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def address(self) -> str:
        """The address for a browser on this machine."""
        host = self._where[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/status"

    def __enter__(self) -> Self:
        try:
            self._server = ThreadingHTTPServer(self._where, _handler(self._read, self._where[0]))
        except OSError as error:
            host, port = self._where
            raise PortInUse(
                f"the status page cannot listen on {host}:{port}: {error.strerror}",
                hint="choose another --set node.http_port=..., or 0 for any free one",
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="status-http", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class StatusCollector:
    """Turns one snapshot into Prometheus metrics."""

    def __init__(self, read: Callable[[], NodeStatus]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        status = self._read()
        labels = {
            "peer_id": status.peer_id,
            "name": status.name,
            "swarm": status.swarm,
            "model": status.model,
        }
        yield InfoMetricFamily("swarmnode", "Who this node is", value=labels)
        families: dict[str, GaugeMetricFamily] = {}
        for dotted, value in measurements(status).items():
            name, label, label_value = _split(dotted)
            if name not in families:
                names = [label] if label else []
                families[name] = GaugeMetricFamily(f"swarmnode_{name.replace('.', '_')}", name, labels=names)
            families[name].add_metric([label_value] if label else [], value)
        yield from families.values()


def asks_for_us(host: str, bound: str, own_name: str) -> bool:
    """Returns True if a Host header names this page. `bound` is the setting node.http, `own_name` our host.

    An address cannot be pointed elsewhere, a name can: of names only those pass that nobody else gave. The
    port does not matter: it may have been forwarded.

    >>> asks_for_us("127.0.0.1:80", "127.0.0.1", "otter"), asks_for_us("evil.example", "127.0.0.1", "otter")
    (True, False)
    >>> asks_for_us("192.0.2.7", "127.0.0.1", "otter"), asks_for_us("192.0.2.7", "0.0.0.0", "otter")
    (False, True)
    """
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match["name"].strip("[]").lower()
    if name in ("localhost", bound.lower()):
        return True
    beyond_this_machine = not _is_loopback(bound)
    if not _is_address(name):
        return beyond_this_machine and name == own_name.lower()
    return beyond_this_machine or _is_loopback(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _split(dotted: str) -> tuple[str, str, str]:
    for prefix, label in LABELLED.items():
        if dotted.startswith(f"{prefix}."):
            return prefix, label, dotted.removeprefix(f"{prefix}.")
    return dotted, "", ""


def _handler(read: Callable[[], NodeStatus], bound: str) -> type[BaseHTTPRequestHandler]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(read))  # pyright: ignore[reportArgumentType]
    pages: dict[str, tuple[str, Callable[[], bytes]]] = {
        "/healthz": ("text/plain", lambda: b"ok\n"),
        "/status": ("application/json", lambda: msgspec.json.encode(read())),
        "/metrics": ("text/plain; version=0.0.4; charset=utf-8", lambda: generate_latest(registry)),
    }

    own_name = socket.gethostname()

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            hosts = self.headers.get_all("Host", [])
            if self.path != "/healthz" and not (len(hosts) == 1 and asks_for_us(hosts[0], bound, own_name)):
                self._answer(421, "text/plain", b"ask for this page by its address or as localhost\n")
            elif self.path in pages:
                kind, body = pages[self.path]
                self._answer(200, kind, body())
            else:
                self._answer(404, "text/plain", b"see /healthz /status /metrics\n")

        def _answer(self, code: int, kind: str, content: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
