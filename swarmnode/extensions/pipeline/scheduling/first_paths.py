"""First paths for all agents: always feasible, cheap to compute, and good enough to start a search from.

Instance -> agents, visits per stage -> [paths agent by agent] -> schedule.py improves them

The visits of every stage are fixed first, between what the stage needs and what its slots and the agents
allow. Then each agent in turn takes the cheapest path through free slots, found by dynamic programming over
(visits made, node). With v_s visits left at stage s and A agents left, all paths can be completed exactly if
every v_s <= A. So a stage with v_s = A must be visited by every remaining agent, and no other rule is needed.
Links do not enter this argument, so greedy choices cannot lead to a dead end. Only a `max_gap` that forbids
some sets of stages can: in that case the sets are dealt round robin, and the links choose the nodes.
"""

from collections.abc import Sequence
from itertools import pairwise

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.instance import Instance, Route, agents, least_visits, turns_of


def first_paths(instance: Instance) -> list[Route]:
    """Return a feasible path for every agent, in the order of `agents(instance)`. Raises ConfigError if
    `max_gap` is too narrow for visits dealt round robin."""
    order = agents(instance)
    visits = stage_visits(instance, len(order))
    sets = _round_robin(instance, visits, len(order)) if instance.gap_binds else None
    routes = _Routes(instance, visits)
    paths: dict[int, Route] = {}
    # The first agent of every data node chooses first, then the second of each, and so on.
    turns = turns_of(order)
    for turn, agent in enumerate(sorted(range(len(order)), key=turns.__getitem__)):
        paths[agent] = routes.next_path(order[agent], len(order) - turn, sets[turn] if sets else None)
    return [paths[agent] for agent in range(len(order))]


def stage_visits(instance: Instance, agent_count: int) -> list[int]:
    """Return the visits of a wave to each stage: as many as each needs, and the rest at the stages with the
    most spare slots. `agents` has made sure that there are enough."""
    visits = list(least_visits(instance, agent_count))
    most = [min(agent_count, instance.slots(stage)) for stage in range(len(instance.stages))]
    missing = agent_count * instance.path_length - sum(visits)
    for _ in range(missing):
        visits[max(range(1, len(visits)), key=lambda s: (most[s] - visits[s], -s))] += 1
    return visits


class _Routes:
    """The remaining slots and visits, and the next agent's cheapest path through them."""

    def __init__(self, instance: Instance, visits: Sequence[int]) -> None:
        self._instance = instance
        self._visits = list(visits)
        self._slots = list(instance.memory)
        factor = 1 + instance.backward_factor
        self._work_s = [factor * s + 2 * instance.gap_s for s in instance.forward_s]

    def next_path(self, data_node: int, agents_left: int, stages: tuple[int, ...] | None) -> Route:
        """Reserve and return the cheapest path from `data_node`, through `stages` if they are given."""
        allowed, forced = self._choices(agents_left, stages)
        path = self._cheapest(data_node, allowed, forced)
        stage_of = self._instance.stage_of
        for node in path[1:]:
            self._slots[node] -= 1
            self._visits[stage_of[node]] -= 1
        return path

    def _choices(self, agents_left: int, stages: tuple[int, ...] | None) -> tuple[list[int], set[int]]:
        """Return the stages that may be visited, and the stages that must be."""
        if stages is not None:
            return list(stages), set(stages)
        open_stages = [s for s in range(1, len(self._visits)) if self._visits[s]]
        return open_stages, {s for s in open_stages if self._visits[s] == agents_left}

    def _cheapest(self, data_node: int, allowed: list[int], forced: set[int]) -> Route:
        """Return the shortest path with path_length - 1 visits that skips no forced stage."""
        instance, wanted = self._instance, self._instance.path_length - 1
        if wanted == 0:
            return (data_node,)
        # best[visits][stage]: (seconds, node, predecessor entry) of the paths that end there.
        start = (0.0, data_node, None)
        best: list[dict[int, list[_Way]]] = [{0: [start]}, *({} for _ in range(wanted))]
        forced_before = [0] * (len(instance.stages) + 1)
        for stage in range(len(instance.stages)):
            forced_before[stage + 1] = forced_before[stage] + (stage in forced)
        for stage in allowed:
            nodes = [node for node in instance.stages[stage] if self._slots[node]]
            for visits in range(wanted):
                before = [
                    way
                    for former, ways in best[visits].items()
                    if former < stage
                    and stage - former <= instance.max_gap
                    and forced_before[stage] == forced_before[former + 1]
                    for way in ways
                ]
                if before:
                    best[visits + 1][stage] = [self._step(before, node) for node in nodes]
        ends = [
            way
            for stage, ways in best[wanted].items()
            if forced_before[-1] == forced_before[stage + 1]
            for way in ways
        ]
        hop_s = instance.hop_s
        _, way = min((way[0] + 2 * hop_s[way[1]][data_node], i) for i, way in enumerate(ends))
        return _nodes(ends[way])

    def _step(self, before: list["_Way"], node: int) -> "_Way":
        hop_s = self._instance.hop_s
        cost_s, i = min((way[0] + 2 * hop_s[way[1]][node], i) for i, way in enumerate(before))
        return cost_s + self._work_s[node], node, before[i]


_Way = tuple[float, int, "_Way | None"]
"""Seconds so far, the last node, and the path to it."""


def _nodes(way: _Way) -> Route:
    nodes: list[int] = []
    at: _Way | None = way
    while at is not None:
        nodes.append(at[1])
        at = at[2]
    return tuple(reversed(nodes))


def _round_robin(instance: Instance, visits: Sequence[int], agent_count: int) -> list[tuple[int, ...]]:
    """Return sets of stages with these visits: the sorted list of all visits, dealt like cards. Raises
    ConfigError if a step is wider than max_gap."""
    cards = [stage for stage in range(1, len(visits)) for _ in range(visits[stage])]
    dealt = [tuple(cards[agent::agent_count]) for agent in range(agent_count)]
    if any(b - a > instance.max_gap for stages in dealt for a, b in pairwise((0, *stages))):
        raise ConfigError(
            f"paths of {instance.path_length} stages step over more than {instance.max_gap} of them at once",
            hint="raise max_gap or path_length",
        )
    return dealt
