"""The swarm as one node hears it: how many others there are, on which tasks, in reach or not, how busy.

Inbox (headers), receipts.py (versions), BodyRoutes (reach) -> [SwarmHealth] -> status, page, metrics

No node is asked anything for this, and no node's view is the true one: it counts names, which cost nothing,
and their statements. So it is shown, and nothing is decided by it. Names of tasks and versions are strangers'
words and stay out of the names of metrics.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarmnode.bounded_dict import BoundedDict
from swarmnode.exchange.exchange_stats import HealthStats, NodesOf
from swarmnode.exchange.limits import PROTOCOL
from swarmnode.exchange.messages import Header

HEARD_S = 900.0
"""Nodes not heard for this many seconds are not counted: a round of a large model takes minutes."""

RATE_S = 60.0
"""Seconds over which the rate of headers is averaged; recent ones count most."""

MAX_NODES = 4096
MAX_TASKS_OF_NODE = 8
"""Latest names of tasks that are remembered of one node: 2 MiB for all nodes."""

MOST_NAMES = 16
"""Most tasks and versions that are named, those of most nodes first."""

AGAIN_S = 5.0
"""Seconds for which one count is shown: names may come by the thousand."""


@dataclass(slots=True)
class HeardNode:
    """The latest statements of one node."""

    at: float
    tasks: tuple[str, ...] = ()
    software: str = ""
    """Its version of swarmnode. Empty: it did not say."""


class SwarmHealth:
    """Counts the nodes that this one hears. Pure: names and times go in, figures come out."""

    def __init__(self, swarm: str, clock: Callable[[], float]) -> None:
        self._swarm, self._clock = swarm, clock
        self._nodes = BoundedDict[str, HeardNode](MAX_NODES)
        self._begun_at = self._rated_at = clock()
        self._headers = 0.0
        self._shown, self._shown_at = HealthStats(), float("-inf")

    def note_header(self, author: str, header: Header) -> None:
        """Notes a header that its author signed, in time, whatever its task is."""
        if (header.protocol, header.swarm) != (PROTOCOL, self._swarm):
            return
        node = self._remember(author)
        node.tasks = tuple(dict.fromkeys((header.task, *node.tasks)))[:MAX_TASKS_OF_NODE]
        self._headers = self._decayed() + 1

    def note_version(self, node: str, software: str) -> None:
        """Notes a node's own statement of its version of swarmnode."""
        self._remember(node).software = software

    def figures(self, known: Collection[str], reaches: Callable[[str], bool | None]) -> HealthStats:
        """Returns the present figures. `known`: authors of groups that passed all checks; `reaches`: returns
        True if we are connected to a node, False if it was dialled in vain, and None if nobody tried."""
        now = self._clock()
        if 0 <= now - self._shown_at < AGAIN_S:
            return self._shown
        present = {name: node for name, node in self._nodes.items() if 0 <= now - node.at <= HEARD_S}
        tasks = Counter(task for node in present.values() for task in node.tasks)
        versions = Counter(node.software for node in present.values() if node.software)
        reach = Counter(map(reaches, present))
        tried = reach[True] + reach[False]
        lasted_s = now - self._begun_at
        self._shown_at = now
        self._shown = HealthStats(
            nodes=len(present),
            known=len(present.keys() & set(known)),
            reached=reach[True],
            out_of_reach=reach[False],
            reachable_share=reach[True] / tried if tried else None,
            headers_per_s=None
            if lasted_s < AGAIN_S
            else self._decayed() / (RATE_S * (1 - math.exp(-lasted_s / RATE_S))),
            different_tasks=len(tasks),
            different_versions=len(versions),
            tasks=_most_common(tasks),
            versions=_most_common(versions),
        )
        return self._shown

    def _remember(self, name: str) -> HeardNode:
        self._nodes[name] = node = self._nodes.get(name) or HeardNode(0.0)
        node.at = self._clock()
        return node

    def _decayed(self) -> float:
        now = self._clock()
        left = self._headers * math.exp(-max(0.0, now - self._rated_at) / RATE_S)
        self._headers, self._rated_at = left, now
        return left


def _most_common(counts: "Counter[str]") -> tuple[NodesOf, ...]:
    return tuple(NodesOf(name, nodes) for name, nodes in counts.most_common(MOST_NAMES))
