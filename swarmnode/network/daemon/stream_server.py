"""Incoming streams of our daemon, each given to the service or handler of its protocol.

daemon -> P2pdHost -> [StreamServer] -> rpc.answer, streams.handle_stream
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from swarmnode.errors import NetworkError, PeerUnreachable
from swarmnode.network.daemon.control_client import ControlClient, Unusable
from swarmnode.network.daemon.peer_gate import PeerGate
from swarmnode.network.daemon.traffic import STREAMED_BYTES
from swarmnode.network.rpc import READ_TIMEOUT_S, Service, answer
from swarmnode.network.skip_counters import SkipCause, SkipCounters
from swarmnode.network.stream_slots import StreamSlot, StreamSlots, StreamStage
from swarmnode.network.streams import SocketStream, StreamHandler, handle_stream

logger = logging.getLogger(__name__)

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]
"""Takes a connection that was made to us."""


class StreamServer:
    """The served protocols, and the places for incoming streams. It outlives the daemon."""

    def __init__(self, gate: PeerGate, skipped: SkipCounters) -> None:
        self.services: dict[str, Service] = {}
        self.handlers: dict[str, StreamHandler] = {}
        self._gate = gate
        self._skipped = skipped
        # Two sets of places: a stream may live for hours, and no number of streams should keep a request out.
        self._request_slots = StreamSlots()
        self._stream_slots = StreamSlots()

    async def serve(
        self, control: ControlClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one stream to its end. The caller closes it."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                peer_id, protocol = await control.read_stream_info(reader)
            if not self._gate.admits(peer_id):
                logger.debug("refused a stream of %s from %s, which is barred", protocol, peer_id)
            elif handler := self.handlers.get(protocol):
                with _place(self._stream_slots, peer_id, writer) as slot:
                    self._gate.traffic.allow(peer_id, STREAMED_BYTES)
                    stream = SocketStream(peer_id, reader, writer, received=self._received(slot))
                    await handle_stream(stream, protocol, handler)
            elif service := self.services.get(protocol):
                with _place(self._request_slots, peer_id, writer) as slot:
                    self._gate.traffic.allow(peer_id, UNREAD_REQUESTS * service.max_request_bytes)
                    await answer(reader, writer, peer_id, self._counted(service), reach=slot.reach)
        except Unusable as error:
            self._skipped.note(SkipCause.STREAM, f"a stream without a valid sender, {error.message}")
        except (NetworkError, TimeoutError) as error:
            logger.debug("lost an incoming stream: %s", error)

    def _counted(self, service: Service) -> Service:
        async def handler(peer_id: str, request: bytes) -> bytes:
            self._gate.traffic.note_handed(peer_id, len(request))
            return await service.handler(peer_id, request)

        return replace(service, handler=handler)

    def _received(self, slot: StreamSlot) -> Callable[[int], None]:
        def received(size_bytes: int) -> None:
            slot.reach(StreamStage.WORKED_ON)
            self._gate.traffic.note_handed(slot.peer_id, size_bytes)

        return received


@contextmanager
def _place(
    slots: StreamSlots, peer_id: str, writer: asyncio.StreamWriter
) -> Generator[StreamSlot, None, None]:
    slot = slots.take(peer_id, writer.transport.abort)
    if slot is None:
        raise PeerUnreachable(f"no room for a stream of {peer_id}")
    try:
        yield slot
    finally:
        slots.give_back(slot)


@asynccontextmanager
async def listening(accept: Accept, path: Path) -> AsyncGenerator[None, None]:
    """Listens at a path until the end. A caller that is cancelled meanwhile leaves no socket open.

    Two defects of Python 3.11 stand in the way. `start_unix_server` yields to the loop once, and forgets the
    server if it is cancelled there; `close` loses a connection that was just accepted, whose socket nobody
    closes. So we have the server before it starts, and accepted connections are set up before it is closed.
    """
    server = await asyncio.start_unix_server(accept, path, start_serving=False)
    try:
        await server.start_serving()
        yield
    finally:
        for socket in server.sockets:
            asyncio.get_running_loop().remove_reader(socket)
        try:
            await asyncio.sleep(0)
        finally:
            server.close()


UNREAD_REQUESTS = 2
"""Requests of a peer that may be on their way, or wait in the daemon, while its bytes are counted: a member's
bulk probe alone is larger than FLOOD_BYTES."""
