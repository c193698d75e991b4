"""Paths follow from prompts, nodes from paths and from who is left."""

from collections import Counter

import pytest

from swarmnode.extensions.pipeline.rollouts.routing import (
    Route,
    path_of_prompt,
    route_along,
)
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers

MEMBERS = PlanMembers("plan", tuple("abcdefg"), 5, (0, 1, 2, 1, 2, 0, -1))


def test_a_prompt_always_takes_the_same_path_and_prompts_share_the_paths_out() -> None:
    paths = [(0, 1), (0, 2), (0, 1, 2), (0, 2, 1)]
    chosen = [path_of_prompt(paths, (number, 3)) for number in range(400)]
    assert chosen == [path_of_prompt(paths, [number, 3]) for number in range(400)]
    assert min(Counter(chosen).values()) > 70


def test_a_way_begins_at_the_own_node_and_keeps_the_order_of_the_path() -> None:
    route = route_along(MEMBERS, (0, 2, 1), ())
    assert route is not None
    assert (route.stages, route.nodes[0], route.plan) == ((0, 2, 1), 5, "plan")
    assert route.nodes[1] in (2, 4)
    assert route.nodes[2] in (1, 3)


def test_a_replica_stands_in_and_a_stage_without_one_is_left_out() -> None:
    assert route_along(MEMBERS, (0, 1, 2), {1, 2}) == Route((0, 1, 2), (5, 3, 4), "plan")
    assert route_along(MEMBERS, (0, 1, 2), {1, 3, 2}) == Route((0, 2), (5, 4), "plan")
    assert route_along(MEMBERS, (0, 1, 2), {1, 2, 3, 4}) == Route((0,), (5,), "plan")


@pytest.mark.parametrize("path", [(), (1, 2), (0, 1, 1), (0, 7)])
def test_what_is_no_path_here_has_no_way(path: tuple[int, ...]) -> None:
    assert route_along(MEMBERS, path, ()) is None
