from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from examples.rules.rescue import MAX_AGE, MAX_WAITING, Rescue
from swarmnode.training.rules.book import BookCandidate
from swarmnode.training.rules.lessons import Lessons, SharingRule
from swarmnode.types import RolloutGroup
from tests.answered import foreign, own

WRONG, WORSE, RIGHT = ([2], 0.0), ([5], -1.0), ([3], 1.0)
MINE = own(WRONG, WRONG, WORSE, WRONG, index=9)
THEIRS = foreign(([7], 1.0), ([8], 0.0), index=9)


def rescue(one: Rescue | None = None) -> Rescue:
    one = one or Rescue(SharingRule("rescue"))
    # What full marks are is known from earlier rounds.
    one.lessons([own(RIGHT, WRONG, index=1000), own(RIGHT, WRONG, index=1001)], [], version=0)
    return one


def taught(
    mine: Sequence[RolloutGroup], theirs: Sequence[RolloutGroup], one: Rescue | None = None
) -> Lessons:
    return (one or rescue()).lessons(mine, theirs, version=1)


def test_a_success_of_a_stranger_takes_the_place_of_our_worst_failure_on_the_same_example() -> None:
    lessons = taught([own(WRONG, WORSE, WRONG, WRONG, index=9)], [THEIRS])
    (lesson,), (success,) = lessons.own, lessons.replayed
    assert lesson.advantages is not None
    assert lesson.advantages[1] is None, "it is not there"
    assert [lesson.advantages[place] for place in (0, 2, 3)] == pytest.approx([-(3**-0.5)] * 3, abs=1e-3)
    assert success.entry.token_ids == (7,) and success.ends, "as our failures do, it ends"
    assert success.advantage == pytest.approx(3**0.5, abs=1e-3), "of one success among four"


def test_one_success_among_many_has_no_more_credit_than_a_lone_one_of_ours() -> None:
    theirs = foreign(*[([8, n], 0.0) for n in range(63)], ([7], 1.0), index=9)
    (success,) = taught([own(*[WRONG] * 4, index=9)], [theirs]).replayed
    assert success.advantage == pytest.approx(3**0.5, abs=1e-3)


def test_who_passes_itself_needs_no_rescue() -> None:
    mine = own(RIGHT, WRONG, WRONG, WRONG, index=9)
    lessons = taught([mine], [THEIRS])
    assert lessons.own[0].group is mine and lessons.own[0].advantages is None and lessons.replayed == ()


def test_nothing_foreign_is_learned_from_otherwise() -> None:
    lessons = taught([own(WRONG, WRONG, index=4)], [THEIRS, foreign(RIGHT, WRONG, index=11)])
    assert lessons.external == () and lessons.replayed == ()
    assert [lesson.advantages for lesson in lessons.own] == [None]


def test_our_failures_wait_until_somebody_succeeds_and_are_rescued_once() -> None:
    one = rescue()
    assert taught([MINE], [], one).replayed == ()
    later = taught([], [THEIRS], one)
    assert [lesson.group for lesson in later.own] == [MINE] and len(later.replayed) == 1
    assert taught([], [THEIRS], one).replayed == ()


def test_failures_of_long_ago_are_not_taught_any_more() -> None:
    one = rescue()
    one.lessons([MINE], [], version=0)
    assert one.lessons([], [THEIRS], version=MAX_AGE + 1).replayed == ()


def test_waiting_failures_are_bounded_and_the_oldest_leave() -> None:
    one, last = rescue(), MAX_WAITING + 10
    one.lessons([own(WRONG, WRONG, index=n) for n in range(last)], [], version=1)
    theirs = [foreign(RIGHT, WRONG, index=n) for n in range(last)]
    rescued = one.lessons([], theirs, version=1).own
    assert [lesson.group.example.key.index for lesson in rescued] == list(range(10, last))


def test_a_strangers_failures_and_half_answers_rescue_nobody() -> None:
    cut = foreign(RIGHT, WRONG, index=9)
    cut = replace(cut, completions=tuple(replace(each, finish="abort") for each in cut.completions))
    for group in (cut, foreign(WRONG, WORSE, index=9), foreign(([], 1.0), WRONG, index=9)):
        assert taught([MINE], [group]).replayed == ()


def test_what_an_environment_said_in_a_success_is_not_learned() -> None:
    long = foreign(([7, 20, 8], 1.0), ([8], 0.0), index=9).completions
    heard = replace(long[0], given=((1, 2),))
    (success,) = taught([MINE], [replace(THEIRS, completions=(heard, long[1]))]).replayed
    assert (success.entry.token_ids, success.entry.given) == ((7, 20, 8), ((1, 2),))


def test_the_mender_has_the_last_word_on_what_is_learned_from() -> None:
    def mend(answers: Sequence[BookCandidate]) -> Sequence[BookCandidate]:
        return [
            BookCandidate(one.example, "6", msgspec.structs.replace(one.entry, token_ids=(6,)))
            for one in answers
            if one.entry.author != "spam"
        ]

    one = rescue(Rescue(SharingRule("rescue"), mend=mend))
    theirs = [THEIRS, foreign(RIGHT, WRONG, index=10, author="spam")]
    lessons = taught([MINE, own(WRONG, WRONG, index=10)], theirs, one)
    assert [success.entry.token_ids for success in lessons.replayed] == [(6,)]
    assert [lesson.advantages is None for lesson in lessons.own] == [True, False]


def test_pass_rates_survive_a_restart() -> None:
    after = Rescue(SharingRule("rescue"))
    after.restore(rescue().state(), {"sum": "1"})
    assert after.marks.pass_rates == {"sum": 0.5}
