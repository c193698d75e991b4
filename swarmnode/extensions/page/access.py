"""Who may ask the page, and for what: Host, Origin, password and token are checked before anything answers.

request -> [AccessGuard] -> routes.py

A page of somebody else in a browser here may point a name of its own at our address (DNS rebinding) and read
our answers. So who asks must ask for us: by address, as localhost, or by the name in `node.http`. It
may also send a form here without reading the answer (CSRF). So a request that changes something carries the
token of this start, which only readers of our own pages know. /healthz says nothing worth protecting and
answers everybody, whatever a load balancer calls us.
"""

import asyncio
import base64
import hmac
import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnode.settings.config import is_loopback

TOKEN_HEADER = "X-Swarmnode-Token"
MOST_BODY_BYTES = 1024
"""Longest content of a request: the largest of ours has some fifty bytes."""
AFTER_WRONG_PASSWORD_S = 1.0

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Headers of every answer. Nothing of another site is loaded, and no other site can show or read this one."""

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
"""A Host header: a name or an address, IPv6 in brackets, and perhaps a port."""

Refusal = tuple[int, str]


class AccessGuard:
    """Lets requests through to an application, or refuses them."""

    def __init__(self, app: ASGIApp, *, bound: str, own_name: str, password: str, token: str) -> None:
        """`bound`: the setting node.http; `own_name`: the machine's. An empty password: none is asked for."""
        self._app = app
        self._bound, self._own_name = bound, own_name
        self._password, self._token = password, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self.refusal(Headers(scope=scope), scope["method"], scope["path"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if refusal is None:
            await self._app(scope, receive, send_with_headers)
            return
        code, why = refusal
        known = {"WWW-Authenticate": 'Basic realm="swarmnode", charset="UTF-8"'} if code == 401 else {}
        if code == 401 and "authorization" in Headers(scope=scope):
            await asyncio.sleep(AFTER_WRONG_PASSWORD_S)
        answer = PlainTextResponse(f"{why}\n", code, {**known, "Connection": "close"})
        await answer(scope, receive, send_with_headers)

    def refusal(self, headers: Headers, method: str, path: str) -> Refusal | None:
        """Returns the status and the reason with which a request is refused. None: it is not."""
        if path == "/healthz":
            return None
        refusal = refused_unread(headers, method, path, self._bound, self._own_name, MOST_BODY_BYTES)
        if refusal is not None:
            return refusal
        if method not in ("GET", "HEAD", "POST"):
            return 405, "GET or POST"
        if "Transfer-Encoding" in headers:
            return 413, "a request must state its Content-Length"
        has_token = equal(headers.get(TOKEN_HEADER, ""), self._token)
        if self._password and not has_token and not equal(_password_of(headers), self._password):
            return 401, "the password is node.http_password; any user name will do"
        if method == "POST" and not has_token:
            return 403, f"a request that changes something needs the header {TOKEN_HEADER}"
        return None


def refused_unread(
    headers: Headers, method: str, path: str, bound: str, own_name: str, most_bytes: int
) -> Refusal | None:
    """Returns why a request to a server of this machine's user is refused, whoever asks: by another name, of
    another site, or longer than this. None: it is not."""
    hosts = headers.getlist("Host")
    if len(hosts) != 1 or not asks_for_us(hosts[0], bound, own_name):
        return 421, "address this machine by its IP address or as localhost"
    if not _is_from_here(headers, hosts[0], method, path):
        return 403, "requests from other sites are refused"
    length = headers.get("Content-Length", "0")
    if not (length.isascii() and length.isdecimal() and len(length) < 9 and int(length) <= most_bytes):
        return 413, f"a request may have at most {most_bytes} bytes of content"
    return None


def asks_for_us(host: str, bound: str, own_name: str) -> bool:
    """Returns True if a Host header names this page. `bound` is the setting node.http, `own_name` the
    machine's.

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
    beyond_this_machine = not is_loopback(bound)
    if not _is_address(name):
        return beyond_this_machine and name == own_name.lower()
    return beyond_this_machine or is_loopback(name)


def _is_from_here(headers: Headers, host: str, method: str, path: str) -> bool:
    """Returns True for a request of one of our pages or of a program, and for a link to the page itself."""
    if "Origin" in headers:
        try:
            origin = urlsplit(headers["Origin"])
        except ValueError:
            return False
        if origin.scheme not in ("http", "https") or origin.netloc.lower() != host.lower():
            return False
    if headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return True
    is_link = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    return is_link and (method, path) == ("GET", "/")


def _password_of(headers: Headers) -> str:
    """Returns the password of Basic authentication; empty where there is none."""
    kind, _, encoded = headers.get("Authorization", "").partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except ValueError:  # No base64, or no text in it.
        return ""


def equal(given: str, wanted: str) -> bool:
    """Compares in a time that does not tell how much is right."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
