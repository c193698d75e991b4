"""Peers try whether we can be dialled; the network stack's own word on it is not trusted."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarmnode.errors import NetworkError
from swarmnode.network.framing import encode_frame, protobuf_fields, read_frame
from swarmnode.network.host import Host
from swarmnode.network.multiaddr import by_reach, is_for_outsiders, parse_address, peer_id_to_bytes

logger = logging.getLogger(__name__)

PROTOCOL = "/swarmnode/dialback/1"
MAX_QUESTION_BYTES = 8
MAX_ANSWER_BYTES = 128

DIAL_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = DIAL_TIMEOUT_S + 3.0

WINDOW_S = 10.0
MAX_PER_ASKER = 2
MAX_PER_ADDRESS = 8
MAX_IN_ALL = 32
"""Within the window: most questions of one peer, most dials to one address, and most of either in all."""

Outcome = Literal["reached", "silent", "refused"]
"""Result of a try. reached: we answered. silent: nobody answered, or somebody else. refused: nobody was
dialled."""

Answers = Callable[[str, int, str], Awaitable[bool]]
"""Called with (IP address, TCP port, peer id); returns True if this peer answers there."""


class _Question(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class DialReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The report of a peer on its try to dial us."""

    outcome: Outcome
    seen: Annotated[str, msgspec.Meta(max_length=45)] = ""
    """IP address that the peer sees us at. Empty: it sees none that can be dialled."""

    def __post_init__(self) -> None:
        if self.seen:
            ipaddress.ip_address(self.seen)  # What comes after it would be part of an address of ours.


_questions = msgspec.msgpack.Decoder(_Question)
_answers = msgspec.msgpack.Decoder(DialReport)


class DialBack:
    """Asks peers to try our port, and tries theirs."""

    def __init__(
        self, host: Host, *, answers: Answers | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host
        self._answers = answers or answers_as
        self._clock = clock
        self._asked: deque[tuple[float, str]] = deque()
        self._dials: deque[tuple[float, str]] = deque()

    async def serve(self) -> None:
        """Answers the questions of other peers from now on. Raises NetworkError."""
        await self._host.serve(PROTOCOL, self.answer, max_request_bytes=MAX_QUESTION_BYTES)

    async def ask(self, peer: str, port: int) -> DialReport | None:
        """Returns the result of a peer's try to dial a port of ours. None: it does not say. Raises
        HostDown."""
        question = msgspec.msgpack.encode(_Question(port))
        try:
            answer = await self._host.request(
                peer, PROTOCOL, question, timeout_s=ASK_TIMEOUT_S, max_response_bytes=MAX_ANSWER_BYTES
            )
            told = _answers.decode(answer)
            return told if not told.seen or public_ip(address_of(told.seen)) else None
        except (NetworkError, msgspec.MsgspecError) as error:
            logger.debug("%s did not say whether we can be reached: %s", peer, error)
            return None

    async def answer(self, peer: str, request: bytes) -> bytes:
        """Returns the result of dialling a peer's port; empty for a malformed question."""
        try:
            port = _questions.decode(request).port
        except msgspec.MsgspecError as error:
            logger.debug("a question from %s is invalid: %s", peer, error)
            return b""
        if not _has_room(self._asked, peer, MAX_PER_ASKER, self._clock()):
            return msgspec.msgpack.encode(DialReport("refused"))
        ends = (await self._host.far_ends()).get(peer, ())
        seen = next((ip for end in by_reach(ends) if (ip := public_ip(end)) is not None), "")
        if not seen or not _has_room(self._dials, seen, MAX_PER_ADDRESS, self._clock()):
            return msgspec.msgpack.encode(DialReport("refused", seen))
        found = await self._answers(seen, port, peer)
        return msgspec.msgpack.encode(DialReport("reached" if found else "silent", seen))


def _has_room(taken: deque[tuple[float, str]], by: str, most: int, now: float) -> bool:
    """Takes a place in the window and returns True; False if `most` of one asker or MAX_IN_ALL are taken."""
    while taken and taken[0][0] <= now - WINDOW_S:
        taken.popleft()
    if len(taken) >= MAX_IN_ALL or sum(by == one for _, one in taken) >= most:
        return False
    taken.append((now, by))
    return True


def public_ip(address: str) -> str | None:
    """Returns the IP address of a far end if it is public and no relay's, else None.

    >>> public_ip("/ip4/203.0.113.9/tcp/4001"), public_ip("/ip4/192.168.1.20/tcp/4001")
    ('203.0.113.9', None)
    """
    kind, host = parse_address(address)[0]
    return host if kind in ("ip4", "ip6") and is_for_outsiders(address) else None


def address_of(ip: str, port: int | None = None) -> str:
    """Returns the address of a TCP port, or of the machine.

    >>> address_of("2001:db8::7", 4001)
    '/ip6/2001:db8::7/tcp/4001'
    """
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}" + (f"/tcp/{port}" if port else "")


# ---- who answers at an address ----

MAX_HELLO_BYTES = 1024
"""Messages before anything is encrypted are short."""

_NOISE = b"Noise_XX_25519_ChaChaPoly_SHA256"
_SIGNED = b"noise-libp2p-static-key:"
_ED25519 = bytes.fromhex("08011220")
_TAG_BYTES = 16


async def answers_as(ip: str, port: int, peer_id: str) -> bool:
    """Returns True if the libp2p host at this TCP port has the identity `peer_id` (Ed25519)."""
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(ip, port)
            try:
                return await _proves(reader, writer, peer_id)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, EOFError, NetworkError, InvalidTag, InvalidSignature, ValueError) as error:
        logger.debug("%s does not answer at %s port %d: %s", peer_id, ip, port, error)
        return False


async def _proves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> bool:
    for protocol in (b"/multistream/1.0.0\n", b"/noise\n"):
        writer.write(encode_frame(protocol))
        if await read_frame(reader, MAX_HELLO_BYTES) != protocol:
            return False
    ours = X25519PrivateKey.generate()
    first = ours.public_key().public_bytes_raw()
    writer.write(len(first).to_bytes(2, "big") + first)
    second = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
    static, payload = open_second_message(ours, second)
    fields = protobuf_fields(payload)
    identity, signature = fields.get(1), fields.get(2)
    if not isinstance(identity, bytes) or not isinstance(signature, bytes):
        return False
    if not identity.startswith(_ED25519) or peer_id_to_bytes(peer_id) != bytes((0, len(identity))) + identity:
        return False
    Ed25519PublicKey.from_public_bytes(identity[len(_ED25519) :]).verify(signature, _SIGNED + static)
    return True


def open_second_message(ours: X25519PrivateKey, message: bytes) -> tuple[bytes, bytes]:
    """Returns the responder's static key and its payload, out of the second message of Noise XX.

    `ours` is the ephemeral key of the first message. Raises InvalidTag for whoever does not have the static
    key, ValueError for a message that is too short.
    """
    if len(message) < 32 + 32 + 2 * _TAG_BYTES:
        raise ValueError("the handshake is cut off")
    theirs, sealed_static, sealed = message[:32], message[32 : 64 + _TAG_BYTES], message[64 + _TAG_BYTES :]
    chain = seen = _NOISE
    # The empty prologue, our ephemeral key, its empty payload, and their ephemeral key.
    for data in (b"", ours.public_key().public_bytes_raw(), b"", theirs):
        seen = hashlib.sha256(seen + data).digest()
    chain, key = _next_key(chain, ours.exchange(X25519PublicKey.from_public_bytes(theirs)))
    static = ChaCha20Poly1305(key).decrypt(bytes(12), sealed_static, seen)
    seen = hashlib.sha256(seen + sealed_static).digest()
    _, key = _next_key(chain, ours.exchange(X25519PublicKey.from_public_bytes(static)))
    return static, ChaCha20Poly1305(key).decrypt(bytes(12), sealed, seen)


def _next_key(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Returns the next chaining key and the cipher key (HKDF of the Noise specification, 4.3)."""
    root = hmac.digest(chain, secret, "sha256")
    first = hmac.digest(root, b"\x01", "sha256")
    return first, hmac.digest(root, first + b"\x02", "sha256")
