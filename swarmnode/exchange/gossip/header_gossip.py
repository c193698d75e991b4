"""Gossip of headers, on one topic for each shard of the tasks.

publish -> [HeaderGossip.announce] -> topic /swarmnode/3/<swarm>/rollouts/<shard> -> [run] -> Inbox -> pool

Headers are spread over shards by task, so a node hears only of tasks it could train on.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable

from swarmnode.errors import NetworkError
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.limits import PROTOCOL
from swarmnode.network.host import Host, Message, Subscription

logger = logging.getLogger(__name__)


def shard_of(task: str, shards: int) -> int:
    """The shard of a task; the same on every node."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big") % shards


def topic_of(swarm: str, shard: int) -> str:
    """The topic of a shard.

    >>> topic_of("commons", 0)
    '/swarmnode/3/commons/rollouts/0'
    """
    return f"/swarmnode/{PROTOCOL}/{swarm}/rollouts/{shard}"


def topics_to_listen_to(settings: ExchangeSettings, tasks: Iterable[str]) -> tuple[str, ...]:
    """The topics of our tasks, or those that the settings name."""
    shards = settings.listen_shards
    if shards is None:
        shards = {shard_of(task, settings.shards) for task in tasks}
    return tuple(topic_of(settings.swarm, shard) for shard in sorted(shards))


class HeaderGossip:
    """Announces sealed headers, and hands everything that is heard to `hear`."""

    def __init__(
        self, host: Host, settings: ExchangeSettings, topics: tuple[str, ...], hear: Callable[[Message], None]
    ) -> None:
        self._host = host
        self._settings = settings
        self._hear = hear
        self._subscriptions: dict[str, Subscription | None] = dict.fromkeys(topics)

    @property
    def overflowed(self) -> int:
        """Messages that the host dropped because we read too slowly."""
        return sum(subscription.dropped for subscription in self._subscriptions.values() if subscription)

    async def subscribe(self) -> bool:
        """Subscribe to the topics that we are not on yet; False when the host is down."""
        try:
            for topic, subscription in self._subscriptions.items():
                self._subscriptions[topic] = subscription or await self._host.subscribe(topic)
        except NetworkError as error:
            logger.info("not yet listening for rollouts: %s", error)
            return False
        return True

    async def run(self) -> None:
        """Listen to all topics, once subscribed, until cancelled or the host is closed."""
        async with asyncio.TaskGroup() as listeners:
            for topic, subscription in self._subscriptions.items():
                if subscription is not None:
                    listeners.create_task(self._listen(subscription), name=f"listen {topic}")

    async def announce(self, task: str, sealed: bytes) -> None:
        """Gossip a sealed header on the topic of its task. Raises NetworkError."""
        await self._host.publish(
            topic_of(self._settings.swarm, shard_of(task, self._settings.shards)), sealed
        )

    async def _listen(self, subscription: Subscription) -> None:
        try:
            async for message in subscription:
                self._hear_safely(message)
                # A full queue hands out message after message without a pause; others want to run too.
                await asyncio.sleep(0)
        finally:
            await subscription.aclose()

    def _hear_safely(self, message: Message) -> None:
        try:
            self._hear(message)
        except Exception:
            # The peer boundary: whatever a message does to us, the next one is heard.
            logger.exception("a header of %s could not be handled", message.sender)
