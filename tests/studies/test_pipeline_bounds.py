"""No plan is faster than a bound of benchmarks/pipeline_bounds.py."""

from pathlib import Path

import pytest

from benchmarks.pipeline_bounds import free_map_bound_s, makespan_bound_s
from swarmnode.extensions.pipeline.scheduling.instance import load_instance
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import simulate
from tests.unit.extensions.pipeline.scheduling.test_schedule import all_plans, small_instances

GEO20 = Path(__file__).parents[2] / "benchmarks" / "instances" / "geo20_skip33.json"


def test_no_plan_is_faster_than_the_bound() -> None:
    instances = small_instances(150)
    assert len(instances) > 30
    for one in instances:
        found = schedule(one, seed=0, budget=SearchBudget(steps=200))
        fastest_s = min(found.makespan_s, *(simulate(plan).makespan_s for plan in all_plans(one)[:600]))
        assert 0 < makespan_bound_s(one) <= fastest_s + 1e-9
        assert free_map_bound_s(one) <= fastest_s + 1e-9


def test_the_published_instance_has_the_published_bound() -> None:
    assert makespan_bound_s(load_instance(GEO20)) == pytest.approx(58.299, abs=1e-3)
