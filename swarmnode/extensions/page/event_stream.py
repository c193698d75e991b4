"""Server-sent events: the newest state, to whoever looks on.

overview.py -> [EventStream] -> a browser's EventSource

Nothing is queued: a reader that is slow gets the newest state when it can take it, and one that takes nothing
is dropped (bounded_protocol.py).
"""

import asyncio
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

EVERY_S = 1.0
ALIVE_EVERY_S = 15.0
"""A line is sent at least this often, so that a client that is gone is noticed."""
MOST_STREAMS = 16


LOOK_EVERY_S = 0.25
"""A stream ends this soon after the page."""


class OpenStreams:
    """The streams of a page: how many there are, and that they are to end."""

    def __init__(self) -> None:
        self.count = 0
        self.closing = False

    @property
    def full(self) -> bool:
        return self.count >= MOST_STREAMS


class EventStream(Response):
    """Sends what `read` returns whenever it has changed, as events without a name."""

    media_type = "text/event-stream"

    def __init__(self, read: Callable[[], bytes], streams: OpenStreams) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._read, self._streams = read, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.count += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.TaskGroup() as tasks:
                leaving = tasks.create_task(_left(receive))
                await self._send_until(leaving, send)
                leaving.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.count -= 1

    async def _send_until(self, leaving: asyncio.Task[None], send: Send) -> None:
        last, looked_s, sent_s = b"", float("-inf"), time.monotonic()
        while not (leaving.done() or self._streams.closing):
            now_s = time.monotonic()
            if now_s >= looked_s + EVERY_S:
                looked_s, content = now_s, self._read()
                is_due = now_s >= sent_s + ALIVE_EVERY_S
                if content != last or is_due:
                    event = b":\n\n" if content == last else b"data: " + content + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    last, sent_s = content, now_s
            await asyncio.sleep(LOOK_EVERY_S)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
