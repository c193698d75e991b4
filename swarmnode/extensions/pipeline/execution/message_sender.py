"""Sends a member's messages: encodes them, and sends them again where that can help.

relay.py, iteration_driver.py, step_barrier.py -> [send, send_hop] -> tensor_transport.py

A member that does not know the plan yet says so, and is asked again until the message's deadline. A member
that cannot be reached is tried again for a short time, long enough to restart a daemon or to reconnect.
"""

import asyncio
import logging

import msgspec
from torch import Tensor

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.pipeline.execution.stage_context import StageContext
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.hop_messages import (
    BackwardHop,
    ForwardHop,
    Message,
    Trouble,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MAX_DEADLINE_S
from swarmnode.extensions.pipeline.wire.signing import signed
from swarmnode.network.streams import Buffer

logger = logging.getLogger(__name__)

LARGE_ELEMENTS = 1 << 18
"""Tensors with more elements are encoded and decoded in a thread: it takes about a millisecond."""

PAUSE_S = 0.05
"""Pause between attempts at the same message."""


async def send_hop(context: StageContext, hop: ForwardHop | BackwardHop, values: Tensor) -> Trouble | None:
    """Encode a tensor and send it to the target of `hop`, with the tensor header of `hop` replaced and the
    message signed if it needs to be."""
    codec = context.settings.codec
    try:
        if values.numel() > LARGE_ELEMENTS:
            encoded = await asyncio.to_thread(encode, values, codec)
        else:
            encoded = encode(values, codec)
    except Rejected:
        return "refused"
    message = msgspec.structs.replace(hop, tensor=encoded.header)
    if isinstance(message, ForwardHop) and message.position == 1:
        # Only the data node sends to position 1, and it signs for the whole path.
        message = signed(message, context.key)
    return await send(context, message.target, message, encoded.payload)


async def send(
    context: StageContext,
    node: int,
    message: Message,
    payload: Buffer = b"",
    *,
    timeout_s: float | None = None,
) -> Trouble | None:
    """Send a message until it is answered or `timeout_s` has passed (by default, the time limit of a hop to
    this node). Returns None if it was accepted."""
    peer_id, clock = context.assignment.peers[node], asyncio.get_running_loop().time
    timeout_s = _hop_timeout_s(context, node) if timeout_s is None else timeout_s
    until_s = clock() + timeout_s
    # Under a new plan, other members may not know us yet, and they disconnect strangers.
    is_new = message.iteration == context.assignment.iteration
    patience_s = timeout_s if is_new else context.settings.reconnect_s
    unreachable_until_s = clock() + patience_s
    while True:
        left_s = max(until_s - clock(), 0.001)
        try:
            refusal = await context.transport.send(peer_id, message, payload, timeout_s=left_s)
        except NetworkError as error:
            logger.debug("%s did not reach %s: %s", type(message).__name__, peer_id, error)
            if node in context.lost or clock() + PAUSE_S >= min(until_s, unreachable_until_s):
                return "silent"
        else:
            if refusal is None:
                return None
            if refusal is Refusal.NO_SLOT:
                return "full"
            if refusal is not Refusal.UNKNOWN_PLAN or clock() + PAUSE_S >= until_s:
                return "refused"
        await asyncio.sleep(PAUSE_S)


def _hop_timeout_s(context: StageContext, node: int) -> float:
    """Return the time limit of a hop to this node, in seconds."""
    hop_s = context.assignment.plan.instance.hop_s[context.own][node]
    return min(context.settings.hop_timeout_s + context.settings.slack * hop_s, MAX_DEADLINE_S)
