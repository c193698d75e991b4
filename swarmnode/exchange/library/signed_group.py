"""A group as its author signed it: one row of a library, on the wire, on disk, and in a file for others.

announcing.py, fetcher.py -> [SignedGroup] -> shelf.py -> [line_of] -> a file -> [read_rows] -> shelf.py, cli

A row is the sealed header and the body that it names by its hash. So every holder of a row can always check
without help that its author said exactly this about exactly this example: nobody can put words into another's
mouth. The row does not say what the answers are worth; judging them does (body_check.py).

A file is JSON with one row per line, so files can be joined, cut and filtered line by line. Task, version and
author can be read there; a row in which they differ from the signed ones is damaged. A line is bounded before
it is parsed, and a damaged one affects no other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES, MAX_NAME_CHARS, PROTOCOL
from swarmnode.exchange.messages import Header, decode_header, hash_body
from swarmnode.exchange.validation.body_check import open_body
from swarmnode.exchange.validation.header_check import open_header
from swarmnode.identity.envelope import Envelope, decoded
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS
from swarmnode.types import ExampleKey

MAX_LINE_BYTES = (MAX_BODY_BYTES + MAX_HEADER_BYTES) * 4 // 3 + 4096
"""Longest line: a row in base64 with its names."""

_envelopes = msgspec.msgpack.Decoder(Envelope)

GroupName = tuple[str, bytes]
"""The author and the body's hash, which name a group everywhere."""

Origin = tuple[str, ExampleKey]
"""The author and the example of an answer in a book."""


@dataclass(frozen=True, slots=True)
class SignedGroup:
    """A sealed header and its body, which belong together."""

    author: str
    header: Header
    sealed: bytes
    body: bytes

    @property
    def name(self) -> GroupName:
        return self.author, self.header.body_hash

    @property
    def origin(self) -> Origin:
        return self.author, self.header.key

    @property
    def size_bytes(self) -> int:
        return len(self.sealed) + len(self.body)


def signed_group(sealed: bytes, body: bytes) -> SignedGroup:
    """Returns the group of a sealed header and a body from any source. Raises Rejected if its signature,
    protocol, size or hash is wrong, or if the body belongs to another header."""
    author, header = open_header(sealed)
    if header.protocol != PROTOCOL:
        raise Rejected(Reason.OTHER_PROTOCOL, f"protocol {header.protocol}, this version reads {PROTOCOL}")
    if len(body) != header.body_bytes or hash_body(body) != header.body_hash:
        raise Rejected(Reason.WRONG_BODY, f"{len(body)} bytes that do not match its header")
    open_body(body, author, header)
    return SignedGroup(author, header, sealed, body)


def glance(sealed: bytes) -> tuple[str, Header]:
    """Returns the claimed author of a sealed header and the header itself, unchecked: recognizing a known one
    takes a tenth of the time of checking it. Raises Rejected."""
    if len(sealed) > MAX_HEADER_BYTES:
        raise Rejected(Reason.MALFORMED, f"{len(sealed)} bytes, at most {MAX_HEADER_BYTES}")
    envelope = decoded(_envelopes, sealed)
    return envelope.author, decode_header(envelope.payload)


# ---- as lines of a file ----

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class LibraryLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: the signed data, and before it what a person or `grep` reads."""

    task: Name
    version: Name
    author: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]
    header: Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)]


_decoder = msgspec.json.Decoder(LibraryLine)


def line_of(group: SignedGroup) -> bytes:
    """Returns a group as a line of a file, with its line break."""
    header = group.header
    line = LibraryLine(header.task, header.version, group.author, group.sealed, group.body)
    return msgspec.json.encode(line) + b"\n"


def read_line(line: bytes) -> SignedGroup:
    """Returns the group in a line. Raises Rejected, which says what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        raise Rejected(Reason.TOO_LARGE, f"a line of more than {MAX_LINE_BYTES} bytes")
    row = decoded(_decoder, line)
    group = signed_group(row.header, row.body)
    signed = group.header.task, group.header.version, group.author
    if (row.task, row.version, row.author) != signed:
        raise Rejected(Reason.BODY_MISMATCH, "its task, version or author differs from what was signed")
    return group


def read_rows(path: Path) -> Iterator[tuple[int, SignedGroup | Rejected]]:
    """Yields the number of each line of a file that is not empty, with its group or its fault. Raises
    OSError."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            cut = not line.endswith(b"\n")
            while cut and (rest := file.readline(MAX_LINE_BYTES)):
                cut = not rest.endswith(b"\n")
            if not line.strip():
                continue
            try:
                yield number, read_line(line.rstrip(b"\n"))
            except Rejected as rejected:
                yield number, rejected
