"""All that belongs to one seat of a member, and which messages are for it.

member.py (seat) makes a [Term] -> relay.py, driver.py, closing.py
member.py (admit) -> [Term.check] -> Rejected, before a tensor is read
member.py (take) -> [Term.take] -> relay.py, driver.py, closing.py
"""

import asyncio
from dataclasses import dataclass, field

from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.pipeline.running.admission import hop_fault
from swarmnode.pipeline.running.closing import Closed, Closing
from swarmnode.pipeline.running.driver import Driver
from swarmnode.pipeline.running.relay import Relay
from swarmnode.pipeline.running.workplace import Workplace
from swarmnode.pipeline.wire.messages import (
    Abandoned,
    Backward,
    Finished,
    Forward,
    Hop,
    Lost,
    Message,
    Passed,
    Refusal,
    StepDone,
)
from swarmnode.pipeline.wire.signing import check_signature


@dataclass(slots=True)
class Term:
    """From one seat to the next."""

    place: Workplace
    relay: Relay
    driver: Driver
    closing: Closing
    ended: "asyncio.Future[Closed]"
    """Of the iteration that runs."""
    iterations: asyncio.Task[None] | None = None
    """Closes one after the other."""
    stepped: dict[int, int] = field(default_factory=dict[int, int])
    """By node: the optimizer steps that it has told us of."""

    @property
    def lost_track(self) -> bool:
        """Whether the end of an iteration was missed: nothing runs here any more."""
        return self.iterations is not None and self.iterations.done()

    def part_for(self, message: Forward | Backward) -> Relay | Driver:
        """The driver of the data node that the micro-batch started from, the relay of all others."""
        return self.driver if _comes_home(message) else self.relay

    def check(self, peer_id: str, message: Message) -> None:
        """Whether this message, of a member of our plan, may be said now. Raises Rejected."""
        seat = self.place.seat
        if message.plan != seat.digest or self.lost_track:
            # A plan of before; that of the transport's roster is known to be one of ours.
            raise Rejected(Refusal.UNKNOWN_WORK, "no such plan is running here")
        ahead = message.iteration - self.place.iteration
        if not (0 <= ahead <= 1 or (ahead == -1 and isinstance(message, StepDone))):
            raise Rejected(Refusal.UNKNOWN_WORK, f"iteration {message.iteration}")
        if isinstance(message, Hop):
            self._check_hop(message)
        elif isinstance(message, StepDone):
            node = seat.peers.index(peer_id)
            if seat.plan.instance.stage_of[node] != message.stage:
                raise Rejected(Refusal.WRONG_ROUTE, f"node {node} is not of stage {message.stage}")
        elif isinstance(message, Finished) and message.node not in seat.data_nodes:
            raise Rejected(Refusal.WRONG_ROUTE, f"node {message.node} starts nothing")
        elif isinstance(message, Abandoned):
            self._check_owner(peer_id, message)

    def check_origin(self, message: Message) -> None:
        """Whether the data node of a micro-batch has begun it so. Raises Rejected: bad_signature.

        Apart from `check`, as it costs most and stays as it was.
        """
        # From the data node itself no proof is needed, and it knows on its own what it has begun.
        if isinstance(message, Forward) and message.position > 1 and not _comes_home(message):
            check_signature(message, self.place.seat.peers[message.path[0]])

    def take(self, peer_id: str, message: Message, values: Tensor | None) -> None:
        """Hand a whole message, that was checked, to whom it is for. `values`: a hop's. Raises Rejected."""
        node = self.place.seat.peers.index(peer_id)
        match message:
            case Forward() | Backward() if values is not None:
                if message.iteration == self.place.iteration:
                    self.closing.begin()
                self.part_for(message).take(message, values)
            case Lost():
                self.driver.hear_of(peer_id, message)
            case Passed() if message.position > 0:
                self.relay.asked(message)
            case Passed() if self.closing.is_under_way(message.iteration):
                pass
            case Finished():
                self.closing.hear(message)
            case Abandoned():
                self.relay.abandon(message)
            case StepDone():
                self.stepped[node] = message.iteration + 1
            case _:
                raise Rejected(Refusal.UNKNOWN_WORK, "this is said to nobody here")
        self.place.lost.discard(node)

    def _check_hop(self, message: Hop) -> None:
        worker = self.place.worker
        fault = hop_fault(
            message,
            self.place.seat.plan,
            hidden_size=worker.model.hidden_size,
            max_tokens=worker.max_tokens,
            packs=worker.model.packs,
        )
        if fault is not None:
            raise Rejected(fault.reason, fault.detail)
        if not isinstance(message, Forward | Backward):
            raise Rejected(Refusal.UNKNOWN_WORK, f"a {type(message).__name__}")
        self.part_for(message).admit(message)

    def _check_owner(self, peer_id: str, message: Abandoned) -> None:
        seat = self.place.seat
        agent = message.micro_batch // seat.plan.instance.waves
        if agent >= len(seat.plan.paths) or seat.peers[seat.plan.paths[agent][0]] != peer_id:
            raise Rejected(Refusal.WRONG_ROUTE, f"micro-batch {message.micro_batch} is another's")


def _comes_home(message: Forward | Backward) -> bool:
    """To the data node that the micro-batch started from."""
    return message.target == message.path[0]
