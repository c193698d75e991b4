"""The status page of a running node, on this machine unless told otherwise.

status.py -> [http] -> `swarmnode status`, Prometheus, a health check

GET /healthz   200 while the node lives      GET /status    NodeStatus as JSON
GET /metrics   the same numbers for Prometheus
"""

import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from swarmnode.errors import PortInUse
from swarmnode.node.status import NodeStatus, measurements

LABELLED = {
    "exchange.dropped": "reason",
    "exchange.unpublished": "reason",
    "exchange.trained": "peer",
    "reward.eval_tasks": "task",
}
"""Maps in the status whose keys are labels, not metric names."""

CLIENT_TIMEOUT_S = 10.0


class StatusServer:
    """Serves what `read` returns. `with StatusServer(...) as server:` runs it in a thread."""

    def __init__(self, read: Callable[[], NodeStatus], host: str, port: int) -> None:
        self._read = read
        self._where = (host, port)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def __enter__(self) -> Self:
        try:
            self._server = ThreadingHTTPServer(self._where, _handler(self._read))
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


def _split(dotted: str) -> tuple[str, str, str]:
    for prefix, label in LABELLED.items():
        if dotted.startswith(f"{prefix}."):
            return prefix, label, dotted.removeprefix(f"{prefix}.")
    return dotted, "", ""


def _handler(read: Callable[[], NodeStatus]) -> type[BaseHTTPRequestHandler]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(read))  # pyright: ignore[reportArgumentType]
    pages: dict[str, tuple[str, Callable[[], bytes]]] = {
        "/healthz": ("text/plain", lambda: b"ok\n"),
        "/status": ("application/json", lambda: msgspec.json.encode(read())),
        "/metrics": ("text/plain; version=0.0.4; charset=utf-8", lambda: generate_latest(registry)),
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            kind, body = pages.get(self.path, ("text/plain", lambda: b"see /healthz /status /metrics\n"))
            content = body()
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
