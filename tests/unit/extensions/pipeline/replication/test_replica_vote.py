"""Whose weights are right where replicas differ: the largest side, and of equal ones nobody's."""

import pytest
import torch
from torch import Tensor

from swarmnode.extensions.pipeline.replication.replica_vote import (
    NEAR,
    ReplicaVote,
    ReplicaWeights,
    is_near,
    vote_of,
)

OLD = "0" * 64


def said(**marks: str) -> dict[str, ReplicaWeights]:
    """By peer: a digest of one letter, after it where it came from if that is not the usual."""
    return {peer: ReplicaWeights(mark[0] * 64, mark[1:] * 64 or OLD) for peer, mark in marks.items()}


def seen_by(us: str, votes: dict[str, ReplicaWeights]) -> ReplicaVote:
    return vote_of(us, votes)


def test_the_largest_side_is_right_and_the_others_ask_it() -> None:
    votes = said(a="1", b="2", c="2")
    assert [seen_by(us, votes).agrees for us in "abc"] == [False, True, True]
    assert (seen_by("a", votes).ask, seen_by("a", votes).digest) == (("b", "c"), "2" * 64)
    assert all(seen_by(us, votes).differs and not seen_by(us, votes).rivals for us in "abc")
    assert not seen_by("a", said(a="1", b="1")).differs


def test_of_equal_sides_none_is_right_and_all_see_the_same_ones() -> None:
    for votes in (said(b="1", a="2"), said(a="2", b="1", c="1", d="2"), said(a="1", b="2", c="3")):
        seen = [seen_by(us, votes) for us in votes]
        assert not any(one.agrees for one in seen)
        assert all(one.rivals == seen[0].rivals for one in seen)
        assert seen[0].rivals[0].peers[0] == "a"
        assert {side.before for side in seen[0].rivals} == {OLD}


def test_a_side_that_does_not_say_with_one_voice_where_it_came_from_has_no_way_back() -> None:
    (first, second) = seen_by("a", said(a="1", b="2", c="17", d="2")).rivals
    assert (first.peers, first.before, second.before) == (("a", "c"), "", OLD)


def test_who_does_not_know_where_it_stands_is_not_counted_and_follows() -> None:
    votes = said(b="2") | {peer: ReplicaWeights("1" * 64) for peer in "acd"}
    assert [seen_by(us, votes).agrees for us in "abcd"] == [False, True, False, False]
    assert seen_by("a", votes).ask == ("b",)


def test_where_nobody_knows_the_side_with_the_smallest_peer_id_is_followed() -> None:
    votes = {"b": ReplicaWeights("1" * 64), "a": ReplicaWeights("2" * 64)}
    assert [seen_by(us, votes).agrees for us in "ab"] == [True, False]
    assert seen_by("b", votes).ask == ("a",)


def state(
    weight: list[float], moment: list[float], square: list[float], step: float = 3.0
) -> dict[str, Tensor]:
    tensors = {"w": weight, "exp_avg/w": moment, "exp_avg_sq/w": square, "step/w": step}
    return {name: torch.tensor(values) for name, values in tensors.items()}


BEFORE = state([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], 2.0)
AFTER = state([1.1, 0.9], [0.1, -1e-6], [0.01, 1e-12])


def test_what_differs_by_rounding_is_near_and_the_order_does_not_matter() -> None:
    rounded = {name: t if t.dim() == 0 else t * (1 + 1e-6) for name, t in AFTER.items()}
    assert is_near(AFTER, rounded, BEFORE) and is_near(rounded, AFTER, BEFORE)
    assert is_near(AFTER, AFTER, BEFORE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("w", [1.1, 0.9 + 3 * NEAR * 0.1]),
        ("w", [1.1, float("nan")]),
        ("exp_avg/w", [0.1, -1e-6 - 2 * NEAR * 1e-6]),
        ("exp_avg_sq/w", [0.01, 0.0]),
        ("exp_avg_sq/w", [0.01, 1.1e-12]),
        ("step/w", 4.0),
    ],
)
def test_what_would_move_the_weights_now_or_at_the_next_step_is_not_near(name: str, value: object) -> None:
    other = AFTER | {name: torch.tensor(value)}
    assert not is_near(AFTER, other, BEFORE)
    assert not is_near(other, AFTER, BEFORE)


def test_a_replica_that_took_another_step_or_none_is_not_near() -> None:
    assert not is_near(AFTER, BEFORE, BEFORE)
    assert not is_near(AFTER, state([0.9, 1.1], [0.1, -1e-6], [0.01, 1e-12]), BEFORE)
    assert not is_near(AFTER, {"w": AFTER["w"]}, BEFORE)
    assert not is_near(AFTER, AFTER, {})
