"""Small changes of a plan that keep every rule: the moves of the local search.

paths, policies -> [RandomMoves.draw] -> Move -> schedule.py keeps it or not

Moves never change how many agents a node has beyond its slots, nor how many visits a stage needs, so a search
that starts at a feasible plan stays among them without checking.
"""

from dataclasses import dataclass
from random import Random

from swarmnode.extensions.pipeline.scheduling.instance import Instance, agents, least_visits
from swarmnode.extensions.pipeline.scheduling.plan import Policy, path_problem

Route = tuple[int, ...]
"""The nodes of an agent, its data node first."""

POLICIES: tuple[Policy, ...] = ("fifo", "backward_first", "ranked")


@dataclass(slots=True)
class Draft:
    """A plan under change."""

    paths: list[Route]
    policies: list[Policy]
    ranks: list[int]
    """Rank of each agent, all different: their order at nodes that go by ranks."""

    def copy(self) -> "Draft":
        return Draft(self.paths.copy(), self.policies.copy(), self.ranks.copy())


@dataclass(frozen=True, slots=True)
class Move:
    """The paths, policies and ranks that a move changes."""

    paths: tuple[tuple[int, Route], ...] = ()
    policies: tuple[tuple[int, Policy], ...] = ()
    ranks: tuple[tuple[int, int], ...] = ()


def apply(draft: Draft, move: Move) -> Move:
    """Change the draft. Returns the move that undoes it."""
    undo = Move(
        tuple((agent, draft.paths[agent]) for agent, _ in move.paths),
        tuple((node, draft.policies[node]) for node, _ in move.policies),
        tuple((agent, draft.ranks[agent]) for agent, _ in move.ranks),
    )
    for agent, path in move.paths:
        draft.paths[agent] = path
    for node, policy in move.policies:
        draft.policies[node] = policy
    for agent, rank in move.ranks:
        draft.ranks[agent] = rank
    return undo


class RandomMoves:
    """Random moves of one instance, drawn from the given generator only."""

    def __init__(self, instance: Instance, rng: Random) -> None:
        self._instance, self._rng = instance, rng
        self._stage_of = instance.stage_of
        agent_count = len(agents(instance))
        self._least = least_visits(instance, agent_count)
        most = [instance.slots(stage) for stage in range(len(instance.stages))]
        self._is_tight = sum(most) == agent_count * instance.path_length
        self._gap_binds = instance.max_gap < len(instance.stages) - instance.path_length + 1
        self._nodes = [node for nodes in instance.stages for node in nodes]

    def draw(self, draft: Draft, agent: int) -> Move | None:
        """Return a move that touches `agent`; None if the drawn kind of move has nothing to change there."""
        dice = self._rng.random()
        if dice < 0.30:
            return self._swap_nodes(draft, agent)
        if dice < 0.60:
            return self._exchange_stages(draft, agent)
        if dice < 0.72:
            return self._swap_routes(draft, agent)
        if dice < 0.80:
            return self._cross(draft, agent)
        if dice < 0.86:
            return self._change_policy(draft, agent)
        if dice < 0.90:
            return self._swap_ranks(draft, agent)
        if not self._is_tight:
            return self._use_spare_slot(draft, agent)
        return self._rotate_nodes(draft, agent)

    def _other(self, draft: Draft, agent: int) -> int:
        other = int(self._rng.random() * (len(draft.paths) - 1))
        return other + (other >= agent)

    def _swap_nodes(self, draft: Draft, agent: int) -> Move | None:
        """Let two agents at one stage take each other's node there."""
        if len(draft.paths) < 2:
            return None
        other = self._other(draft, agent)
        mine, theirs = draft.paths[agent], draft.paths[other]
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
        return Move(((agent, (*mine[:i], b, *mine[i + 1 :])), (other, (*theirs[:j], a, *theirs[j + 1 :]))))

    def _rotate_nodes(self, draft: Draft, agent: int) -> Move | None:
        """Let three agents at one stage pass their nodes on."""
        if len(draft.paths) < 3 or len(draft.paths[agent]) < 2:
            return None
        node = draft.paths[agent][1 + int(self._rng.random() * (len(draft.paths[agent]) - 1))]
        stage = set(self._instance.stages[self._stage_of[node]])
        at = [(a, n) for a, path in enumerate(draft.paths) for n in path if n in stage and a != agent]
        if len(at) < 2:
            return None
        (b, b_node), (c, c_node) = self._rng.sample(at, 2)
        if len({node, b_node, c_node}) < 3:
            return None
        cycle = ((agent, node, b_node), (b, b_node, c_node), (c, c_node, node))
        return Move(tuple((a, _replaced(draft.paths[a], old, new)) for a, old, new in cycle))

    def _exchange_stages(self, draft: Draft, agent: int) -> Move | None:
        """Exchange the node of an agent at a stage that another agent skips for that agent's node at a stage
        that the first one skips."""
        if len(draft.paths) < 2:
            return None
        other = self._other(draft, agent)
        stage_of = self._stage_of
        mine, theirs = draft.paths[agent], draft.paths[other]
        my_stages, their_stages = {stage_of[n] for n in mine}, {stage_of[n] for n in theirs}
        given = [n for n in mine if stage_of[n] not in their_stages]
        taken = [n for n in theirs if stage_of[n] not in my_stages]
        if not given or not taken:
            return None
        give = given[int(self._rng.random() * len(given))]
        take = taken[int(self._rng.random() * len(taken))]
        return self._checked(
            (agent, self._sorted(mine, give, take)), (other, self._sorted(theirs, take, give))
        )

    def _swap_routes(self, draft: Draft, agent: int) -> Move | None:
        """Let two agents take each other's nodes beyond stage 0. If they have the same data node, they change
        their order."""
        if len(draft.paths) < 2:
            return None
        other = self._other(draft, agent)
        mine, theirs = draft.paths[agent], draft.paths[other]
        if mine[1:] == theirs[1:]:
            return None
        return Move(((agent, (mine[0], *theirs[1:])), (other, (theirs[0], *mine[1:]))))

    def _cross(self, draft: Draft, agent: int) -> Move | None:
        """Let two agents take each other's nodes from a stage on where both have equally many left."""
        if len(draft.paths) < 2 or len(draft.paths[agent]) < 3:
            return None
        other = self._other(draft, agent)
        mine, theirs = draft.paths[agent], draft.paths[other]
        cut = 2 + int(self._rng.random() * (len(mine) - 2))
        if mine[cut:] == theirs[cut:]:
            return None
        new_mine, new_theirs = (*mine[:cut], *theirs[cut:]), (*theirs[:cut], *mine[cut:])
        stage_of = self._stage_of
        for path in (new_mine, new_theirs):
            if path_problem(self._instance, tuple(stage_of[n] for n in path)) is not None:
                return None
        return Move(((agent, new_mine), (other, new_theirs)))

    def _use_spare_slot(self, draft: Draft, agent: int) -> Move | None:
        """Move an agent to a free slot, at the same stage or at one that it skips."""
        path = draft.paths[agent]
        if len(path) < 2:
            return None
        stage_of = self._stage_of
        held = [0] * self._instance.node_count
        visits = [0] * len(self._instance.stages)
        for other in draft.paths:
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
        if stage_of[take] == from_stage:
            return Move(((agent, _replaced(path, leave, take)),))
        return self._checked((agent, self._sorted(path, leave, take)))

    def _change_policy(self, draft: Draft, agent: int) -> Move | None:
        path = draft.paths[agent]
        node = path[int(self._rng.random() * len(path))]
        policy = POLICIES[int(self._rng.random() * len(POLICIES))]
        return Move(policies=((node, policy),)) if policy != draft.policies[node] else None

    def _swap_ranks(self, draft: Draft, agent: int) -> Move | None:
        if len(draft.paths) < 2 or "ranked" not in draft.policies:
            return None
        other = self._other(draft, agent)
        return Move(ranks=((agent, draft.ranks[other]), (other, draft.ranks[agent])))

    def _sorted(self, path: Route, leave: int, take: int) -> Route:
        rest = [take if node == leave else node for node in path]
        return tuple(sorted(rest, key=self._stage_of.__getitem__))

    def _checked(self, *paths: tuple[int, Route]) -> Move | None:
        """Return the move if its paths keep `max_gap`, the only rule that sorted paths of the right length
        can break."""
        if self._gap_binds:
            for _, path in paths:
                if path_problem(self._instance, tuple(self._stage_of[n] for n in path)) is not None:
                    return None
        return Move(paths)


def _replaced(path: Route, old: int, new: int) -> Route:
    return tuple(new if node == old else node for node in path)
