"""Simulates an iteration of a plan by exact discrete events, without time steps.

Plan -> [simulate] -> Timeline (makespan, tasks, utilisation) -> search, deadlines

The model. A node runs one task at a time: forward f, loss f * loss_factor at the data node, backward f *
backward_factor. After each task it is unavailable for a gap. A result is at the next node one hop later; hops
do not slow each other down. A micro-batch goes forward along its path, returns to the data node for the loss,
and goes back along the reversed path for the backward pass. It never waits for a slot: plans have enough of
them. A free node takes the task that was ready first. An agent starts its next micro-batch when the last one
is back. Simultaneous events happen in the order in which they were caused.

The search needs tens of thousands of makespans, so the loop works on tuples and lists, and gives up as soon
as the limit is out of reach: an arrival plus the rest of the agent's own path, uncontended, is a lower bound.
This makes it cheap to reject a plan and changes no decision.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf
from typing import Literal

from swarmnode.extensions.pipeline.scheduling.instance import Instance, turns_of
from swarmnode.extensions.pipeline.scheduling.plan import Plan

Kind = Literal["forward", "loss", "backward"]

MAX_TRIPS = 20_000
"""Number of trips that a simulator remembers, at about 1 KB each, before it starts over."""

INSTANT_S = 1e-12
"""Times closer than this are the same instant: sums of the same durations differ by rounding."""

Step = tuple[int, float, float, float, float]
"""Node, seconds of work, gap after it, seconds until the result is at the next step's node, and uncontended
seconds from there to the end of the micro-batch."""

Recorded = tuple[int, int, int, int, float, float]
"""Node, agent, wave, step, start, end."""


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """One piece of work on one node."""

    node: int
    agent: int
    wave: int
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one iteration, in seconds from its start."""

    makespan_s: float
    """End of the last backward pass."""
    tasks: tuple[ScheduledWork, ...]
    """Work of all nodes, in order of start."""
    utilisation: tuple[float, ...]
    """Share of the makespan during which each node computes."""


@dataclass(frozen=True, slots=True)
class Trip:
    """One micro-batch on one path, without contention."""

    steps: tuple[Step, ...]
    """Forward along the path, loss, backward along the reverse: 2 * len(path) + 1 steps."""
    alone_s: float
    """Seconds from the start of the first forward pass to the end of the last backward pass, without
    waiting."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The outcome of one simulation."""

    makespan_s: float
    """Infinite if the limit was missed."""
    finish_s: tuple[float, ...]
    """End of each agent's last micro-batch. Empty if the run was given up early."""


class Simulator:
    """The simulator for one instance. It caches trips."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._trips: dict[tuple[int, ...], Trip] = {}

    def trip(self, path: tuple[int, ...]) -> Trip:
        """Return the uncontended trip of a micro-batch on this path."""
        found = self._trips.get(path)
        if found is None:
            if len(self._trips) >= MAX_TRIPS:
                self._trips.clear()
            found = self._trips[path] = _trip(self._instance, path)
        return found

    def run(
        self,
        paths: Sequence[tuple[int, ...]],
        limit_s: float = inf,
        mean_weight: float = 0.0,
        record: list[Recorded] | None = None,
    ) -> SimulatedRun:
        """Simulate one iteration. `record` is filled with its tasks, in the order in which they start.

        If makespan + mean_weight * mean finish of the agents is above `limit_s`, the makespan is reported as
        infinite, as early as that is known.
        """
        trips, releases = [self.trip(path) for path in paths], _releases(self._instance, paths)
        # Allow a nanosecond for the order of additions.
        finish = _events(self._instance, trips, releases, limit_s + 1e-9, mean_weight / len(paths), record)
        if not finish:
            return SimulatedRun(inf, ())
        makespan_s = max(finish)
        missed = makespan_s + mean_weight * sum(finish) / len(finish) > limit_s
        return SimulatedRun(inf if missed else makespan_s, tuple(finish))


def simulate(plan: Plan) -> Timeline:
    """Return the exact timeline of one iteration of the plan, in seconds from its start.

    >>> link = ((0.0, 1.0), (1.0, 0.0))
    >>> small = Instance(("a", "b"), (1.0, 1.0), link, (1, 1), ((0,), (1,)), path_length=2, waves=1)
    >>> simulate(Plan(small, paths=((0, 1),))).makespan_s
    9.25
    """
    record: list[Recorded] = []
    run = Simulator(plan.instance).run(plan.paths, record=record)
    tasks = tuple(
        ScheduledWork(node, agent, wave, _kind(step, len(plan.paths[agent])), start, end)
        for node, agent, wave, step, start, end in record
    )
    busy = [0.0] * plan.instance.node_count
    for task in tasks:
        busy[task.node] += task.end_s - task.start_s
    return Timeline(
        makespan_s=run.makespan_s,
        tasks=tasks,
        utilisation=tuple(seconds / run.makespan_s for seconds in busy),
    )


def _events(
    instance: Instance,
    trips: Sequence[Trip],
    releases: Sequence[float],
    limit_s: float,
    mean_weight: float,
    record: list[Recorded] | None,
) -> list[float]:
    """Run all events. Returns the end of each agent's last micro-batch, or nothing if the run was given up
    because the limit is missed. `mean_weight`: of each agent's finish, in addition to the weight 1 of the
    slowest.

    An agent has one task at a time, so an event is either the arrival of an agent at its next step's node, or
    a node that becomes free while tasks wait there. An event is (time, cause * span + who): ties go by cause.
    """
    agent_count, node_count, waves = len(trips), instance.node_count, instance.waves
    span = agent_count + node_count
    steps = [trip.steps for trip in trips]
    # Minimum seconds that each further wave adds to an agent's end.
    renewed = [trip.alone_s + instance.gap_s for trip in trips]
    later_waves = [(waves - 1) * again for again in renewed]
    # Earliest end of each agent's last micro-batch, as far as known.
    bounds = zip(releases, trips, later_waves, strict=True)
    least = [release + trip.alone_s + later_s for release, trip, later_s in bounds]
    worst, total = max(least), mean_weight * sum(least)
    if worst + total > limit_s:
        return []
    finish = [inf] * agent_count
    at, wave = [0] * agent_count, [0] * agent_count
    free_at = [0.0] * node_count
    wake_cause, wakes = [0] * node_count, [False] * node_count
    waiting: list[deque[int]] = [deque() for _ in range(node_count)]
    events = [(release, agent * span + agent) for agent, release in enumerate(releases)]
    heapify(events)
    cause = agent_count
    while events:
        now, code = heappop(events)
        who = code % span
        if who < agent_count:
            agent = who
            node = steps[agent][at[agent]][0]
            queue = waiting[node]
            if free_at[node] > now + INSTANT_S:
                queue.append(agent)
                if not wakes[node]:
                    wakes[node] = True
                    heappush(events, (free_at[node], wake_cause[node]))
                continue
            if queue:
                queue.append(agent)
                agent = queue.popleft()
        else:
            node = who - agent_count
            wakes[node] = False
            queue = waiting[node]
            if free_at[node] > now + INSTANT_S:
                if queue:
                    wakes[node] = True
                    heappush(events, (free_at[node], wake_cause[node]))
                continue
            agent = queue.popleft()
        step = at[agent]
        _, work_s, gap_s, travel_s, rest_s = steps[agent][step]
        end = now + work_s
        free_at[node] = end + gap_s
        if record is not None:
            record.append((node, agent, wave[agent], step, now, end))
        step += 1
        if step < len(steps[agent]):
            arrival = end + travel_s
            least_end = arrival + rest_s + later_waves[agent]
            if least_end > least[agent]:
                total += mean_weight * (least_end - least[agent])
                least[agent] = least_end
                if least_end > worst:
                    worst = least_end
                if worst + total > limit_s:
                    return []
            at[agent] = step
            cause += 1
            heappush(events, (arrival, cause * span + agent))
        else:
            wave[agent] += 1
            if wave[agent] < waves:
                at[agent] = 0
                later_waves[agent] -= renewed[agent]
                cause += 1
                heappush(events, (end, cause * span + agent))
            else:
                finish[agent] = end
        cause += 1
        wake_cause[node] = cause * span + agent_count + node
        if queue and not wakes[node]:
            wakes[node] = True
            heappush(events, (free_at[node], wake_cause[node]))
    return finish


def _releases(instance: Instance, paths: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the time at which each agent's data node starts the agent's first micro-batch. A data node
    starts them one forward time apart."""
    turns = turns_of(path[0] for path in paths)
    return [turn * instance.forward_s[path[0]] for turn, path in zip(turns, paths, strict=True)]


def _trip(instance: Instance, path: tuple[int, ...]) -> Trip:
    nodes = [*path, path[0], *reversed(path)]
    work = [instance.forward_s[node] for node in path]
    work += [instance.forward_s[path[0]] * instance.loss_factor]
    work += [instance.forward_s[node] * instance.backward_factor for node in reversed(path)]
    gaps = [instance.first_gap_s] + [instance.gap_s] * (len(nodes) - 1)
    travel = [instance.hop_s[a][b] for a, b in pairwise(nodes)] + [0.0]
    # The loss is computed where the path starts, so a path with one node has no hop there.
    steps: list[Step] = []
    rest_s = 0.0
    for node, work_s, gap_s, travel_s in zip(*map(reversed, (nodes, work, gaps, travel)), strict=True):
        steps.append((node, work_s, gap_s, travel_s, rest_s))
        rest_s += work_s + travel_s
    return Trip(tuple(reversed(steps)), rest_s)


def _kind(step: int, length: int) -> Kind:
    return "forward" if step < length else "loss" if step == length else "backward"
