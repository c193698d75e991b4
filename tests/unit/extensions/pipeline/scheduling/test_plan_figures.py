from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.scheduling.plan_figures import figures_of
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

SKIPPING = Instance(
    names=tuple("abcdefg"),
    forward_s=(1.0, 1.0, 1.0, 2.0, 1.0, 1.5, 1.0),
    hop_s=tuple(tuple(0.1 if i == j else 1.0 + abs(i - j) / 3 for j in range(7)) for i in range(7)),
    memory=(2, 2, 2, 2, 2, 1, 1),
    stages=((0, 1), (2,), (3,), (4, 5)),
    path_length=2,
    waves=2,
)
"""4 in flight with skipping, 2 without; node 6 is in no stage."""


def test_the_figures_are_those_of_the_plan() -> None:
    plan = schedule(SKIPPING, seed=1, budget=SearchBudget(steps=60)).plan
    found = figures_of(plan)
    assert found.violations == ()
    assert found.makespan_s == simulate(plan).makespan_s
    assert (found.paths, found.digest) == (plan.paths, digest(plan))
    assert (found.micro_batches, found.in_flight, found.waves) == (8, 4, 2)
    assert found.skip_ratio == 0.5
    assert (found.slots_used, found.slots) == (8, 12)
    assert (found.stages[0].visits, found.stages[0].slots) == (4, 4)
    assert sum(use.visits for use in found.stages) == found.slots_used
    assert all(use.visits >= use.least_visits > 0 for use in found.stages)
    assert [(use.node, use.stage) for use in found.nodes][-2:] == [(5, 3), (6, -1)]
    by_node = {use.node: use for use in found.nodes}
    assert found.stages[3].utilisation == (by_node[4].utilisation + by_node[5].utilisation) / 2
    assert by_node[6].utilisation == by_node[6].slots_used == 0


def test_a_plan_that_breaks_rules_says_so() -> None:
    told = figures_of(Plan(SKIPPING, ((0, 2), (0, 2), (1, 2), (1, 3))))
    assert "node 2 (c) has 3 agents and 2 slots" in told.violations
    assert "stage 3 has 0 visits a wave, it needs 1" in told.violations
