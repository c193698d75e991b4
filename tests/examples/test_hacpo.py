import pytest

from examples.rules.hacpo import MAX_ORIGINS, OURSELVES, ROUNDS, Hacpo
from swarmnode.training.losses import EPSILON
from swarmnode.training.rules.lessons import Lessons, SharingRule
from swarmnode.types import RolloutGroup
from tests.answered import foreign, own

WRONG, RIGHT = ([2], 0.0), ([3], 1.0)


def hacpo() -> Hacpo:
    return Hacpo(SharingRule("hacpo"))


def lessons(one: Hacpo, mine: list[RolloutGroup], theirs: list[RolloutGroup]) -> Lessons:
    return one.lessons(mine, theirs, version=0)


def test_own_groups_alone_are_as_they_are() -> None:
    group = own(RIGHT, WRONG)
    (lesson,) = lessons(hacpo(), [group], []).own
    assert (lesson.group, lesson.advantages) == (group, None)


def test_a_more_capable_stranger_does_not_raise_our_baseline_by_its_skill() -> None:
    """We get 0.25, it gets 0.75: its answers are measured against what we would get, 0.25."""
    mine, theirs = own(RIGHT, WRONG, WRONG, WRONG, index=0), foreign(RIGHT, RIGHT, RIGHT, WRONG, index=5)
    (lesson,) = lessons(hacpo(), [mine], [theirs]).external
    spread = 0.75**0.5 * 0.25**0.5 + EPSILON
    assert lesson.advantages == pytest.approx([0.75 / spread] * 3 + [-0.25 / spread])


def test_a_less_capable_stranger_counts_less() -> None:
    mine, theirs = own(RIGHT, RIGHT, RIGHT, WRONG, index=0), foreign(RIGHT, WRONG, WRONG, WRONG, index=5)
    (lesson,) = lessons(hacpo(), [mine], [theirs]).external
    spread = 0.75**0.5 * 0.25**0.5 + EPSILON
    assert lesson.advantages == pytest.approx([0.75 / 3 / spread] + [-0.25 / 3 / spread] * 3)


def test_nobody_gains_more_than_to_count_as_we_do_by_choosing_what_to_send() -> None:
    one = hacpo()
    easy = [foreign(*[RIGHT] * 63, WRONG, index=n) for n in range(9)]
    hard = foreign(RIGHT, WRONG, index=50)
    taught = lessons(one, [own(RIGHT, *[WRONG] * 63)], [*easy, hard])
    advantages = taught.external[-1].advantages
    assert advantages is not None and all(abs(a) <= 2 for a in advantages if a is not None)
    assert one.capability("stranger") == pytest.approx((9 * 63 / 64 + 0.5) / 10)


def test_answers_to_one_example_are_compared_with_each_other() -> None:
    mine, theirs = own(WRONG, WRONG, index=5), foreign(RIGHT, RIGHT, index=5)
    one = hacpo()
    taught = lessons(one, [own(RIGHT, WRONG), mine], [theirs])
    (_, failed), (learnt,) = taught.own, taught.external
    assert failed.advantages is not None and learnt.advantages is not None
    assert max(a for a in failed.advantages if a is not None) < 0 < min(a for a in learnt.advantages if a)


def test_capability_is_that_of_the_last_rounds() -> None:
    one = hacpo()
    for number in range(10):
        lessons(one, [own(RIGHT if number >= 10 - ROUNDS else WRONG)], [])
    assert one.capability(OURSELVES) == 1.0


def test_unscored_answers_have_no_advantage_and_no_part_in_the_baseline() -> None:
    (lesson,) = lessons(hacpo(), [own(RIGHT, WRONG)], [foreign(RIGHT, WRONG, ([4], None), index=5)]).external
    assert lesson.advantages is not None and lesson.advantages[2] is None
    assert sum(a for a in lesson.advantages if a is not None) == pytest.approx(0)


def test_rewards_that_are_not_positive_give_no_weights() -> None:
    (lesson,) = lessons(hacpo(), [own(([2], -1.0), WRONG)], [foreign(RIGHT, ([2], -1.0), index=5)]).external
    assert lesson.advantages == pytest.approx([1, -1], abs=1e-3)


def test_capabilities_are_bounded_in_number_and_survive_a_restart() -> None:
    one = hacpo()
    for number in range(2 * MAX_ORIGINS):
        lessons(one, [own(RIGHT, WRONG)], [foreign(RIGHT, WRONG, author=f"name {number}", index=5)])
    after = hacpo()
    after.restore(one.state())
    assert after.capability(OURSELVES) == 0.5
    assert after.capability(f"name {2 * MAX_ORIGINS - 1}") == 0.5
    assert after.capability("name 0") is None
