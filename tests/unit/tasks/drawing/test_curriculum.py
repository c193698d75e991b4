"""Curricula: levels that stand in seeds, and when they move."""

from swarmnode.tasks.drawing.curriculum import MAX_LEVELS, Level, at_level, level_of
from swarmnode.tasks.task import MAX_SEED


def test_a_level_is_part_of_a_seed_and_a_seed_without_asks_at_all_in_turn() -> None:
    for level in (0, 1, MAX_LEVELS - 1):
        seed = at_level(MAX_SEED, level)
        assert 0 <= seed <= MAX_SEED and level_of(seed, 5, MAX_LEVELS) == level
    assert [level_of(7_654_321, index, 3) for index in range(4)] == [0, 1, 2, 0]


def test_a_level_moves_up_when_most_pass_and_down_when_hardly_any_does() -> None:
    assert Level(1).after([1.0] * 48 + [0.0] * 16, levels=3) == Level(2)
    assert Level(1).after([1.0] * 6 + [0.0] * 58, levels=3) == Level(0)
    between = Level(1).after([1.0] * 32 + [0.0] * 32, levels=3)
    assert (between.level, between.passes, between.answers) == (1, 16.0, 32.0)
    assert Level(1).after([1.0] * 63, levels=3).level == 1  # too few to say
    assert Level(2).after([1.0] * 64, levels=3).level == 2  # the last
    assert Level(0).after([0.0] * 64, levels=3).level == 0
