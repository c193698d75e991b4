from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from random import Random

import pytest

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.first_paths import first_paths
from swarmnode.extensions.pipeline.scheduling.instance import Instance, agents, load_instance
from swarmnode.extensions.pipeline.scheduling.moves import RandomMoves, apply
from swarmnode.extensions.pipeline.scheduling.plan import Plan, path_problem, violations
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

INSTANCES = Path(__file__).parents[5] / "benchmarks" / "instances"


def random_instance(seed: int) -> Instance:
    """2 to 6 stages of 1 to 3 nodes with 1 to 3 slots: tight, loose, skewed."""
    rng = Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(2, 6))]
    count = sum(sizes)
    nodes = rng.sample(range(count), count)
    stages = tuple(tuple(nodes.pop() for _ in range(size)) for size in sizes)
    return Instance(
        names=tuple(f"n{i}" for i in range(count)),
        forward_s=tuple(rng.uniform(0.5, 3.0) for _ in range(count)),
        hop_s=tuple(
            tuple(rng.uniform(0.3, 4.0) if i != j else 0.0 for j in range(count)) for i in range(count)
        ),
        memory=tuple(rng.randint(1, 3) for _ in range(count)),
        stages=stages,
        path_length=rng.randint(1, len(sizes)),
        waves=rng.randint(1, 3),
        max_gap=6,
    )


def all_paths(instance: Instance, data_node: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for chosen in combinations(range(1, len(instance.stages)), instance.path_length - 1):
        if path_problem(instance, (0, *chosen)) is None:
            found += [(data_node, *nodes) for nodes in product(*(instance.stages[s] for s in chosen))]
    return found


def all_plans(instance: Instance) -> list[Plan]:
    choices = [all_paths(instance, data_node) for data_node in agents(instance)]
    plans = [Plan(instance, paths) for paths in product(*choices)]
    return [plan for plan in plans if not violations(plan)]


def small_instances(seeds: int) -> list[Instance]:
    """Those with few enough plans to try them all."""
    instances = [replace(random_instance(seed), waves=2) for seed in range(seeds)]
    return [one for one in instances if 1 < _plan_count(one) <= 3000]


def _plan_count(instance: Instance) -> int:
    count = 1
    for data_node in agents(instance):
        count *= len(all_paths(instance, data_node))
    return count


def test_the_first_plan_breaks_no_rule() -> None:
    for seed in range(300):
        one = random_instance(seed)
        assert violations(Plan(one, tuple(first_paths(one)))) == [], seed


def test_a_narrow_gap_is_kept_or_refused() -> None:
    kept = refused = 0
    for seed in range(400):
        one = replace(random_instance(seed), max_gap=1 + seed % 2, waves=1)
        try:
            plan = Plan(one, tuple(first_paths(one)))
        except ConfigError:
            refused += 1
        else:
            assert violations(plan) == [], seed
            kept += 1
    assert kept > 50
    assert refused > 5


def test_moves_keep_every_rule_and_can_be_undone() -> None:
    tried = 0
    for seed in range(60):
        one = random_instance(seed)
        paths = first_paths(one)
        rng = Random(seed)
        moves = RandomMoves(one, rng)
        for _ in range(150):
            move = moves.draw(paths, rng.randrange(len(paths)))
            if move is None:
                continue
            before = paths.copy()
            undo = apply(paths, move)
            assert violations(Plan(one, tuple(paths))) == []
            apply(paths, undo)
            assert paths == before
            apply(paths, move)
            tried += 1
    assert tried > 1000


def test_the_search_comes_within_a_percent_of_the_fastest_of_all_plans() -> None:
    for one in small_instances(80)[:8]:
        fastest_s = min(simulate(plan).makespan_s for plan in all_plans(one))
        found = schedule(one, seed=3, budget=SearchBudget(steps=3000))
        assert found.makespan_s <= 1.01 * fastest_s


def test_a_plan_is_reported_with_its_true_makespan() -> None:
    for seed in range(20):
        found = schedule(random_instance(seed), seed=seed, budget=SearchBudget(steps=150))
        assert violations(found.plan) == []
        assert simulate(found.plan).makespan_s == found.makespan_s


def test_equal_seeds_and_steps_give_equal_plans() -> None:
    geo8 = load_instance(INSTANCES / "geo8_skip25.json")
    first = schedule(geo8, seed=5, budget=SearchBudget(steps=400))
    assert schedule(geo8, seed=5, budget=SearchBudget(steps=400)) == first
    assert schedule(geo8, seed=6, budget=SearchBudget(steps=400)).plan != first.plan


def test_a_search_may_go_on_from_a_plan_and_never_gets_worse() -> None:
    geo8 = load_instance(INSTANCES / "geo8_skip25.json")
    first = schedule(geo8, seed=0, budget=SearchBudget(steps=300))
    second = schedule(geo8, seed=1, budget=SearchBudget(steps=300), start=first.plan)
    assert second.makespan_s <= first.makespan_s
    assert schedule(geo8, seed=1, budget=SearchBudget(steps=0), start=first.plan).plan == first.plan


def test_the_published_instance_is_planned_better_than_by_greed_alone() -> None:
    geo20 = load_instance(INSTANCES / "geo20_skip33.json")
    greedy_s = simulate(Plan(geo20, tuple(first_paths(geo20)))).makespan_s
    found = schedule(geo20, seed=0, budget=SearchBudget(steps=2000))
    assert found.makespan_s < 0.88 * greedy_s


def test_a_search_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a limit"):
        schedule(random_instance(0), seed=0, budget=SearchBudget())
