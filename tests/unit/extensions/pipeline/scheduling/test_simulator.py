"""Exactness against a second simulator that knows no events: it creeps through time in small steps."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import Simulator, simulate

TICK_S = 1 / 64
"""All durations of the random instances are multiples, so that creeping is exact in binary floats."""


def ticks(rng: Random, low_s: float, high_s: float) -> float:
    return rng.randint(int(low_s / TICK_S), int(high_s / TICK_S)) * TICK_S


def random_plan(seed: int) -> Plan:
    """3 stages of 2 nodes, paths of 2 stages, up to 4 agents, 2 waves."""
    rng = Random(seed)
    hops = tuple(tuple(ticks(rng, 0.125, 0.75) if i != j else 0.0 for j in range(6)) for i in range(6))
    instance = Instance(
        names=tuple("abcdef"),
        forward_s=tuple(4 * ticks(rng, 0.125, 0.5) for _ in range(6)),
        hop_s=hops,
        memory=(2, 2, 2, 2, 2, 2),
        stages=((0, 1), (2, 3), (4, 5)),
        path_length=2,
        waves=2,
        gap_s=8 * TICK_S,
        first_gap_s=5 * TICK_S,
    )
    free = [2, 3, 4, 5] * 2
    rng.shuffle(free)
    agents = rng.sample([0, 0, 1, 1], rng.randint(1, 4))
    paths = tuple((data_node, free.pop()) for data_node in agents)
    return Plan(instance, paths)


def creep(plan: Plan) -> float:
    """The makespan by looking at every node at every tick. Durations must be multiples of a tick."""
    one, now = plan.instance, 0.0
    free_at = [0.0] * one.node_count
    wave, step = [0] * len(plan.paths), [0] * len(plan.paths)
    arrives: list[float] = []
    for agent, path in enumerate(plan.paths):
        earlier = sum(other[0] == path[0] for other in plan.paths[:agent])
        arrives.append(earlier * one.forward_s[path[0]])
    finish = [inf] * len(plan.paths)
    while inf in finish and now < 1000:
        for node in range(one.node_count):
            ready = [a for a, end in enumerate(finish) if end == inf and arrives[a] <= now]
            ready = [a for a in ready if route(plan.paths[a])[step[a]] == node and free_at[node] <= now]
            if not ready:
                continue
            agent = min(ready, key=arrives.__getitem__)
            nodes, length = route(plan.paths[agent]), len(plan.paths[agent])
            at = step[agent]
            if at < length:
                work = one.forward_s[node]
            elif at == length:
                work = one.forward_s[node] * one.loss_factor
            else:
                work = one.forward_s[node] * one.backward_factor
            end = now + work
            free_at[node] = end + (one.first_gap_s if at == 0 else one.gap_s)
            if at + 1 < len(nodes):
                step[agent], arrives[agent] = at + 1, end + one.hop_s[node][nodes[at + 1]]
            elif wave[agent] + 1 < one.waves:
                wave[agent], step[agent], arrives[agent] = wave[agent] + 1, 0, end
            else:
                finish[agent] = end
        now += TICK_S
    return max(finish)


def route(path: tuple[int, ...]) -> list[int]:
    return [*path, path[0], *reversed(path)]


def test_makespans_equal_those_of_creeping_through_time() -> None:
    for seed in range(36):
        plan = random_plan(seed)
        assert simulate(plan).makespan_s == pytest.approx(creep(plan), abs=1e-3), seed


def test_one_micro_batch_alone_takes_its_work_and_its_hops() -> None:
    plan = random_plan(0)
    data_node, node = plan.paths[0]
    one = replace(plan.instance, waves=1)
    work_s = one.forward_s[data_node] * 2.75 + one.forward_s[node] * 2.5
    hops_s = 2 * (one.hop_s[data_node][node] + one.hop_s[node][data_node])
    assert simulate(Plan(one, plan.paths[:1])).makespan_s == pytest.approx(work_s + hops_s)


def test_the_second_wave_starts_a_gap_after_the_first_is_back() -> None:
    plan = random_plan(0)
    once = simulate(Plan(replace(plan.instance, waves=1), plan.paths[:1])).makespan_s
    twice = simulate(Plan(plan.instance, plan.paths[:1])).makespan_s
    assert twice == pytest.approx(2 * once + plan.instance.gap_s)


def test_a_node_never_does_two_things_nor_forgets_its_gap() -> None:
    plan = random_plan(3)
    for node in range(6):
        mine = [task for task in simulate(plan).tasks if task.node == node]
        for former, later in pairwise(mine):
            assert later.start_s >= former.end_s + plan.instance.first_gap_s - 1e-9


def test_utilisation_is_work_over_makespan() -> None:
    plan = random_plan(1)
    timeline = simulate(plan)
    node = plan.paths[0][1]
    visits = sum(node in path for path in plan.paths) * plan.instance.waves
    work_s = visits * plan.instance.forward_s[node] * 2.5
    assert timeline.utilisation[node] == pytest.approx(work_s / timeline.makespan_s)


def test_a_limit_changes_no_makespan_that_keeps_it() -> None:
    for seed in range(20):
        plan = random_plan(seed)
        simulator = Simulator(plan.instance)
        exact = simulator.run(plan.paths).makespan_s
        assert simulator.run(plan.paths, limit_s=exact + 1e-9).makespan_s == exact
        assert simulator.run(plan.paths, limit_s=exact - 1e-3).makespan_s == inf
