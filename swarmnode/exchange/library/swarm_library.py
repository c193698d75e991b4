"""A node's part in the swarm's library: keep what it learnt from, lend it, and borrow from others.

Exchange (publish, accept) -> shelf.py;   node.py -> [SwarmLibrary.settle, .draw] -> rounds, status
host -> library_pages.py -> shelf.py;   [SwarmLibrary.run] -> borrower.py
"""

import asyncio
from collections.abc import Collection

from swarmnode.exchange.bodies.body_transfer import BodyTransfer
from swarmnode.exchange.bodies.fetcher import Fetcher
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.library.borrower import Borrower
from swarmnode.exchange.library.library_pages import LibraryPages
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import Origin


class SwarmLibrary(Borrower):
    """An exchange's part in the library: it borrows, and keeps and lends what it learnt from. The exchange
    loads, serves and runs it."""

    def __init__(
        self, shelf: Shelf, context: ExchangeContext, bodies: BodyTransfer, fetcher: Fetcher
    ) -> None:
        super().__init__(context, LibraryPages(context, shelf, bodies), shelf, bodies, fetcher)
        self.shelf = shelf
        self._settled = asyncio.Event()
        self._versions = [(task.name, task.version) for task in context.tasks.values()]

    @property
    def pages_served(self) -> int:
        """Pages given to others."""
        return self._pages.served

    def settle(self, taught: Collection[Origin]) -> None:
        """Takes note of whose answers to which examples the book holds. Nothing is borrowed before."""
        self.shelf.settle(taught, self._versions)
        self._settled.set()

    async def load(self) -> None:
        """Read what the home has."""
        await asyncio.to_thread(self.shelf.load)

    async def serve(self) -> None:
        """Starts to answer requests. Raises NetworkError."""
        await self._pages.serve()

    async def write(self) -> None:
        """Bring the file in the home up to date."""
        await self.shelf.write()

    async def run(self) -> None:
        """Borrow, and keep the file up to date, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.shelf.run(), name="keep the library")
            await self._settled.wait()
            tasks.create_task(super().run(), name="borrow from libraries")
