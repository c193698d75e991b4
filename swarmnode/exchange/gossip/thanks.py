"""Thanks between nodes, as an exchange knows them; who says and counts them is an extension.

Exchange -> [find_receipts] -> registry.py -> extensions/contribution/receipts.py -> ReceiptStats -> status
"""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.exchange_stats import ReceiptStats
from swarmnode.network.host import Message
from swarmnode.registry import first
from swarmnode.types import ExampleKey

Taught = tuple[str, ExampleKey, int]
"""A group that was learnt from: its author, its example, and its answers that were."""

NOTHING_SAVED = msgspec.Raw(msgspec.msgpack.encode(()))
"""Stands in a record for the receipts of a node that keeps none."""


class ReceiptKeeper(Protocol):
    """Thanks of ours to others, and of others to us."""

    def learnt(self, taught: Iterable[Taught]) -> None:
        """Take note of groups of others that were learnt from."""
        ...

    def gave(self, task: str, answers: int) -> None:
        """Take note of a group of ours that others may learn from."""
        ...

    def hear(self, message: Message) -> None:
        """Take in a message of the receipts' topic."""
        ...

    async def run(self) -> None:
        """Thank others now and then, until cancelled."""
        ...

    def stats(self) -> ReceiptStats: ...

    def saved(self) -> msgspec.Raw:
        """Returns what is to outlive a restart, as msgpack."""
        ...

    def restore(self, data: msgspec.Raw) -> None:
        """Take up what an earlier life saved."""
        ...


def find_receipts(context: ExchangeContext) -> ReceiptKeeper | None:
    """Returns what is installed for an exchange. None: nobody is thanked, and no thanks are heard."""
    make = first("receipts")
    return None if make is None else make(context)
