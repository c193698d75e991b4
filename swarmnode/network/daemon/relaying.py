"""Relaying connections of peers that nobody can dial: the limits of our daemon as a relay, and their test."""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from swarmnode.errors import NetworkError
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.daemon.control_client import ControlClient, PeerAddresses
from swarmnode.network.daemon.daemon_process import (
    RELAY_BYTES,
    RELAY_CIRCUITS,
    RELAY_RESERVATIONS,
    RELAY_TIME_S,
    DaemonOptions,
    start_daemon,
)
from swarmnode.network.framing import encode_frame, protobuf_fields, read_frame
from swarmnode.network.multiaddr import format_address, parse_address

logger = logging.getLogger(__name__)

PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = bytes((0x08, 0x00))
"""A message of the protocol that holds the type RESERVE and nothing else."""

RELAY_IN_WORDS = (
    f"for {RELAY_RESERVATIONS} peers, {RELAY_CIRCUITS} circuits of each,"
    f" {RELAY_BYTES / 2**30:g} GiB each way or {RELAY_TIME_S // 60} min a circuit"
)
"""Limits of our relay, in words."""

MAX_REPLY_BYTES = 4096
ASK_TIMEOUT_S = 5.0

_LIMIT, _STATUS = 4, 5
_OK = 100
_TIME, _BYTES = 1, 2


async def grants_what_was_asked(relay: PeerAddresses, folder: Path) -> bool:
    """Returns True if a relay on this machine grants the limits that we asked for. `folder` holds a socket
    and a key for the test."""
    path, socket = folder / "tester.key", folder / "tester.sock"
    try:
        async with AsyncExitStack() as exit_stack:
            path.touch(mode=0o600)
            path.write_bytes(NodeKey.generate().to_protobuf())
            socket.unlink(missing_ok=True)
            tester = await start_daemon(
                DaemonOptions(path, ("/ip4/127.0.0.1/tcp/0",), ()), socket, on_exit=lambda: None
            )
            exit_stack.push_async_callback(tester.kill)
            control = ControlClient(socket)
            await control.connect(relay, ASK_TIMEOUT_S)
            async with asyncio.timeout(ASK_TIMEOUT_S):
                granted = await _reserve(control, relay.peer_id)
    except (NetworkError, OSError, EOFError, TimeoutError) as error:
        logger.debug("cannot test the relay: %s", error)
        return False
    logger.debug("as a relay we allow %s (seconds, bytes)", granted)
    return granted == (RELAY_TIME_S, RELAY_BYTES)


async def _reserve(control: ControlClient, peer_id: str) -> tuple[int, int] | None:
    reader, writer = await control.open_stream(peer_id, PROTOCOL, ASK_TIMEOUT_S)
    try:
        writer.write(encode_frame(RESERVE))
        await writer.drain()
        return limits_of(await read_frame(reader, MAX_REPLY_BYTES))
    finally:
        writer.transport.abort()


def limits_of(reply: bytes) -> tuple[int, int] | None:
    """Returns the seconds and bytes that a reservation allows each circuit (0: no limit), or None if it was
    refused.

    Raises NetworkError for anything but a reply.

    >>> limits_of(bytes.fromhex("080222060878108080082864"))
    (120, 131072)
    """
    fields = protobuf_fields(reply)
    if fields.get(_STATUS) != _OK:
        return None
    limit = fields.get(_LIMIT, b"")
    if not isinstance(limit, bytes):
        raise NetworkError("the reply of a relay is malformed")
    limits = protobuf_fields(limit)
    seconds, size_bytes = limits.get(_TIME, 0), limits.get(_BYTES, 0)
    if isinstance(seconds, bytes) or isinstance(size_bytes, bytes):
        raise NetworkError("the reply of a relay is malformed")
    return seconds, size_bytes


def on_this_machine(address: str) -> str:
    """Returns the address at which a program on this machine dials a listening address.

    >>> on_this_machine("/ip4/0.0.0.0/tcp/4001")
    '/ip4/127.0.0.1/tcp/4001'
    """
    (kind, host), *rest = parse_address(address)
    return format_address(((kind, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)), *rest))
