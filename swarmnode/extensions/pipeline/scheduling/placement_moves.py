"""Moves of placement, and a cheap price of a map and its paths: thousands are tried a second.

placement.py -> [propose -> PlacementChange -> PlacementPrice.after] -> commit to PlacementState and price
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from swarmnode.extensions.pipeline.scheduling.instance import least_visits
from swarmnode.extensions.pipeline.scheduling.plan import Plan

NODE_MOVES = 0.4
"""Share of moves that swap two nodes; the others change paths."""

Snapshot = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Stage of every node, and the paths."""


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """Speed and slots of every node in every stage."""

    forward_s: tuple[tuple[float, ...], ...]
    """[node][stage]: forward of one micro-batch."""
    memory: tuple[tuple[int, ...], ...]
    """[node][stage]: micro-batches in flight; 0 if the node cannot or may not hold this stage."""


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """A legal move: the paths that it would replace, and the two nodes that would change places."""

    paths: tuple[tuple[int, tuple[int, ...]], ...]
    nodes: tuple[int, int] | None = None


class PlacementState:
    """A map and paths that keep all rules, and the legal moves from it."""

    def __init__(self, plan: Plan, table: PlacementTable) -> None:
        instance = self.instance = plan.instance
        self.table = table
        self.paths = [list(path) for path in plan.paths]
        self.stage_of = list(instance.stage_of)
        self.stages = [list(nodes) for nodes in instance.stages]
        self.visitors: list[list[int]] = [[] for _ in range(instance.node_count)]
        """Agents that visit each node."""
        for agent, path in enumerate(plan.paths):
            for node in path:
                self.visitors[node].append(agent)
        self.least = least_visits(instance, len(plan.paths))
        self.visits = [sum(len(self.visitors[node]) for node in nodes) for nodes in instance.stages]

    def snapshot(self) -> Snapshot:
        return tuple(self.stage_of), tuple(map(tuple, self.paths))

    def propose(self, rng: random.Random) -> PlacementChange | None:
        """Return a random legal move; None if the drawn one is not legal."""
        if rng.random() < NODE_MOVES:
            count = self.instance.node_count
            return self.exchange(int(rng.random() * count), int(rng.random() * count))
        agent = int(rng.random() * len(self.paths))
        path = self.paths[agent]
        if len(path) < 2:
            return None
        node = path[1 + int(rng.random() * (len(path) - 1))]
        other = int(rng.random() * self.instance.node_count)
        if len(self.visitors[other]) < self._slots(other, self.stage_of[other]) and rng.random() < 0.5:
            return self._move(agent, node, other)
        if not self.visitors[other]:
            return None
        partner = self.visitors[other][int(rng.random() * len(self.visitors[other]))]
        return self._trade(agent, node, partner, other)

    def exchange(self, one: int, other: int) -> PlacementChange | None:
        """Return the change in which two nodes take over each other's stage and paths; None if it is not
        legal."""
        here, there = self.stage_of[one], self.stage_of[other]
        if here == there:
            return None
        if max(1, len(self.visitors[other])) > self._slots(one, there):
            return None
        if max(1, len(self.visitors[one])) > self._slots(other, here):
            return None
        swap = {one: other, other: one}
        touched = sorted({*self.visitors[one], *self.visitors[other]})
        paths = tuple((a, tuple([swap.get(node, node) for node in self.paths[a]])) for a in touched)
        return PlacementChange(paths, (one, other))

    def commit(self, change: PlacementChange) -> None:
        for agent, _ in change.paths:
            for node in self.paths[agent]:
                self.visitors[node].remove(agent)
                self.visits[self.stage_of[node]] -= 1
        if change.nodes is not None:
            one, other = change.nodes
            here, there = self.stage_of[one], self.stage_of[other]
            self.stage_of[one], self.stage_of[other] = there, here
            for stage, leaves, comes in ((here, one, other), (there, other, one)):
                if stage >= 0:
                    nodes = self.stages[stage]
                    nodes[nodes.index(leaves)] = comes
        for agent, path in change.paths:
            self.paths[agent] = list(path)
            for node in path:
                self.visitors[node].append(agent)
                self.visits[self.stage_of[node]] += 1

    def _slots(self, node: int, stage: int) -> int:
        """Return the agents that the node can hold in this stage. Outside of the map (-1) nothing is held."""
        return self.table.memory[node][stage] if stage >= 0 else len(self.paths) + 1

    def _move(self, agent: int, node: int, other: int) -> PlacementChange | None:
        """Return the change in which the agent visits another node instead, which has a free slot."""
        here, there = self.stage_of[node], self.stage_of[other]
        if there < 1 or (here != there and self.visits[here] <= self.least[here]):
            return None
        path = self._with(agent, node, other)
        return None if path is None else PlacementChange(((agent, path),))

    def _trade(self, agent: int, node: int, partner: int, other: int) -> PlacementChange | None:
        """Return the change in which two agents trade one node each, of the same stage or of stages that the
        other does not visit."""
        if agent == partner or node == other or self.stage_of[other] < 1:
            return None
        mine, theirs = self._with(agent, node, other), self._with(partner, other, node)
        if mine is None or theirs is None:
            return None
        return PlacementChange(((agent, mine), (partner, theirs)))

    def _with(self, agent: int, old: int, new: int) -> tuple[int, ...] | None:
        """Return the agent's path with a node replaced, in order of stages; None if that breaks a rule."""
        path, stage_of = self.paths[agent], self.stage_of
        if stage_of[old] == stage_of[new]:
            return tuple([new if node == old else node for node in path])
        changed = sorted([stage_of[new if node == old else node] for node in path])
        most = self.instance.max_gap
        if any(later == former or later - former > most for former, later in pairwise(changed)):
            return None
        by_stage = {stage_of[node]: node for node in path if node != old}
        by_stage[stage_of[new]] = new
        return tuple([by_stage[stage] for stage in changed])


class PlacementPrice:
    """The cheap price of a state in seconds, kept up to date. Only for comparisons.

    It is the power mean of the round trips, of exponent 8: near their maximum, yet every agent counts, since
    waiting grows with them all. Computed with products and roots, which every machine rounds alike, as it
    does not a general power.
    """

    def __init__(self, state: PlacementState) -> None:
        instance = state.instance
        self._state = state
        hops = instance.hop_s
        self._both_ways = [
            [hops[i][j] + hops[j][i] for j in range(instance.node_count)] for i in range(instance.node_count)
        ]
        twice = 1 + instance.backward_factor
        self._work = [[forward * twice for forward in row] for row in state.table.forward_s]
        self._loss = [row[0] * instance.loss_factor for row in state.table.forward_s]
        self._scale = max(self._trip(path, None) for path in state.paths)
        self._powers = [self._power(path, None) for path in state.paths]
        self.value = self._value(sum(self._powers))

    def after(self, change: PlacementChange) -> float:
        """Return the price after this change."""
        total = sum(self._powers)
        for agent, path in change.paths:
            total += self._power(path, change.nodes) - self._powers[agent]
        return self._value(total)

    def commit(self, change: PlacementChange) -> None:
        """Include the change in the price. To be called once the state has made the change."""
        for agent, path in change.paths:
            self._powers[agent] = self._power(path, None)
        self.value = self._value(sum(self._powers))

    def _value(self, total: float) -> float:
        slowest_s = self._scale * sqrt(sqrt(sqrt(max(total, 0.0) / len(self._powers))))
        return self._state.instance.waves * slowest_s

    def _power(self, path: Sequence[int], swapped: tuple[int, int] | None) -> float:
        share = self._trip(path, swapped) / self._scale
        square = share * share
        return square * square * square * square

    def _trip(self, path: Sequence[int], swapped: tuple[int, int] | None) -> float:
        """Return the seconds of one micro-batch alone on its way there and back."""
        stage_of, work, links = self._state.stage_of, self._work, self._both_ways
        last = path[-1]
        seconds = self._loss[path[0]]
        for node in path:
            stage = stage_of[node]
            if swapped is not None and node in swapped:
                stage = stage_of[swapped[0] if node == swapped[1] else swapped[1]]
            seconds += work[node][stage] + links[last][node]
            last = node
        return seconds
