"""The result of one run of a node: the last line that `swarmnode join` prints.

node.py -> [summarise] -> run.py, local_swarm.py
"""

from dataclasses import dataclass

from swarmnode.node.status import NodeStatus
from swarmnode.training.records import Counters


@dataclass(frozen=True, slots=True)
class Summary:
    """What one run came to. Numbers continue over restarts; None means not measured."""

    peer: str
    rounds: int
    tokens: int
    seconds: float
    reward_first: float | None
    reward_last: float | None
    evaluated_round: int | None
    """The round that `reward_last` was measured at."""
    external_groups_trained: dict[str, int]
    saved_round: int | None
    """Round of the newest checkpoint; less than `rounds` when the disk was full."""
    stopped: str


def summarise(status: NodeStatus, counters: Counters, stopped: str) -> Summary:
    """Put together what is known at the end; `stopped` says why it ended."""
    return Summary(
        peer=status.peer_id,
        rounds=counters.round,
        tokens=counters.tokens,
        seconds=round(counters.seconds, 3),
        reward_first=counters.reward_first,
        reward_last=counters.reward_last,
        evaluated_round=counters.evaluated_round,
        external_groups_trained=dict(counters.external_groups_trained),
        saved_round=status.checkpoint.round,
        stopped=stopped,
    )
