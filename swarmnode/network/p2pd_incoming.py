"""Streams that others open to us: who asks, for what, and whether there is room.

daemon connects to our Unix socket -> p2pd.py -> [Incoming] -> rpc.py (Host.serve) | a handler of streams
"""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from swarmnode.errors import NetworkError, PeerUnreachable
from swarmnode.network.p2pd_control import ControlClient, Unusable
from swarmnode.network.p2pd_gate import Gate
from swarmnode.network.rpc import READ_TIMEOUT_S, Service, answer
from swarmnode.network.skipped import Cause, Skipped
from swarmnode.network.slots import Slot, Stage, StreamSlots
from swarmnode.network.streams import SocketStream, StreamHandler, handle_stream

logger = logging.getLogger(__name__)


class Incoming:
    """What is served, and the places for those who ask. It outlives the daemon."""

    def __init__(self, gate: Gate, skipped: Skipped) -> None:
        self.services: dict[str, Service] = {}
        self.handlers: dict[str, StreamHandler] = {}
        self._gate = gate
        self._skipped = skipped
        # Apart: a stream may live for hours, and no number of them should keep a request out.
        self._request_slots = StreamSlots()
        self._stream_slots = StreamSlots()

    async def serve(
        self, control: ControlClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one stream to its end. The caller closes it."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                peer_id, protocol = await control.read_stream_info(reader)
            if not self._gate.admits(peer_id):
                logger.debug("refused a stream of %s from %s, which is barred", protocol, peer_id)
            elif handler := self.handlers.get(protocol):
                with _place(self._stream_slots, peer_id, writer) as slot:
                    stream = SocketStream(peer_id, reader, writer, received=self._received(slot))
                    await handle_stream(stream, protocol, handler)
            elif service := self.services.get(protocol):
                with _place(self._request_slots, peer_id, writer) as slot:
                    await answer(reader, writer, peer_id, service, reach=slot.reach)
        except Unusable as error:
            self._skipped.note(Cause.STREAM, f"a stream of nobody, {error.message}")
        except (NetworkError, TimeoutError) as error:
            logger.debug("lost an incoming stream: %s", error)

    def _received(self, slot: Slot) -> Callable[[int], None]:
        def received(size_bytes: int) -> None:
            slot.reach(Stage.WORKED_ON)
            self._gate.traffic.handed(slot.peer_id, size_bytes)

        return received


@contextmanager
def _place(slots: StreamSlots, peer_id: str, writer: asyncio.StreamWriter) -> Generator[Slot, None, None]:
    slot = slots.take(peer_id, writer.transport.abort)
    if slot is None:
        raise PeerUnreachable(f"no room for a stream of {peer_id}")
    try:
        yield slot
    finally:
        slots.give_back(slot)
