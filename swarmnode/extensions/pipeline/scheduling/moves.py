"""The moves of the local search: small changes of a plan's paths that keep every rule.

paths -> [RandomMoves.draw] -> Move -> schedule.py keeps it or not

Moves never give a node more agents than slots, nor a stage fewer visits than it needs. So a search that
starts at a feasible plan only meets feasible plans, without checking.
"""

from random import Random

from swarmnode.extensions.pipeline.scheduling.instance import Instance, Route, agents, least_visits
from swarmnode.extensions.pipeline.scheduling.plan import path_problem

Move = tuple[tuple[int, Route], ...]
"""The agents whose paths the move changes, with their new paths."""

SPARE_SLOT_MOVES = 0.1
"""Share of moves to a free slot, if there can be one. Of the other moves, half swap nodes and half exchange
stages."""


def apply(paths: list[Route], move: Move) -> Move:
    """Apply the move to the paths. Returns the move that undoes it."""
    undo = tuple((agent, paths[agent]) for agent, _ in move)
    for agent, path in move:
        paths[agent] = path
    return undo


class RandomMoves:
    """Random moves for one instance. All randomness comes from the given generator."""

    def __init__(self, instance: Instance, rng: Random) -> None:
        self._instance, self._rng = instance, rng
        self._stage_of = instance.stage_of
        agent_count = len(agents(instance))
        self._least = least_visits(instance, agent_count)
        most = [instance.slots(stage) for stage in range(len(instance.stages))]
        self._is_tight = sum(most) == agent_count * instance.path_length
        self._nodes = [node for nodes in instance.stages for node in nodes]

    def draw(self, paths: list[Route], agent: int) -> Move | None:
        """Return a move that changes `agent`, or None if the drawn kind of move has nothing to change
        there."""
        if not self._is_tight and self._rng.random() < SPARE_SLOT_MOVES:
            return self._use_spare_slot(paths, agent)
        if len(paths) < 2:
            return None
        other = int(self._rng.random() * (len(paths) - 1))
        other += other >= agent
        if self._rng.random() < 0.5:
            return self._swap_nodes(paths, agent, other)
        return self._exchange_stages(paths, agent, other)

    def _swap_nodes(self, paths: list[Route], agent: int, other: int) -> Move | None:
        """Let two agents at one stage swap their nodes there."""
        mine, theirs = paths[agent], paths[other]
        pairs = [
            (i, j)
            for i, a in enumerate(mine)
            for j, b in enumerate(theirs)
            if i and j and a != b and self._stage_of[a] == self._stage_of[b]
        ]
        if not pairs:
            return None
        i, j = pairs[int(self._rng.random() * len(pairs))]
        a, b = mine[i], theirs[j]
        return (agent, (*mine[:i], b, *mine[i + 1 :])), (other, (*theirs[:j], a, *theirs[j + 1 :]))

    def _exchange_stages(self, paths: list[Route], agent: int, other: int) -> Move | None:
        """Pick a stage of each agent that the other one skips, and let the two agents exchange their visits
        there."""
        stage_of = self._stage_of
        mine, theirs = paths[agent], paths[other]
        my_stages, their_stages = {stage_of[n] for n in mine}, {stage_of[n] for n in theirs}
        given = [n for n in mine if stage_of[n] not in their_stages]
        taken = [n for n in theirs if stage_of[n] not in my_stages]
        if not given or not taken:
            return None
        give = given[int(self._rng.random() * len(given))]
        take = taken[int(self._rng.random() * len(taken))]
        return self._checked(
            (agent, self._replaced(mine, give, take)), (other, self._replaced(theirs, take, give))
        )

    def _use_spare_slot(self, paths: list[Route], agent: int) -> Move | None:
        """Move an agent to a free slot, at the same stage or at one that it skips."""
        path = paths[agent]
        if len(path) < 2:
            return None
        stage_of = self._stage_of
        held = [0] * self._instance.node_count
        visits = [0] * len(self._instance.stages)
        for other in paths:
            for node in other:
                held[node] += 1
                visits[stage_of[node]] += 1
        leave = path[1 + int(self._rng.random() * (len(path) - 1))]
        mine = {stage_of[n] for n in path}
        from_stage = stage_of[leave]
        can_leave = visits[from_stage] > self._least[from_stage]
        free = [
            node
            for node in self._nodes
            if held[node] < self._instance.memory[node]
            and node != leave
            and (stage_of[node] == from_stage or (can_leave and stage_of[node] not in mine))
        ]
        if not free:
            return None
        take = free[int(self._rng.random() * len(free))]
        return self._checked((agent, self._replaced(path, leave, take)))

    def _replaced(self, path: Route, leave: int, take: int) -> Route:
        rest = [take if node == leave else node for node in path]
        return tuple(sorted(rest, key=self._stage_of.__getitem__))

    def _checked(self, *paths: tuple[int, Route]) -> Move | None:
        """Return the move if its paths keep `max_gap`, which is the only rule that sorted paths of the right
        length can break."""
        if self._instance.gap_binds:
            for _, path in paths:
                if path_problem(self._instance, tuple(self._stage_of[n] for n in path)) is not None:
                    return None
        return paths
