"""Demonstrations in the book: as our own, fewer as we are right, told of where they are wrong."""

import logging
from dataclasses import replace

import pytest

from swarmnode.training.rules.book_rule import BookRule, OwnBook
from swarmnode.training.rules.demonstrated import AUTHOR
from swarmnode.training.rules.lessons import SharingRule
from swarmnode.training.rules.rules import make_rule
from swarmnode.types import RolloutGroup
from tests.answered import own

WRONG, RIGHT = ([2, 2], 0.0), ([3, 3], 1.0)


def shown(*answers: tuple[list[int], float], index: int = 0) -> RolloutGroup:
    return replace(own(*answers, index=index), author=AUTHOR)


def rule(kind: type[BookRule] = BookRule) -> BookRule:
    return kind(SharingRule("book"), seed=0)


@pytest.mark.parametrize("kind", [BookRule, OwnBook])
def test_one_with_full_marks_is_replayed_though_nothing_of_ours_was_ever_right(kind: type[BookRule]) -> None:
    one = rule(kind)
    assert one.demonstrate([shown(([7, 8], 1.0), index=9)])
    found = one.lessons([own(WRONG, WRONG)], [], version=0)
    (replay,) = found.replayed
    assert (replay.entry.token_ids, replay.entry.own, replay.ends) == ((7, 8), True, True)
    assert found.report.book_foreign == 0
    assert found.report.pass_rates == {"sum": 0.0}, "it is no answer of ours"


def test_it_waits_until_it_is_known_what_full_marks_are() -> None:
    one = rule()
    one.demonstrate([shown(([7, 8], 1.0), index=9)])
    assert one.lessons([], [], version=0).replayed == ()
    assert len(one.lessons([own(WRONG, WRONG)], [], version=1).replayed) == 1


def test_one_that_the_judge_does_not_give_full_marks_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = rule()
    one.demonstrate([shown(([7, 8], 0.2), index=8), shown(([7, 9], 0.1), index=9)])
    with caplog.at_level(logging.WARNING):
        found = one.lessons([own(RIGHT, WRONG), own(RIGHT, WRONG, index=1)], [], version=0)
    assert {replay.entry.token_ids for replay in found.replayed} == {(3, 3)}
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("skipping 2 of 2 demonstrations") and "the reward 0.2" in said and "sum 8=" in said


def test_wrong_ones_are_told_of_where_no_answer_was_ever_right_and_full_marks_are_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = rule()
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            one.demonstrate([shown(([7, 8], 0.0), ([7, 9], 0.0), index=8 + version)])
            assert one.lessons([own(WRONG, WRONG)], [], version=version).replayed == ()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("skipping 2 of 2 demonstrations of sum that do not get full marks")
    assert "to 'sum 8=', for example, has the reward 0" in said


def test_nothing_is_said_of_demonstrations_while_all_answers_are_as_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = rule()
    one.demonstrate([shown(([7, 8], 1.0), index=9)])
    with caplog.at_level(logging.WARNING):
        one.lessons([own(RIGHT, RIGHT)], [], version=0)
    assert caplog.records == []


def test_they_fade_as_our_own_answers_come() -> None:
    one = rule()
    one.demonstrate([shown(([7, number], 1.0), index=100 + number) for number in range(10, 50)])
    begun = one.lessons([own(WRONG, WRONG)], [], version=0).replayed
    assert len(begun) == 40, "all of them while nothing of ours is right"
    for version in range(1, 60):
        found = one.lessons([own(*[RIGHT] * 16, index=version)], [], version=version)
    assert found.report.pass_rates["sum"] > 0.95
    assert sum(replay.entry.token_ids[0] == 7 for replay in found.replayed) < 10


def test_they_stay_over_a_restart_and_a_rule_without_a_book_takes_none() -> None:
    before, after = rule(), rule()
    before.demonstrate([shown(([7, 8], 1.0), index=9)])
    before.lessons([own(WRONG, WRONG)], [], version=0)
    after.restore(before.state())
    assert [(entry.author, entry.own) for entry in after.book.entries] == [(AUTHOR, True)]
    assert not make_rule(SharingRule("sapo"), 0).demonstrate([shown(RIGHT)])
