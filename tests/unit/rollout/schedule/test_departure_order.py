"""The rule that keeps trained tokens young without dropping any."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.rollout.schedule.departure_order import due_in_rounds, leaves_room
from swarmnode.rollout.schedule.partial_settings import PartialSettings


@settings(max_examples=200, deadline=None)
@given(
    per_round=st.integers(1, 6),
    max_lag=st.integers(0, 5),
    eager=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_whatever_completes_first_every_group_leaves_in_time_and_every_round_ends(
    per_round: int, max_lag: int, eager: float, seed: int
) -> None:
    rng = random.Random(seed)
    groups_ahead = PartialSettings("refill", per_round, group_size=2, max_lag=max_lag).groups_ahead
    unfinished: list[int] = []  # version that each group began with
    complete: list[int] = []
    for version in range(12):
        places = per_round
        for _ in range(1000):
            if places == 0:
                break
            groups = [*unfinished, *complete]
            if len(groups) < places + groups_ahead and rng.random() < eager + 0.1:
                unfinished.append(version)
            elif unfinished and rng.random() < 0.7:
                complete.append(unfinished.pop(rng.randrange(len(unfinished))))
            elif complete:
                due = [due_in_rounds(begun, version, max_lag) for begun in groups]
                first = min(complete)
                assert due_in_rounds(first, version, max_lag) >= 0
                if leaves_room(due_in_rounds(first, version, max_lag), due, places, per_round):
                    complete.remove(first)
                    places -= 1
        assert places == 0
        assert all(due_in_rounds(begun, version + 1, max_lag) >= 0 for begun in (*unfinished, *complete))


def test_a_version_that_went_back_makes_nothing_older() -> None:
    assert due_in_rounds(7, newest_version=3, max_lag=2) == 2
