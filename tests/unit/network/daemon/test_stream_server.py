"""A listener that ends while somebody comes leaves no socket open."""

import asyncio
import gc
import socket
import warnings
from pathlib import Path

import pytest

from swarmnode.network.daemon.stream_server import close


async def test_a_stream_that_comes_as_the_listener_ends_is_closed(tmp_path: Path) -> None:
    path, ended = str(tmp_path / "streams.sock"), asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        ended.set()

    server = await asyncio.start_unix_server(accept, path)
    with socket.socket(socket.AF_UNIX) as comes, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        comes.connect(path)
        # The loop accepts it in the first turn, and would set it up in the second, after this task's.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await close(server)
        await ended.wait()
        await asyncio.sleep(0)
        gc.collect()
    assert [str(one.message) for one in told] == []


async def test_who_is_cancelled_while_it_stops_listening_has_stopped(tmp_path: Path) -> None:
    server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), str(tmp_path / "socket"))
    closing = asyncio.ensure_future(close(server))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not server.sockets
