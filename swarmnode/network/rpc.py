"""One request, one response over one stream: the wire format that every host of a swarm speaks.

Host.request -> [ask] -> libp2p stream -> StreamSlots -> [answer] -> handler given to Host.serve

On a stream of the negotiated protocol:

    requester                                    responder
    uvarint length | request bytes       ->
                                         <-      uvarint length | response bytes
    closes                               ->      closes

- The requester keeps its sending half open until it has the whole response; lengths, not half-closes, end a
  message, because the go-libp2p daemon turns a half-close into a close.
- The responder lingers until the requester has hung up, so that no reset can overtake the response.
- A stream that ends before the whole response came is a refusal: the request was too large, the handler
  raised, or the responder is busy. Peers learn nothing more about the reason.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import MessageTooLarge, PeerUnreachable
from swarmnode.network.framing import encode_frame, read_frame
from swarmnode.network.host import Handler
from swarmnode.network.stream_slots import StreamStage

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
"""Seconds within which a request must arrive: a peer that dribbles bytes cannot hold a stream open."""

SMALL_REQUEST_BYTES = 64 * 1024

SMALL_READ_TIMEOUT_S = 4.0
"""Seconds within which a small request must arrive, since it comes with its stream; a large one may come over
a slow line."""

ANSWER_TIMEOUT_S = 60.0
"""Seconds for handler and response together; no requester of ours waits longer."""

LINGER_S = 30.0
"""Seconds that the responder waits for the requester, whose line may be slow, to read and hang up."""


@dataclass(frozen=True, slots=True)
class Service:
    """A served protocol, with the arguments of `Host.serve`."""

    protocol: str
    handler: Handler
    max_request_bytes: int


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, *, max_response_bytes: int
) -> bytes:
    """Sends a request and returns its response. The caller sets the deadline and closes the stream. Raises
    MessageTooLarge for a response over the bound, PeerUnreachable if the stream ends before it."""
    try:
        writer.write(encode_frame(request))
        await writer.drain()
        return await read_frame(reader, max_response_bytes)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise PeerUnreachable("the peer closed the stream without an answer") from error


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    peer_id: str,
    service: Service,
    *,
    reach: Callable[[StreamStage], None] = lambda stage: None,
) -> None:
    """Serves one request. Returns without a response if there is none; the caller closes the stream. `reach`
    is called at each stage."""
    small = service.max_request_bytes <= SMALL_REQUEST_BYTES
    try:
        async with asyncio.timeout(min(READ_TIMEOUT_S, SMALL_READ_TIMEOUT_S if small else READ_TIMEOUT_S)):
            request = await read_frame(reader, service.max_request_bytes)
        reach(StreamStage.WORKED_ON)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            response = await respond(service, peer_id, request)
            if response is None:
                return
            reach(StreamStage.ANSWERED)
            writer.write(encode_frame(response))
            await writer.drain()
        async with asyncio.timeout(LINGER_S):
            await reader.read(1)
    except MessageTooLarge as error:
        logger.debug("refused a request of %s from %s: %s", service.protocol, peer_id, error)
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        logger.debug("lost a request of %s from %s: %r", service.protocol, peer_id, error)


async def respond(service: Service, peer_id: str, request: bytes) -> bytes | None:
    """Calls the handler. Returns None if it raised: at the peer boundary, no request may take the node
    down."""
    try:
        return await service.handler(peer_id, request)
    except Exception:
        logger.exception("the handler of %s failed on a request of %s", service.protocol, peer_id)
        return None
