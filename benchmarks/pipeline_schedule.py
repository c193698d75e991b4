"""Seconds of one pipeline iteration: the full pipeline, skipping by naive paths, and skipping by our plans.

python benchmarks/pipeline_schedule.py [--instance FILE] [--quick] [--json FILE]

All variants process the same number of micro-batches on the same nodes, and are judged by the exact
simulator; every plan is checked against every rule. Baselines get what can be done for them:

full         every micro-batch through all stages; data nodes, paths and orders by our own search. Without
             skipping fewer micro-batches are in flight at once, so an iteration needs more waves; the time
             for a broken number of waves is interpolated between the whole ones.
oblivious    skipping with random feasible stage sets and nodes (median of many).
alone        skipping; the slowest agent's uncontended way is minimised under the same slots, so collisions in
             time are ignored.
skip         our plan on the given stage map. skip_free_map: on a stage map of our own.
bound        no plan on the given map is faster.
best cut     no skipping at all: the same layers on the same nodes, cut into as many stages as a path visits,
             stage map and plan by our own search, as many micro-batches held by a node although each is
             larger. It needs nodes with room for more layers, and is the rival where they have it.
             `skip_vs_best_cut` is the share of its time that skipping saves; `cut_s` has fewer stages, too.

Without --instance: both files in benchmarks/instances, claims are those of the larger; and planning at scale.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from common import arguments, middle, report
from pipeline_bounds import free_map_bound_s, makespan_bound_s
from pipeline_study import find_full, seconds_for

from swarmnode.extensions.pipeline.scheduling.first_paths import first_paths
from swarmnode.extensions.pipeline.scheduling.instance import Instance, Route, agents, load_instance
from swarmnode.extensions.pipeline.scheduling.moves import Move, RandomMoves, apply
from swarmnode.extensions.pipeline.scheduling.placement import search as search_map
from swarmnode.extensions.pipeline.scheduling.plan import Plan, violations
from swarmnode.extensions.pipeline.scheduling.schedule import Scheduled, SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import Simulator, simulate

INSTANCES = Path(__file__).parent / "instances"


@dataclass(frozen=True, slots=True)
class Effort:
    seconds: float
    """CPU seconds of each search."""
    seeds: int
    random_plans: int
    alone_steps: int


FULL = Effort(seconds=10.0, seeds=3, random_plans=101, alone_steps=60_000)
QUICK = Effort(seconds=2.0, seeds=1, random_plans=21, alone_steps=10_000)


def main() -> None:
    own = own_options()
    options = arguments("seconds of a pipeline iteration: full, naive skipping, planned skipping")
    effort = QUICK if options.quick else FULL
    files = (
        [own.instance] if own.instance else sorted(INSTANCES.glob("*.json"), key=lambda f: -f.stat().st_size)
    )
    figures: dict[str, Any] = {"seconds_per_search": effort.seconds}
    compared = [compare(load_instance(file), file.stem, effort) for file in files]
    figures["instances"] = {file.stem: found for file, (_, _, found) in zip(files, compared, strict=True)}
    if not own.instance:
        figures["scale"] = dict(planning_at_scale(effort))
    claims, spread, _ = compared[0]
    report("pipeline_schedule", claims, spread, options.json, extra=figures)


def own_options() -> argparse.Namespace:
    """Reads `--instance`, and takes it off the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--instance", type=Path)
    found, sys.argv[1:] = parser.parse_known_args()
    return found


Compared = tuple[dict[str, float], dict[str, tuple[float, float]], dict[str, Any]]


def compare(instance: Instance, name: str, effort: Effort) -> Compared:
    """Claims, their spread over the seeds, and further figures of one instance."""
    micro_batches = len(agents(instance)) * instance.waves
    print(
        f"{name}: {instance.node_count} nodes, {len(instance.stages)} stages, {micro_batches} micro-batches"
    )
    runs: dict[str, list[float]] = {"full_s": [], "skip_s": [], "skip_free_map_s": [], "plan_cpu_s": []}
    bound_s, map_cpu_s = makespan_bound_s(instance), []
    cut_s = {stages: best_cut_s(instance, stages, effort) for stages in range(2, instance.path_length + 1)}
    for seed in range(effort.seeds):
        budget = SearchBudget(seconds=effort.seconds)
        full = checked_plan(find_full(instance, micro_batches, seed, budget))
        runs["full_s"].append(seconds_for(full, micro_batches))
        started_s = time.process_time()
        found = checked(schedule(instance, seed=seed, budget=budget))
        runs["plan_cpu_s"].append(time.process_time() - started_s)
        runs["skip_s"].append(found.makespan_s)
        started_s = time.process_time()
        free = search_map(instance, seed=seed).plan
        improved = checked(schedule(free.instance, seed=seed, budget=budget, start=free))
        map_cpu_s.append(time.process_time() - started_s)
        runs["skip_free_map_s"].append(improved.makespan_s)
    results = {key: middle(values) for key, values in runs.items()}
    claims = {key: value for key, (value, _) in results.items()} | {"bound_s": bound_s}
    spread = {key: (min(values), max(values)) for key, values in runs.items()} | {
        "bound_s": (bound_s, bound_s)
    }
    rival_s = cut_s[instance.path_length]
    ours_s = [min(pair) for pair in zip(runs["skip_s"], runs["skip_free_map_s"], strict=True)]
    claims["skip_vs_best_cut"] = 1 - median(ours_s) / rival_s
    spread["skip_vs_best_cut"] = (1 - max(ours_s) / rival_s, 1 - min(ours_s) / rival_s)
    further = {
        "oblivious_s": oblivious_s(instance, effort),
        "alone_s": alone_s(instance, effort),
        "free_map_bound_s": free_map_bound_s(instance),
        "free_map_cpu_s": median(map_cpu_s),
        "greedy_s": simulate(checked_plan(Plan(instance, tuple(first_paths(instance))))).makespan_s,
        "micro_batches": micro_batches,
    }
    show(claims, further, cut_s)
    rounded = {key: float(f"{value:.5g}") for key, value in {**claims, **further}.items()}
    return claims, spread, {**rounded, "cut_s": cut_s, "runs": runs}


def show(claims: dict[str, float], further: dict[str, Any], cut_s: dict[int, float]) -> None:
    full_s = claims["full_s"]
    rows = {
        "full pipeline": full_s,
        **{f"cut into {stages} stages, no skipping": seconds for stages, seconds in cut_s.items()},
        "skipping, links ignored": further["oblivious_s"],
        "skipping, collisions ignored": further["alone_s"],
        "skipping, our plan": claims["skip_s"],
        "skipping, our plan and stage map": claims["skip_free_map_s"],
        "lower bound, given stage map": claims["bound_s"],
        "lower bound, any stage map": further["free_map_bound_s"],
    }
    for label, seconds in rows.items():
        print(f"  {label:34s} {seconds:8.2f} s  {100 * (seconds / full_s - 1):+6.1f} %")
    print(
        f"  planning: {claims['plan_cpu_s']:.1f} CPU s; with a map {further['free_map_cpu_s']:.1f} CPU s",
        flush=True,
    )


def best_cut_s(instance: Instance, stages: int, effort: Effort) -> float:
    """The iteration without skipping of the same layers in fewer stages, each node holding that much more."""
    nodes = [node for held in instance.stages for node in held]
    cut = replace(
        instance,
        forward_s=tuple(seconds * len(instance.stages) / stages for seconds in instance.forward_s),
        stages=tuple(tuple(nodes[stage::stages]) for stage in range(stages)),
        path_length=stages,
    )
    micro_batches = len(agents(instance)) * instance.waves
    cut = replace(cut, waves=max(1, micro_batches // len(agents(cut))))
    placed, budget = search_map(cut, seed=0).plan, SearchBudget(seconds=effort.seconds / 2)
    plans = (
        find_full(placed.instance, micro_batches, 0, budget),
        schedule(placed.instance, seed=0, budget=budget, start=placed).plan,
    )
    return min(seconds_for(checked_plan(plan), micro_batches) for plan in plans)


def oblivious_s(instance: Instance, effort: Effort) -> float:
    """Median of plans that random feasible moves lead to."""
    found: list[float] = []
    for seed in range(effort.random_plans):
        rng = Random(seed)
        paths = first_paths(instance)
        for _ in path_moves(instance, paths, rng, 20 * len(paths)):
            pass
        found.append(simulate(checked_plan(Plan(instance, tuple(paths)))).makespan_s)
    return median(found)


def alone_s(instance: Instance, effort: Effort) -> float:
    """Anneal the slowest uncontended way (and a little the mean), then see what collisions make of it."""
    simulator, rng = Simulator(instance), Random(0)
    paths = first_paths(instance)

    def cost_s() -> float:
        ways = [simulator.trip(path).alone_s for path in paths]
        return max(ways) + 0.1 * sum(ways) / len(ways)

    current = best = cost_s()
    kept = paths.copy()
    for step, undo in enumerate(path_moves(instance, paths, rng, effort.alone_steps)):
        cost, temperature = cost_s(), 0.02 * best * exp(-5 * step / effort.alone_steps)
        if cost > current - temperature * log(1.0 - rng.random()):
            apply(paths, undo)
            continue
        current = cost
        if cost < best:
            best, kept = cost, paths.copy()
    return simulate(checked_plan(Plan(instance, tuple(kept)))).makespan_s


def path_moves(instance: Instance, paths: list[Route], rng: Random, count: int) -> Iterator[Move]:
    """Apply `count` random moves; yields what undoes each."""
    moves = RandomMoves(instance, rng)
    for _ in range(count):
        move = moves.draw(paths, rng.randrange(len(paths)))
        if move is not None:
            yield apply(paths, move)


def planning_at_scale(effort: Effort) -> Iterator[tuple[str, dict[str, float]]]:
    """A first plan of 40 nodes, and plans of 100 nodes with 1,000 micro-batches in both shapes."""
    shapes = {
        "40 nodes, first plan": (generated(40, 8, 5, memory=3, waves=2), 0.0),
        "100 nodes, 500 in flight x 2": (generated(100, 10, 7, memory=50, waves=2), 4 * effort.seconds),
        "100 nodes, 30 in flight x 34": (generated(100, 10, 7, memory=3, waves=34), 4 * effort.seconds),
    }
    for name, (instance, seconds) in shapes.items():
        started_s = time.process_time()
        if seconds:
            found = checked(schedule(instance, seed=0, budget=SearchBudget(seconds=seconds)))
            plan = found.plan
        else:
            plan = checked_plan(Plan(instance, tuple(first_paths(instance))))
        cpu_s = time.process_time() - started_s
        greedy_s = simulate(Plan(instance, tuple(first_paths(instance)))).makespan_s
        row = {
            "cpu_s": cpu_s,
            "micro_batches": plan.micro_batches,
            "greedy_s": greedy_s,
            "makespan_s": simulate(plan).makespan_s,
            "bound_s": makespan_bound_s(instance) if seconds else 0.0,
        }
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        yield name, {key: float(f"{value:.5g}") for key, value in row.items()}


def generated(nodes: int, stages: int, path_length: int, *, memory: int, waves: int) -> Instance:
    """Nodes scattered over a square, hops by distance, speeds that differ sixfold. Seeded."""
    rng = Random(0)
    places = [(rng.random(), rng.random()) for _ in range(nodes)]
    hop_s = tuple(
        tuple(0.0 if a is b else 0.35 + 3 * ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5 for b in places)
        for a in places
    )
    return Instance(
        names=tuple(f"n{i}" for i in range(nodes)),
        forward_s=tuple(rng.uniform(0.5, 3.0) for _ in range(nodes)),
        hop_s=hop_s,
        memory=(memory,) * nodes,
        stages=tuple(tuple(range(stage, nodes, stages)) for stage in range(stages)),
        path_length=path_length,
        waves=waves,
    )


def checked(found: Scheduled) -> Scheduled:
    checked_plan(found.plan)
    return found


def checked_plan(plan: Plan) -> Plan:
    """Every plan of this file passes here."""
    broken = violations(plan)
    if broken:
        raise SystemExit(f"a plan breaks its rules: {broken}")
    return plan


if __name__ == "__main__":
    main()
