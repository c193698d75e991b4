"""Checks of headers: signed by their author, in time, and of use to us.

gossip -> [open_gossip, check_of_use] -> pool;   library -> [check_header] -> Borrower

All checks are pure: they look at everything before anything is kept, and raise Rejected with a Reason. They
take a tenth of a millisecond and run on the event loop.
"""

from collections.abc import Mapping

from swarmnode.errors import Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.limits import MAX_BYTES_PER_TOKEN, MAX_CLOCK_SKEW_S, MAX_HEADER_BYTES, PROTOCOL
from swarmnode.exchange.messages import Announcement, Arrival, Header, decode_header
from swarmnode.identity.envelope import unseal
from swarmnode.tasks.task import Task, may_be_exchanged
from swarmnode.types import MIN_REWARD_SPREAD

HEADER_CONTEXT = f"swarmnode/{PROTOCOL}/rollout-header"

BODY_OVERHEAD_BYTES = 1024
"""Bytes of a body besides its answers: names, their framing, the frame of zstd."""


def open_gossip(data: bytes, sender: str, now: float, max_age_s: float) -> Header:
    """Returns the header in a gossip message: signed by its sender, and in time. Raises Rejected."""
    author, header = open_header(data)
    if author != sender:
        raise Rejected(Reason.SENDER_MISMATCH, f"{sender} sent a header of {author}")
    if header.created_s > now + MAX_CLOCK_SKEW_S:
        raise Rejected(Reason.FROM_THE_FUTURE, f"by {header.created_s - now:.0f} s")
    if header.created_s < now - max_age_s:
        raise Rejected(Reason.EXPIRED, f"{now - header.created_s:.0f} s old")
    return header


def check_header(
    data: bytes, arrival: Arrival, *, settings: ExchangeSettings, tasks: Mapping[str, Task]
) -> Announcement:
    """Returns the announcement in a library's sealed header, which may be of any age: signed, well-formed and
    of use to us. Raises Rejected."""
    author, header = open_header(data)
    check_of_use(author, header, settings, tasks, spread=False)
    return Announcement(author, header, data, arrival)


def open_header(data: bytes) -> tuple[str, Header]:
    """Returns the author and the contents of a sealed header: signed and well-formed. Raises Rejected."""
    envelope = unseal(data, HEADER_CONTEXT, max_bytes=MAX_HEADER_BYTES)
    return envelope.author, decode_header(envelope.payload)


def check_of_use(
    author: str, header: Header, settings: ExchangeSettings, tasks: Mapping[str, Task], *, spread: bool
) -> None:
    """Raises Rejected for headers that we take from no stranger, or not from this author. `spread`: see
    `check_fits`."""
    if settings.publishers is not None and author not in settings.publishers:
        raise Rejected(Reason.NOT_A_PUBLISHER)
    check_fits(header, settings, tasks, spread=spread)
    require_exchanged(tasks[header.task])


def check_fits(
    header: Header, settings: ExchangeSettings, tasks: Mapping[str, Task], *, spread: bool
) -> None:
    """Raises Rejected for headers that are of no use to us, regardless of their author. `spread`: the header
    must claim rewards that differ. Right answers that we asked for, and those of a library, need not."""
    if header.protocol != PROTOCOL:
        raise Rejected(Reason.OTHER_PROTOCOL, f"protocol {header.protocol}")
    if header.swarm != settings.swarm:
        raise Rejected(Reason.OTHER_SWARM)
    task = tasks.get(header.task)
    if task is None:
        raise Rejected(Reason.OTHER_TASK, f"no task {header.task} here (version {header.version})")
    if task.version != header.version:
        raise Rejected(
            Reason.OTHER_VERSION, f"{header.task}, version {header.version}: ours is {task.version}"
        )
    if spread and (header.reward_std is None or header.reward_std < MIN_REWARD_SPREAD):
        raise Rejected(Reason.NO_SPREAD, "its author's own rewards are all equal")
    if header.body_bytes > largest_body(header.group_size, settings.max_tokens):
        raise Rejected(Reason.OVERSIZED, f"{header.body_bytes} bytes: answers over rollout.max_tokens")


def require_exchanged(task: Task) -> None:
    """Raises Rejected if groups of this task are not exchanged with other nodes. This is the only such rule;
    policies of one process are one node. A vote among a stranger's answers, for example, is only the
    stranger's own word."""
    if not may_be_exchanged(task):
        raise Rejected(Reason.NOT_EXCHANGED, f"answers to {task.name} stay at home")


def largest_body(group_size: int, max_tokens: int) -> int:
    """Returns the most bytes of a compressed body whose answers we could train on.

    >>> largest_body(8, 10), largest_body(8, 1024)
    (2304, 132096)
    """
    return BODY_OVERHEAD_BYTES + group_size * max_tokens * MAX_BYTES_PER_TOKEN
