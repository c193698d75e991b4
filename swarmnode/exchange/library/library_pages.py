"""A node's library on the wire: pages of signed headers, by task version, with small bodies beside them.

request -> [LibraryPages.answer] -> Shelf.page -> sealed headers in the order of their bodies' hashes
borrower.py -> [LibraryPages.ask] -> a peer   larger bodies: body_transfer.py, by hash, as of groups announced

A page names groups by the headers that their authors signed, so the serving peer can leave groups out but do
nothing else. The asking peer names the hash to go on from, so a page needs no memory of earlier ones, and any
part of a library can be read from any place. Requests come out of a peer's allowance for bodies, and pages
out of the same cap on our upload.
"""

import logging
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import MessageTooLarge, NetworkError, Rejected, RequestTimeout
from swarmnode.exchange.bodies.body_transfer import HASH_BYTES, BodyTransfer
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import MAX_HEADER_BYTES
from swarmnode.exchange.messages import Name
from swarmnode.identity.envelope import decoded

logger = logging.getLogger(__name__)

LIBRARY_PROTOCOL = "/swarmnode/library/1"

MAX_PAGE_HEADERS = 64
"""Most headers on one page; most have 300 bytes."""

MAX_BODY_BESIDE = 1024
"""Bodies up to this size are sent beside their header: asking for each costs more than receiving it twice."""

MAX_PAGE_BYTES = MAX_PAGE_HEADERS * (MAX_HEADER_BYTES + MAX_BODY_BESIDE + 16) + 64

MAX_PAGE_REQUEST_BYTES = 512


class PageRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request for one page."""

    task: Name
    version: Name
    after: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""
    """The page begins with the first group whose hash comes after this one."""


class PageRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group on a page."""

    sealed: Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
    """Its header."""
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BESIDE)] = b""
    """Its body, if that is small. Empty: the body must be asked for by its hash."""


class LibraryPage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One page."""

    rows: Annotated[tuple[PageRow, ...], Meta(max_length=MAX_PAGE_HEADERS)] = ()
    """Groups in the order of their bodies' hashes."""
    more: bool = False
    """True if there are further groups after the last of these."""


_requests = msgspec.msgpack.Decoder(PageRequest)

_pages = msgspec.msgpack.Decoder(LibraryPage)


def _row(group: SignedGroup) -> PageRow:
    return PageRow(group.sealed, group.body if len(group.body) <= MAX_BODY_BESIDE else b"")


class LibraryPages:
    """Serves the pages of a shelf, and asks others for theirs."""

    def __init__(self, context: ExchangeContext, shelf: Shelf, bodies: BodyTransfer) -> None:
        self._host, self._ledger, self._swarm = context.host, context.ledger, context.settings.swarm
        self._shelf, self._bodies = shelf, bodies
        self.served = 0
        """Pages given to others."""

    async def serve(self) -> None:
        """Starts answering requests. Raises NetworkError."""
        await self._host.serve(LIBRARY_PROTOCOL, self.answer, max_request_bytes=MAX_PAGE_REQUEST_BYTES)

    async def answer(self, peer: str, request: bytes) -> bytes:
        """Returns the page that a peer asks for, or nothing."""
        if not self._bodies.admit_request(peer):
            return b""
        try:
            wanted = decoded(_requests, request, Reason.BAD_REQUEST)
        except Rejected as rejected:
            self._ledger.drop(rejected.reason, peer, rejected.detail)
            return b""
        found, more = self._shelf.page(
            self._swarm, wanted.task, wanted.version, wanted.after, MAX_PAGE_HEADERS
        )
        page = LibraryPage(tuple(map(_row, found)), more)
        given = self._bodies.give(peer, msgspec.msgpack.encode(page))
        self.served += bool(given)
        return given

    async def ask(self, peer: str, request: PageRequest, *, timeout_s: float) -> LibraryPage:
        """Returns a page of a peer's library, as the peer gives it. Raises Rejected: unavailable, timeout,
        too_large, malformed."""
        try:
            data = await self._host.request(
                peer,
                LIBRARY_PROTOCOL,
                msgspec.msgpack.encode(request),
                timeout_s=timeout_s,
                max_response_bytes=MAX_PAGE_BYTES,
            )
        except MessageTooLarge as error:
            raise Rejected(Reason.TOO_LARGE, "a page over the size limit") from error
        except RequestTimeout as error:
            raise Rejected(Reason.TIMEOUT) from error
        except NetworkError as error:
            raise Rejected(Reason.UNAVAILABLE, str(error)) from error
        if not data:
            raise Rejected(Reason.UNAVAILABLE, "it is not giving us anything now")
        self._bodies.count_download(len(data))
        return decoded(_pages, data)
