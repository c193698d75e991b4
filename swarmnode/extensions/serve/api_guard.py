"""Who may ask the endpoints: Host, Origin and key are checked before anything is read.

uvicorn -> bounded_protocol.py -> [ApiGuard] -> api_routes.py

A web page of somebody else must neither ask (its Origin is another) nor have a name of its own pointed at us
(its Host is another). Whoever is on another machine brings the key.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarmnode.extensions.page.access import AFTER_WRONG_PASSWORD_S, asks_for_us, equal, is_from_here
from swarmnode.extensions.serve.api_routes import MOST_BODY_BYTES, refused_response
from swarmnode.extensions.serve.questions import NoAnswer


class ApiGuard:
    """Lets requests through to an application, or refuses them."""

    def __init__(self, app: ASGIApp, *, bound: str, own_name: str, key: str) -> None:
        """`bound`: the address that is listened on; `own_name`: the machine's. An empty key: none is asked
        for."""
        self._app = app
        self._bound, self._own_name, self._key = bound, own_name, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refused = self.refusal(headers, scope["method"], scope["path"])
        if refused is None:
            await self._app(scope, receive, send)
            return
        if refused.status == 401 and "authorization" in headers:
            await asyncio.sleep(AFTER_WRONG_PASSWORD_S)
        answer = refused_response(refused)
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)

    def refusal(self, headers: Headers, method: str, path: str) -> NoAnswer | None:
        """Returns what a request is refused with. None: it is not."""
        if path == "/healthz":
            return None
        hosts = headers.getlist("Host")
        if len(hosts) != 1 or not asks_for_us(hosts[0], self._bound, self._own_name):
            return NoAnswer(421, "ask for this machine by its address or as localhost", "wrong_host")
        if not is_from_here(headers, hosts[0], method, path):
            return NoAnswer(403, "this answers no web page of another site", "wrong_origin")
        length = headers.get("Content-Length", "0")
        if not (
            length.isascii() and length.isdecimal() and len(length) < 9 and int(length) <= MOST_BODY_BYTES
        ):
            return NoAnswer(413, f"a request has {MOST_BODY_BYTES} bytes or less", "too_large")
        kind, _, key = headers.get("Authorization", "").partition(" ")
        if self._key and not (kind.lower() == "bearer" and equal(key, self._key)):
            return NoAnswer(401, "the key is wrong, or missing: Authorization: Bearer KEY", "invalid_api_key")
        return None
