"""Bytes received on each TCP connection of the daemon, as the Linux kernel counts them.

[received_bytes] -> traffic.py
"""

import socket
import struct
import sys
from collections.abc import Iterator

Connection = tuple[int, str, int]
"""A TCP connection: (local port, remote address, remote port)."""

_AF_NETLINK = 16

_SOCK_DIAG = 4

_SOCK_DIAG_BY_FAMILY = 20

_REQUEST_DUMP = 0x301

_DONE, _ERROR = 3, 2

_ESTABLISHED = 1 << 1

_INFO = 2

_BYTES_RECEIVED_AT = 128
"""Offset of the received bytes in `struct tcp_info`, since Linux 4.1."""

_HEADER = struct.Struct("=IHHII")

_ATTRIBUTE = struct.Struct("=HH")

_MESSAGE_BYTES = 72
"""Size of `struct inet_diag_msg`."""

_TIMEOUT_S = 0.2

_MAX_READS = 256
"""Most reads of 64 KiB, each with several hundred connections: an endless answer is refused."""


def received_bytes(local_ports: frozenset[int]) -> dict[Connection, int] | None:
    """Returns the bytes received so far on every established connection to one of our ports. None:
    unknown."""
    if sys.platform != "linux" or not local_ports:
        return None
    try:
        return {
            connection: size_bytes
            for family in (socket.AF_INET, socket.AF_INET6)
            for connection, size_bytes in _connections(family)
            if connection[0] in local_ports
        }
    except (OSError, struct.error):
        return None


def _connections(family: int) -> Iterator[tuple[Connection, int]]:
    request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
    with socket.socket(_AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(header + request)
        for _ in range(_MAX_READS):
            for kind, body in _messages(kernel.recv(65536)):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not tell")
                found = _read(family, body)
                if found is not None:
                    yield found
    raise OSError("the kernel does not come to an end")


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        size_bytes, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, data[at + _HEADER.size : at + size_bytes]
        at += max(_HEADER.size, (size_bytes + 3) & ~3)


def _read(family: int, body: bytes) -> tuple[Connection, int] | None:
    local_port, remote_port = struct.unpack_from(">HH", body, 4)
    address = body[24 : 24 + (4 if family == socket.AF_INET else 16)]
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(body):
        size_bytes, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INFO and size_bytes >= _ATTRIBUTE.size + _BYTES_RECEIVED_AT + 8:
            (count,) = struct.unpack_from("=Q", body, at + _ATTRIBUTE.size + _BYTES_RECEIVED_AT)
            return (local_port, socket.inet_ntop(family, address), remote_port), count
        at += max(_ATTRIBUTE.size, (size_bytes + 3) & ~3)
    return None
