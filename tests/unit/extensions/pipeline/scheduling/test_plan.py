from dataclasses import replace

import msgspec

from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import (
    Plan,
    digest,
    encode_plan,
    path_problem,
    violations,
)

ONE = Instance(
    names=tuple("abcdefgh"),
    forward_s=(1.0,) * 8,
    hop_s=tuple(tuple(0.1 if i == j else 1.0 + i + j / 3 for j in range(8)) for i in range(8)),
    memory=(2,) * 8,
    stages=((0, 1), (2, 3), (4, 5), (6,), (7,)),
    path_length=3,
    waves=2,
)
"""Stages 1 and 2 with two nodes, 3 and 4 with one."""

GOOD = Plan(ONE, ((0, 2, 6), (0, 3, 7), (1, 4, 6), (1, 5, 7)))


def broken(*paths: tuple[int, ...], instance: Instance = ONE) -> str:
    return "; ".join(violations(Plan(instance, paths)))


def test_a_good_plan_breaks_nothing() -> None:
    assert violations(GOOD) == []
    assert GOOD.micro_batches == 8
    assert GOOD.stages(3) == (0, 2, 4)


def test_each_broken_rule_is_named() -> None:
    assert "does not start at stage 0" in broken((2, 4, 6))
    assert "visits 2 stages" in broken((0, 2))
    assert "twice" in broken((0, 2, 3))
    assert "out of order" in broken((0, 4, 2))
    assert "steps over 3" in broken((0, 6, 7), instance=replace(ONE, max_gap=2))
    assert "node 7 (h) has 3 agents and 2 slots" in broken((0, 2, 7), (0, 3, 7), (1, 4, 7), (1, 5, 6))
    assert "stage 4 has 0 visits a wave, it needs 2" in broken((0, 2, 6), (0, 3, 4), (1, 4, 6), (1, 2, 5))
    assert "outside" in broken((0, 2, 8))
    assert "0 paths" in broken()


def test_stages_are_visited_in_order_and_stage_0_first() -> None:
    assert path_problem(replace(ONE, path_length=3), (0, 1, 2)) is None
    for stages in ((0, 2, 1), (1, 0, 2), (0, 1, 1)):
        assert path_problem(replace(ONE, path_length=3), stages) is not None


def test_a_plan_survives_its_encoding() -> None:
    assert msgspec.json.decode(encode_plan(GOOD), type=Plan) == GOOD


def test_plans_that_differ_have_different_digests() -> None:
    others = [
        replace(GOOD, paths=GOOD.paths[::-1]),
        replace(GOOD, instance=replace(ONE, waves=3)),
    ]
    assert len({digest(GOOD), *map(digest, others)}) == 3
    assert digest(GOOD) == digest(msgspec.json.decode(encode_plan(GOOD), type=Plan))
