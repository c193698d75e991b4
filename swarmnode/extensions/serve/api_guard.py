"""Access to the endpoints: checks Host, Origin and key before anything is read.

uvicorn -> bounded_protocol.py -> [ApiGuard] -> api_routes.py

A web page of another site must not be able to ask (it has another Origin), nor may another site point a name
of its own at us (that is another Host). Clients on other machines need the key.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarmnode.extensions.page.access import AFTER_WRONG_PASSWORD_S, equal, refused_unread
from swarmnode.extensions.serve.api_routes import MOST_BODY_BYTES, refused_response
from swarmnode.extensions.serve.questions import NoAnswer

CODES = {403: "wrong_origin", 413: "too_large", 421: "wrong_host"}


class ApiGuard:
    """Lets requests through to an application, or refuses them."""

    def __init__(self, app: ASGIApp, *, bound: str, own_name: str, key: str) -> None:
        """`bound`: the address that we listen on. `own_name`: the machine's name. `key`: empty if no key is
        required."""
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
        """Returns the refusal of a request, or None if it is accepted."""
        if path == "/healthz":
            return None
        refused = refused_unread(headers, method, path, self._bound, self._own_name, MOST_BODY_BYTES)
        if refused is not None:
            return NoAnswer(*refused, CODES[refused[0]])
        kind, _, key = headers.get("Authorization", "").partition(" ")
        if self._key and not (kind.lower() == "bearer" and equal(key, self._key)):
            return NoAnswer(
                401, "the key is wrong or missing: send Authorization: Bearer KEY", "invalid_api_key"
            )
        return None
