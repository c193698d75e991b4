"""The bounded queue between a topic and its reader.

gossip -> memory_network.py | p2pd_host.py -> [MessageQueue] -> whoever called Host.subscribe
"""

import asyncio
from collections import deque
from collections.abc import Callable

from swarmnode.network.host import MAX_GOSSIP_BYTES, Message


def as_heard(topic: str, sender: str, data: bytes) -> Message:
    """Returns an incoming message in the form for a topic's reader.

    >>> as_heard("rollouts", "12D3KooWA", bytes(MAX_GOSSIP_BYTES + 1))
    Message(topic='rollouts', sender='12D3KooWA', data=b'', oversized=True)
    """
    if len(data) > MAX_GOSSIP_BYTES:
        return Message(topic, sender, b"", oversized=True)
    return Message(topic, sender, data)


class MessageQueue:
    """A `Subscription`. The host puts, one reader iterates; `on_close` tells the host to stop putting.

    A full queue drops its oldest message: fresh rollouts are worth more than stale ones.
    """

    def __init__(self, topic: str, queue_size: int, on_close: "Callable[[MessageQueue], None]") -> None:
        self.topic = topic
        self._messages: deque[Message] = deque(maxlen=queue_size)
        self._changed = asyncio.Event()
        self._on_close = on_close
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, message: Message) -> None:
        """Queues a message; without room, the oldest one is dropped."""
        if self._closed:
            return
        self._messages.append(message)
        self._changed.set()

    def close(self) -> None:
        """Ends the iteration; unread messages are discarded."""
        if not self._closed:
            self._closed = True
            self._changed.set()
            self._on_close(self)

    def __aiter__(self) -> "MessageQueue":
        return self

    async def __anext__(self) -> Message:
        while not self._closed and not self._messages:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise StopAsyncIteration
        return self._messages.popleft()

    async def aclose(self) -> None:
        self.close()
