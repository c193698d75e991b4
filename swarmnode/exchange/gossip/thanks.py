"""Receipts between nodes, as an exchange sees them; an extension sends and counts them.

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
"""A group that was learnt from: its author, its example, and the number of its answers that were learnt
from."""

NOTHING_SAVED = msgspec.Raw(msgspec.msgpack.encode(()))
"""Stands in a record for the receipts of a node that keeps none."""


class ReceiptKeeper(Protocol):
    """Receipts that we send to others, and that others send to us."""

    def note_learnt(self, taught: Iterable[Taught]) -> None:
        """Notes groups of others that we learnt from."""
        ...

    def note_given(self, task: str, answers: int) -> None:
        """Notes a group of ours that others may learn from."""
        ...

    def hear(self, message: Message) -> None:
        """Takes in a message of the receipts topic."""
        ...

    async def run(self) -> None:
        """Sends receipts from time to time, until cancelled."""
        ...

    def stats(self) -> ReceiptStats: ...

    def saved(self) -> msgspec.Raw:
        """Returns what must survive a restart, as msgpack."""
        ...

    def restore(self, data: msgspec.Raw) -> None:
        """Restores what an earlier run saved."""
        ...


def find_receipts(context: ExchangeContext) -> ReceiptKeeper | None:
    """Returns the installed receipt keeper of an exchange. None: no receipts are sent or heard."""
    make = first("receipts")
    return None if make is None else make(context)
