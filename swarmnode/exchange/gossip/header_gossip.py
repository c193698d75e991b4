"""The gossip of an exchange: hands every message of its topics to their hearers.

Publisher -> Host.publish -> topic /swarmnode/4/<swarm>/rollouts/0 -> [HeaderGossip.run] -> Inbox -> pool
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from swarmnode.exchange.limits import PROTOCOL
from swarmnode.network.host import Host, Message, Subscription

logger = logging.getLogger(__name__)

Hear = Callable[[Message], None]


def topic_of(swarm: str) -> str:
    """Returns the topic of a swarm's headers.

    >>> topic_of("commons")
    '/swarmnode/4/commons/rollouts/0'
    """
    return f"/swarmnode/{PROTOCOL}/{swarm}/rollouts/0"


def receipts_topic_of(swarm: str) -> str:
    """Returns the topic of a swarm's receipts.

    >>> receipts_topic_of("commons")
    '/swarmnode/4/commons/receipts/0'
    """
    return f"/swarmnode/{PROTOCOL}/{swarm}/receipts/0"


class HeaderGossip:
    """Listens to topics. Subscriptions survive a restart of the host."""

    def __init__(self, host: Host, hearers: Mapping[str, Hear]) -> None:
        """`hearers`: the function called with each message, by topic."""
        self._host = host
        self._hearers = hearers
        self._subscriptions: dict[str, Subscription] = {}

    async def subscribe(self) -> None:
        """Subscribes to the topics that we are not on yet. Raises NetworkError."""
        for topic in self._hearers.keys() - self._subscriptions.keys():
            self._subscriptions[topic] = await self._host.subscribe(topic)

    async def run(self) -> None:
        """Listens to all subscribed topics until cancelled or until the host is closed."""
        async with asyncio.TaskGroup() as listeners:
            for topic, subscription in self._subscriptions.items():
                listeners.create_task(
                    self._listen(subscription, self._hearers[topic]), name=f"listen {topic}"
                )

    async def _listen(self, subscription: Subscription, hear: Hear) -> None:
        try:
            async for message in subscription:
                try:
                    hear(message)
                except Exception:
                    # The peer boundary: whatever a message does to us, the next one is still heard.
                    logger.exception("failed to handle a message from %s", message.sender)
                # A full queue yields message after message without a pause; other tasks must run too.
                await asyncio.sleep(0)
        finally:
            await subscription.aclose()
