"""What the page answers.

access.py -> [application] -> overview.py, reward_history.py, rollout_reader.py, prometheus_metrics.py

GET /          the page                      GET /healthz   200 while the node lives
GET /state     what the page shows, as JSON  GET /status    NodeStatus as JSON
GET /rewards   the curves                    GET /metrics   the same numbers for Prometheus
GET /rollouts  those of a round              POST /control  {"request": "pause", "for_s": 7200}
GET /settings  with origins
"""

import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from swarmnode.extensions.page.access import MOST_BODY_BYTES
from swarmnode.extensions.page.overview import overview
from swarmnode.extensions.page.prometheus_metrics import metrics_of
from swarmnode.extensions.page.reward_history import RewardHistory
from swarmnode.extensions.page.rollout_reader import RolloutReader
from swarmnode.node.run_control import LONGEST_PAUSE_S, Request
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.node.showing.used_settings import used_settings

STATE_FOR_S = 1.0
"""Seconds for which a state is told to all who ask: many who look on cost one look at the node."""

STATIC = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of POST /control."""

    request: Request
    for_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_PAUSE_S)] | None = None
    """How long a pause lasts. None: until it is resumed."""


class PageRoutes:
    """The answers of one page."""

    def __init__(self, source: NodeSource, token: str) -> None:
        self._source, self._token = source, token
        status = source.status()
        self._history = RewardHistory(source.paths.logs, status.run, status.peer_id)
        self._rollouts = RolloutReader(source.rollouts)
        self._made, self._made_s = Response(), float("-inf")

    def routes(self) -> list[Route]:
        """Returns all of them."""
        static = [Route(path, _static(name, kind)) for path, (name, kind) in STATIC.items()]
        return [
            *static,
            Route("/healthz", _healthz),
            Route("/status", self._status),
            Route("/metrics", self._metrics),
            Route("/state", self._state),
            Route("/rewards", self._rewards),
            Route("/rollouts", self._rollouts_of),
            Route("/settings", self._settings),
            Route("/control", self._control, methods=["POST"]),
        ]

    async def _status(self, request: HttpRequest) -> Response:
        return _json(self._source.status())

    async def _settings(self, request: HttpRequest) -> Response:
        return _json(used_settings(self._source.config, self._source.origins))

    async def _metrics(self, request: HttpRequest) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(metrics_of(self._source.status()), media_type=kind)

    async def _state(self, request: HttpRequest) -> Response:
        now_s = time.monotonic()
        if now_s >= self._made_s + STATE_FOR_S:
            self._history.read()
            self._made = _json({**overview(self._source, self._history), "token": self._token})
            self._made_s = now_s
        return self._made

    async def _rewards(self, request: HttpRequest) -> Response:
        self._history.read()
        return _json(self._history.curves())

    async def _rollouts_of(self, request: HttpRequest) -> Response:
        asked = request.query_params.get("round")
        if asked is not None and not (asked.isascii() and asked.isdecimal() and len(asked) < 16):
            return PlainTextResponse("round must be a whole number\n", 400)
        wanted = None if asked is None else int(asked)
        return _json(self._rollouts.at(wanted))

    async def _control(self, request: HttpRequest) -> Response:
        content = b""
        async for piece in request.stream():
            content += piece
            if len(content) > MOST_BODY_BYTES:
                return PlainTextResponse("too long\n", 413)
        try:
            asked = msgspec.json.decode(content, type=ControlRequest)
            self._made_s = float("-inf")  # Who pressed a button sees at once what it did.
            return _json({"answer": self._source.control.ask(asked.request, asked.for_s)})
        except (msgspec.DecodeError, ValueError) as error:
            return PlainTextResponse(f"{error}\n", 400)


def application(source: NodeSource, token: str) -> Starlette:
    """Returns the application of a page. `token`: the secret of this start, which /state tells."""
    return Starlette(routes=PageRoutes(source, token).routes())


async def _healthz(request: HttpRequest) -> Response:
    return PlainTextResponse("ok\n")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _static(name: str, kind: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    content = (files("swarmnode.extensions.page") / "static" / name).read_bytes()

    async def answer(request: HttpRequest) -> Response:
        return Response(content, media_type=kind)

    return answer
