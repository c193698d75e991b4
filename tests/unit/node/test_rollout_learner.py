import random

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.node.rollout_learner import more_groups


def ask(wanted: int, factor: float, useful: list[bool]) -> tuple[int, int, int]:
    """Ask until there is no more to ask for: (asked in all, with a gradient, times asked)."""
    asked = found = times = 0
    while more := more_groups(wanted, found, asked, factor):
        found += sum(useful[asked : asked + more])
        asked += more
        times += 1
    return asked, found, times


def test_a_round_begins_with_as_many_groups_as_are_wanted() -> None:
    assert more_groups(8, 0, 0, factor=1.0) == more_groups(8, 0, 0, factor=16.0) == 8


def test_with_factor_1_nothing_is_asked_again() -> None:
    assert more_groups(8, 0, 8, factor=1.0) == 0


def test_enough_groups_with_a_gradient_end_the_round() -> None:
    assert more_groups(8, 8, 8, factor=3.0) == more_groups(8, 9, 16, factor=3.0) == 0


def test_half_of_the_groups_useful_means_twice_as_many_as_are_missing() -> None:
    assert more_groups(64, 32, 64, factor=3.0) == 64


def test_the_rarer_useful_groups_are_the_more_are_asked_for() -> None:
    asked = [more_groups(32, found, 32, factor=16.0) for found in (31, 24, 16, 8, 1, 0)]
    assert asked == sorted(asked)
    assert asked[0] < asked[-1]


def test_no_luck_at_all_asks_for_some_and_not_at_once_for_all() -> None:
    assert more_groups(2, 0, 2, factor=16.0) == 6


def test_the_bound_is_kept_when_it_is_no_whole_number() -> None:
    assert more_groups(5, 0, 5, factor=1.5) == 2


@given(
    st.integers(1, 64), st.floats(1.0, 16.0), st.floats(0.0, 1.0), st.integers(0, 2**32), st.integers(0, 1)
)
def test_asking_ends_within_the_bound_with_enough_groups_or_with_the_bound_used_up(
    wanted: int, factor: float, chance: float, seed: int, always: int
) -> None:
    rng = random.Random(seed)
    useful = [bool(always) or rng.random() < chance for _ in range(16 * wanted)]
    asked, found, _ = ask(wanted, factor, useful)
    assert wanted <= asked <= factor * wanted
    assert found >= wanted or asked == int(factor * wanted)


def test_little_more_is_generated_than_a_perfect_guess_would_have_needed() -> None:
    rng = random.Random(0)
    overshoot: list[float] = []
    turns: list[int] = []
    for _ in range(200):
        useful = [rng.random() < 0.4 for _ in range(16 * 32)]
        asked, _, times = ask(32, 16.0, useful)
        places = [place for place, one in enumerate(useful) if one]
        overshoot.append(asked / (places[31] + 1))
        turns.append(times)
    assert sum(overshoot) / len(overshoot) < 1.15
    assert sum(turns) / len(turns) < 4
