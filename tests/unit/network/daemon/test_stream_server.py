"""A listener that ends while somebody comes leaves no socket open."""

import asyncio
import gc
import socket
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarmnode.network.daemon.stream_server import listening


@contextmanager
def nothing_left_open() -> Generator[None, None, None]:
    gc.collect()  # What tests before have left is not ours.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(one.message) for one in told] == []


async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_a_stream_that_comes_as_the_listener_ends_is_closed(tmp_path: Path) -> None:
    path, ended = tmp_path / "streams.sock", asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        ended.set()

    with socket.socket(socket.AF_UNIX) as comes, nothing_left_open():
        async with listening(accept, path):
            comes.connect(str(path))
            # The loop accepts it in the first turn, and would set it up in the second, after this task's.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await ended.wait()
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(6))
async def test_who_is_cancelled_as_it_begins_or_ends_has_stopped_listening(
    tmp_path: Path, turns: int
) -> None:
    async def listens() -> None:
        async with listening(close, tmp_path / "socket"):
            await asyncio.sleep(0)

    with nothing_left_open():
        task = asyncio.ensure_future(listens())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        del task
