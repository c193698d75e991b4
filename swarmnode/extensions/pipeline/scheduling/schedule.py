"""Finds the plan of an iteration: a feasible plan at once, then better ones until the budget is spent.

Instance -> first_paths -> [schedule: annealing on the exact simulator] -> Scheduled (plan, makespan)

Collisions need no rule of their own: the simulator shows their cost. Simulated annealing restarts from the
best plan. The threshold of a step is drawn before its plan is simulated (a cost of at most
cost - temperature * ln u is accepted), so the simulator can give up as soon as the threshold is out of reach,
without changing any decision.
"""

import time
from dataclasses import dataclass
from math import exp, inf, log
from random import Random

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.first_paths import first_paths
from swarmnode.extensions.pipeline.scheduling.instance import Instance, Route
from swarmnode.extensions.pipeline.scheduling.moves import RandomMoves, apply
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import SimulatedRun, Simulator

HOT, COLD = 0.09, 0.0045
"""First and last temperature of a restart, relative to the makespan divided by the number of agents: a move
changes the paths of one or two agents, and the agents' mean by about that much."""

MEAN_WEIGHT = 1.0
"""Weight of the agents' mean finish relative to the makespan in annealing. Most moves leave the makespan
unchanged; the mean leads to plans in which the other agents keep out of the way of the slowest."""

PREPARING = 0.1
"""Share of the budget that searches for paths without collisions, before the exact search."""

RESTARTS = 4
"""Number of restarts. They get equal shares of the budget."""

CRITICAL = 0.35
"""Share of moves that start at the agent that finishes last instead of at a random agent."""

STEPS_PER_LOOK = 32
"""Steps between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Length of the search, which ends at the first of two bounds. With `steps` alone, equal seeds give equal
    plans everywhere."""

    steps: int | None = None
    """Number of changes to try."""
    seconds: float | None = None
    """CPU seconds of this process."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan with its makespan."""

    plan: Plan
    makespan_s: float
    steps: int
    """Number of changes that were tried."""


def schedule(instance: Instance, *, seed: int, budget: SearchBudget, start: Plan | None = None) -> Scheduled:
    """Return the best plan found within the budget, starting from `start` or from a greedy plan.

    Raises ConfigError if the instance has no feasible plan.
    """
    if budget.steps is None and budget.seconds is None:
        raise ConfigError("a search needs a limit", hint="set steps or seconds in the budget")
    search = _Search(instance, seed, budget, start)
    search.run()
    return Scheduled(Plan(instance, tuple(search.best)), search.best_run.makespan_s, search.steps)


class _Search:
    def __init__(self, instance: Instance, seed: int, budget: SearchBudget, start: Plan | None) -> None:
        self._instance, self._budget = instance, budget
        self._rng = Random(seed)
        self._simulator = Simulator(instance)
        self._moves = RandomMoves(instance, self._rng)
        self._started_s = time.process_time()
        self._spent = 0.0
        self.steps = 0
        self._prepares = start is None
        self.best = first_paths(instance) if start is None else list(start.paths)
        self.best_run = self._simulate(self.best, inf)

    def run(self) -> None:
        begin = PREPARING if self._prepares else 0.0
        if begin:
            self._prepare(begin)
        share = (1.0 - begin) / RESTARTS
        for restart in range(RESTARTS):
            self._anneal(begin + restart * share, begin + (restart + 1) * share)

    def _prepare(self, end: float) -> None:
        """Anneal the agents' paths without contention, which are cheap to evaluate, as a start for the exact
        search."""
        paths, rng = self.best.copy(), self._rng
        ways_s = [self._simulator.trip(path).alone_s for path in paths]
        count = len(ways_s)
        current_s = first_s = max(ways_s) + MEAN_WEIGHT * sum(ways_s) / count
        temperature = 0.0
        while True:
            if self.steps % STEPS_PER_LOOK == 0:
                self._look()
                if self._spent >= end:
                    break
                temperature = first_s / count * HOT * exp(self._spent / end * log(COLD / HOT))
            self.steps += 1
            move = self._moves.draw(paths, int(rng.random() * count))
            if move is None:
                continue
            former = [(agent, ways_s[agent]) for agent, _ in move]
            for agent, path in move:
                ways_s[agent] = self._simulator.trip(path).alone_s
            cost_s = max(ways_s) + MEAN_WEIGHT * sum(ways_s) / count
            if cost_s > current_s - temperature * log(1.0 - rng.random()):
                for agent, way_s in former:
                    ways_s[agent] = way_s
            else:
                apply(paths, move)
                current_s = cost_s
        self._keep(paths, self._simulate(paths, inf))

    def _anneal(self, begin: float, end: float) -> None:
        """Cool down once, while the spent share of the budget goes from `begin` to `end`."""
        paths, rng = self.best.copy(), self._rng
        current_s, temperature = cost_s(self.best_run), 0.0
        last = self.best_run.finish_s.index(max(self.best_run.finish_s))
        scale_s = self.best_run.makespan_s / len(paths)
        while True:
            if self.steps % STEPS_PER_LOOK == 0:
                self._look()
                if self._spent >= end:
                    return
                share = (self._spent - begin) / (end - begin)
                temperature = scale_s * HOT * exp(share * log(COLD / HOT))
            self.steps += 1
            agent = last if rng.random() < CRITICAL else int(rng.random() * len(paths))
            move = self._moves.draw(paths, agent)
            if move is None:
                continue
            threshold_s = current_s - temperature * log(1.0 - rng.random())
            undo = apply(paths, move)
            run = self._simulate(paths, threshold_s)
            if run.makespan_s == inf:
                apply(paths, undo)
                continue
            current_s, last = cost_s(run), run.finish_s.index(max(run.finish_s))
            self._keep(paths, run)

    def _simulate(self, paths: list[Route], limit_s: float) -> SimulatedRun:
        return self._simulator.run(paths, limit_s, MEAN_WEIGHT)

    def _keep(self, paths: list[Route], run: SimulatedRun) -> None:
        """Remember the fastest plan; of equally fast plans, the one whose agents finish sooner."""
        if (run.makespan_s, sum(run.finish_s)) < (self.best_run.makespan_s, sum(self.best_run.finish_s)):
            self.best, self.best_run = paths.copy(), run

    def _look(self) -> None:
        seconds = time.process_time() - self._started_s
        self._spent = max(_share(self.steps, self._budget.steps), _share(seconds, self._budget.seconds))


def cost_s(run: SimulatedRun) -> float:
    """Return the cost that annealing minimises."""
    return run.makespan_s + MEAN_WEIGHT * sum(run.finish_s) / len(run.finish_s)


def _share(spent: float, budget: float | None) -> float:
    """Return the share of a budget that is spent. The budget may be unlimited or zero."""
    if budget is None:
        return 0.0
    return spent / budget if budget > 0 else 1.0
