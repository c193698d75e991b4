from collections.abc import Sequence
from dataclasses import replace

from swarmnode.training.foreign.book import BookCandidate
from swarmnode.training.foreign.lessons import SharingRule
from swarmnode.training.foreign.rescue import MAX_OFFERS, Rescue
from tests.answered import foreign, own

WRONG, WORSE, RIGHT = ([2], 0.0), ([5], -1.0), ([3], 1.0)
THEIRS = foreign(([7], 1.0), ([8], 0.0), index=9)


def rescue(**settings: bool) -> Rescue:
    one = Rescue(SharingRule("rescue", **settings))
    # What full marks are is known from earlier rounds.
    one.lessons([own(RIGHT, WRONG, index=1000), own(RIGHT, WRONG, index=1001)], [], version=0)
    return one


def test_a_success_of_a_stranger_takes_the_place_of_our_worst_failure_on_the_same_example() -> None:
    one, mine = rescue(), own(RIGHT, WRONG, WORSE, WRONG, index=9)
    (lesson,) = one.lessons([mine], [THEIRS], version=1).own
    assert lesson.group.rewards == (1.0, 0.0, 1.0, 0.0)
    assert [completion.token_ids[0] for completion in lesson.group.completions] == [3, 2, 7, 2]
    assert lesson.group.completions[2].logprobs is None
    assert lesson.advantages is None, "the advantages are those of the mixed group"
    assert lesson.end_foreign, "as our failures do, it ends"
    assert (lesson.group.example, lesson.group.author) == (mine.example, "me")


def test_a_group_of_failures_gets_a_gradient() -> None:
    mine = own(*[WRONG] * 8, index=9)
    (lesson,) = rescue().lessons([mine], [THEIRS], version=1).own
    assert not mine.has_gradient and lesson.group.has_gradient


def test_who_passes_more_often_than_once_needs_no_rescue() -> None:
    mine = own(RIGHT, RIGHT, WRONG, WRONG, index=9)
    (lesson,) = rescue().lessons([mine], [THEIRS], version=1).own
    assert lesson.group is mine


def test_nothing_foreign_is_learned_from_otherwise() -> None:
    mine = own(WRONG, WRONG, index=4)
    lessons = rescue().lessons([mine], [THEIRS, foreign(RIGHT, WRONG, index=11)], version=1)
    assert lessons.external == () and lessons.replayed == ()
    assert lessons.own[0].group is mine


def test_the_success_waits_until_we_have_answered_the_example_and_helps_once() -> None:
    one, mine = rescue(), own(WRONG, WRONG, index=9)
    one.lessons([], [THEIRS], version=1)
    assert one.wanted_examples() == (THEIRS.example,)
    (first,) = one.lessons([mine], [], version=2).own
    (second,) = one.lessons([mine], [], version=3).own
    assert first.group.has_gradient and second.group is mine
    assert one.wanted_examples() == ()


def test_a_strangers_failures_and_half_answers_are_never_offered() -> None:
    one = rescue()
    cut = foreign(RIGHT, WRONG, index=9)
    cut = replace(cut, completions=tuple(replace(each, finish="abort") for each in cut.completions))
    for group in (cut, foreign(WRONG, WORSE, index=9), foreign(([], 1.0), WRONG, index=9)):
        one.lessons([], [group], version=1)
    assert one.wanted_examples() == ()


def test_the_mender_has_the_last_word_on_what_is_offered() -> None:
    def mend(answers: Sequence[BookCandidate]) -> Sequence[BookCandidate]:
        return [replace(one, token_ids=(6,), text="6") for one in answers if one.author != "spam"]

    one = Rescue(SharingRule("rescue"), mend=mend)
    one.lessons([own(RIGHT, WRONG, index=1000), own(RIGHT, WRONG, index=1001)], [], version=0)
    theirs = [THEIRS, foreign(RIGHT, WRONG, index=10, author="spam")]
    mine = [own(WRONG, WRONG, index=9), own(WRONG, WRONG, index=10)]
    cut, left_out = one.lessons(mine, theirs, version=1).own
    assert {completion.token_ids for completion in cut.group.completions} == {(2, 1), (6,)}
    assert left_out.group is mine[1]


def test_waiting_successes_are_bounded_and_the_oldest_leave() -> None:
    one = rescue()
    one.lessons([], [foreign(RIGHT, WRONG, index=n) for n in range(MAX_OFFERS + 10)], version=1)
    wanted = one.wanted_examples()
    assert len(wanted) == MAX_OFFERS and wanted[0].key.index == 10


def test_pass_rates_survive_a_restart() -> None:
    after = Rescue(SharingRule("rescue"))
    after.restore(rescue().state(), {"sum": "1"})
    assert after.needs() == {"sum": 0.5}
