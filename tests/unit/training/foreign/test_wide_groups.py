from math import sqrt

import pytest

from swarmnode.training.foreign.lessons import GroupLesson
from swarmnode.training.foreign.rules import Sapo, SharingRule, Successes, make_rule
from swarmnode.training.foreign.wide_groups import MAX_AUTHORS, MAX_EXAMPLES, WideGroups
from swarmnode.training.losses import Advantage, centred, standardised
from swarmnode.types import RolloutGroup
from tests.answered import foreign, own


def wide(name: str = "book", advantage: Advantage = standardised) -> WideGroups:
    return WideGroups(make_rule(SharingRule(name), seed=0), advantage)


def ours(*rewards: float, index: int = 0) -> RolloutGroup:
    return own(*(((10 + place,), reward) for place, reward in enumerate(rewards)), index=index)


def theirs(*rewards: float, index: int = 0, author: str = "stranger") -> RolloutGroup:
    answers = (((50 + place,), reward) for place, reward in enumerate(rewards))
    return foreign(*answers, index=index, author=author)


def of_ours(rule: WideGroups, group: RolloutGroup, *external: RolloutGroup) -> GroupLesson:
    (lesson,) = rule.lessons([group], external, version=0).own
    return lesson


def test_alone_on_an_example_a_group_is_what_it_was() -> None:
    group = ours(1.0, 0.0)
    assert of_ours(wide(), group, theirs(1.0, 0.0, index=7)) == GroupLesson(group)


def test_failures_alone_teach_where_another_was_right() -> None:
    lesson = of_ours(wide(), ours(0.0, 0.0, 0.0, 0.0), theirs(1.0, 0.0, 0.0, 0.0))
    assert lesson.advantages is not None
    assert all(one == pytest.approx(-1 / sqrt(7), abs=1e-3) for one in lesson.advantages if one is not None)


def test_a_success_is_worth_more_where_others_failed() -> None:
    alone = of_ours(wide(), ours(1.0, 1.0, 0.0, 0.0))
    among = of_ours(wide(), ours(1.0, 1.0, 0.0, 0.0), theirs(*[0.0] * 11, 1.0))
    assert alone.advantages is None
    assert among.advantages is not None and among.advantages[0] is not None
    assert 1.5 < among.advantages[0] <= sqrt(3)


def test_no_answer_gets_more_credit_than_the_only_right_one_of_its_group() -> None:
    many = [theirs(*[0.0] * 63, 1.0, author=f"stranger {n}") for n in range(8)]
    lesson = of_ours(wide(), ours(1.0, 0.0, 0.0, 0.0), *many)
    assert lesson.advantages is not None and lesson.advantages[0] == sqrt(3)


def test_it_does_not_matter_who_was_first() -> None:
    before, after = wide(), wide()
    before.lessons([], [theirs(1.0, 0.0)], version=0)
    assert of_ours(before, ours(0.0, 0.0)) == of_ours(after, ours(0.0, 0.0), theirs(1.0, 0.0))


def test_foreign_groups_that_are_trained_on_are_compared_with_ours() -> None:
    rule = WideGroups(Successes(), standardised)
    rule.lessons([ours(1.0, 1.0, 1.0, 0.0)], [], version=0)
    (lesson,) = rule.lessons([], [theirs(1.0, 0.0, 0.0, 0.0)], version=1).external
    assert lesson.gains_only and lesson.advantages is not None
    assert lesson.advantages[0] == pytest.approx(1.0, abs=1e-3), "and not 1.7: it is no rarity here"


def test_an_author_counts_once_for_an_example() -> None:
    rule = wide()
    for _ in range(5):
        rule.lessons([], [theirs(1.0, 1.0)], version=0)
    lesson = of_ours(rule, ours(0.0, 0.0))
    assert lesson.advantages == pytest.approx((-1.0, -1.0), abs=1e-3)


def test_as_many_authors_and_examples_are_remembered_as_are_bounded() -> None:
    rule = WideGroups(Sapo(), standardised)
    for number in range(MAX_AUTHORS + 5):
        rule.lessons([], [theirs(1.0, 0.0, author=f"stranger {number}")], version=0)
    assert len(rule._rewards[ours(1.0).example.key]) == MAX_AUTHORS
    rule.lessons([], [theirs(1.0, 0.0, index=n) for n in range(1, MAX_EXAMPLES + 5)], version=0)
    assert len(rule._rewards) == MAX_EXAMPLES


def test_losses_without_a_spread_compare_rewards_as_they_are() -> None:
    lesson = of_ours(wide(advantage=centred), ours(0.0, 0.0), theirs(1.0, 1.0, 0.0, 0.0))
    assert lesson.advantages == (-1 / 3, -1 / 3)


def test_an_answer_without_a_reward_gets_no_credit() -> None:
    group = own(((1,), None), ((2,), 0.0), ((3,), 0.0))
    lesson = of_ours(wide(), group, theirs(1.0, 0.0))
    assert lesson.advantages is not None and lesson.advantages[0] is None
    assert lesson.advantages[1] is not None and lesson.advantages[1] < 0


def test_what_the_rule_knows_survives_and_what_it_wants_is_wanted() -> None:
    rule, plain = wide("rescue"), make_rule(SharingRule("rescue"), seed=0)
    for one in (rule, plain):
        one.lessons([ours(1.0, 0.0)], [theirs(1.0, 0.0, index=3)], version=0)
    assert rule.keeps_own and rule.state() == plain.state() and rule.needs() == plain.needs()
    assert rule.wanted_examples() == plain.wanted_examples() != ()
    again = wide("rescue")
    again.restore(rule.state())
    assert again.state() == rule.state()
