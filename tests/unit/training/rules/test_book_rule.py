from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from swarmnode.errors import CheckpointError
from swarmnode.training.rules import lessons
from swarmnode.training.rules.book import BookCandidate
from swarmnode.training.rules.book_rule import BookRule, OwnBook
from swarmnode.training.rules.lessons import FORMAT, SharingRule
from swarmnode.training.rules.task_marks import needs_of
from swarmnode.types import Completion, RolloutGroup
from tests.answered import EOS, foreign, own

WRONG, RIGHT = ([2, 2], 0.0), ([3, 3], 1.0)
MIXED = (RIGHT, WRONG, WRONG)


def rule(name: str = "book", **settings: object) -> BookRule:
    kind = OwnBook if name == "own_book" else BookRule
    return kind(SharingRule(name, **settings), seed=0)  # type: ignore[arg-type]


def replayed(one: BookRule, version: int = 1) -> set[tuple[int, ...]]:
    return {replay.entry.token_ids for replay in one.lessons([], [], version=version).replayed}


def test_own_groups_stay_and_no_foreign_group_is_trained_on_as_it_is() -> None:
    groups = [own(*MIXED, index=0), own(WRONG, WRONG, index=1)]
    lessons = rule().lessons(groups, [foreign(*MIXED, index=5)], version=0)
    assert [lesson.group for lesson in lessons.own] == groups
    assert lessons.external == ()


def test_verified_answers_of_everybody_are_replayed_with_a_constant_advantage() -> None:
    lessons = rule().lessons([own(*MIXED, index=0)], [foreign(([4, 5], 1.0), ([6], 0.0), index=5)], version=0)
    assert {replay.entry.token_ids for replay in lessons.replayed} == {(3, 3), (4, 5)}
    assert {replay.advantage for replay in lessons.replayed} == {4.0}
    assert {replay.entry.prompt for replay in lessons.replayed} == {"sum 0=", "sum 5="}
    assert (lessons.report.book, lessons.report.book_foreign) == (2, 1)


def test_they_are_replayed_round_after_round_and_do_not_age() -> None:
    one = rule()
    one.lessons([own(*MIXED)], [foreign(([4, 5], 1.0), ([6], 0.0), index=5)], version=0)
    assert replayed(one, 1) == replayed(one, 1000) == {(3, 3), (4, 5)}


def test_groups_that_are_all_right_are_in_the_book_too() -> None:
    one = rule()
    one.lessons([own(*MIXED, index=0), own(([7], 1.0), ([7], 1.0), index=1)], [], version=0)
    assert (7,) in replayed(one)


def test_the_own_book_takes_nothing_from_others() -> None:
    one = rule("own_book")
    lessons = one.lessons([own(*MIXED)], [foreign(([4, 5], 1.0), ([6], 0.0), index=5)], version=0)
    assert {replay.entry.token_ids for replay in lessons.replayed} == {(3, 3)}
    assert lessons.external == () and lessons.report.book_foreign == 0
    assert not one.marks.has_full("sum", 0.5)


def test_no_more_answers_than_set_are_replayed() -> None:
    one = rule(book_replayed=5)
    groups = [own(([10 + n], 1.0), WRONG, index=n) for n in range(50)]
    assert len(one.lessons(groups, [], version=0).replayed) == 5
    assert len(rule(book_replayed=0).lessons(groups, [], version=0).replayed) == 0


def test_others_answers_are_at_most_a_part_of_what_is_replayed_but_for_who_catches_up() -> None:
    one = rule(book_replayed=8, book_foreign=3)
    theirs = [foreign(([10 + n], 1.0), WRONG, index=n) for n in range(9)]
    usual = one.lessons([own(([5], 1.0), WRONG, index=20)], theirs, version=0)
    assert sorted(replay.entry.own for replay in usual.replayed) == [False] * 3 + [True]
    one.replayed = 8
    assert len(one.lessons([], [], version=1).replayed) == 8


def test_the_end_of_a_strangers_verified_answer_is_taught_unless_that_is_turned_off() -> None:
    theirs = foreign(([4, 5], 1.0), ([6], 0.0), index=5)
    (taught,) = rule().lessons([], [theirs], version=0).replayed
    (not_taught,) = rule(teach_ends=False).lessons([], [theirs], version=0).replayed
    assert (taught.ends, not_taught.ends) == (True, False)


def test_an_end_that_we_sampled_is_taught_in_any_case_and_is_no_other_answer() -> None:
    one = rule(teach_ends=False)
    lessons = one.lessons([own(*MIXED, index=5)], [foreign(*MIXED, index=5)], version=0)
    (replay,) = lessons.replayed
    assert replay.ends and EOS not in replay.entry.token_ids
    assert lessons.report.book_foreign == 0


def test_what_was_cut_off_or_not_scored_or_empty_is_no_lesson() -> None:
    group = foreign(RIGHT, WRONG, ([7], None), ([], 1.0), index=5)
    aborted = replace(group.completions[0], finish="abort")
    group = replace(group, completions=(aborted, *group.completions[1:]))
    assert rule().lessons([], [group], version=0).replayed == ()


def test_a_claim_of_how_an_answer_ended_changes_nothing() -> None:
    """tests/hostile/test_learning.py: right answers said to be cut off, wrong ones said to have ended."""

    def claimed(group: RolloutGroup, finish: str) -> RolloutGroup:
        ends: Sequence[Completion] = [replace(one, finish=finish) for one in group.completions]  # type: ignore[arg-type]
        return replace(group, completions=tuple(ends))

    lessons = rule().lessons([], [claimed(foreign(RIGHT, WRONG), "length")], version=0)
    assert [replay.entry.token_ids for replay in lessons.replayed] == [(3, 3)]
    assert lessons.external == (), "so nothing wrong is trained on, whatever its end"


def test_answers_that_a_better_one_devalues_leave_the_book() -> None:
    one = rule()
    one.lessons([own(([7], 0.5), WRONG, index=n) for n in range(3)], [], version=0)
    assert replayed(one) == {(7,)}
    one.lessons([], [foreign(([9], 1.0), WRONG, index=n) for n in (20, 21)], version=1)
    assert replayed(one, 2) == {(9,)}


def test_the_mender_sees_foreign_answers_only_and_has_the_last_word() -> None:
    seen: list[BookCandidate] = []

    def mend(answers: Sequence[BookCandidate]) -> Sequence[BookCandidate]:
        seen.extend(answers)
        return [
            BookCandidate(
                one.example, "5", msgspec.structs.replace(one.entry, token_ids=one.entry.token_ids[-1:])
            )
            for one in answers
            if one.entry.author != "spam"
        ]

    one = BookRule(SharingRule("book"), 0, mend)
    theirs = foreign(([4, 5], 1.0), WRONG, index=5), foreign(([8, 9], 1.0), WRONG, index=6, author="spam")
    one.lessons([own(*MIXED)], theirs, version=0)
    assert [answer.text for answer in seen] == ["4 5", "8 9"]
    assert replayed(one) == {(3, 3), (5,)}


def test_the_same_round_gives_the_same_lessons() -> None:
    groups = [own(([10 + n], 1.0), WRONG, index=n) for n in range(200)]
    first, second = rule().lessons(groups, [], version=3), rule().lessons(groups, [], version=3)
    assert first == second
    assert first.replayed != rule().lessons(groups, [], version=4).replayed


def test_we_need_what_we_fail_on() -> None:
    one = rule()
    one.lessons([own(*MIXED), own(RIGHT, RIGHT, WRONG, task="b"), own(WRONG, task="c")], [], version=0)
    needs = needs_of(one.marks.pass_rates)
    assert needs == {"sum": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}, "nothing is known of c"


def test_a_restart_keeps_the_book() -> None:
    before = rule()
    before.lessons([own(*MIXED)], [foreign(([4, 5], 1.0), WRONG, index=5)], version=0)
    after = rule()
    after.restore(before.state())
    assert after.book.entries == before.book.entries
    assert after.lessons([], [], version=7) == before.lessons([], [], version=7)
    assert after.marks.pass_rates == before.marks.pass_rates


def test_a_restart_forgets_tasks_that_are_gone_or_have_changed() -> None:
    before = rule()
    before.lessons([own(*MIXED), own(*MIXED, task="gone"), own(*MIXED, task="changed")], [], version=0)
    after = rule()
    after.restore(before.state(), {"sum": "1", "changed": "2"})
    assert {entry.task for entry in after.book.entries} == {"sum"}
    assert "gone" not in after.marks.pass_rates


def test_answers_of_strangers_to_a_task_that_stays_at_home_now_leave_the_book() -> None:
    one = rule()
    theirs = foreign(([4, 5], 1.0), WRONG, index=5)
    one.lessons([own(*MIXED), own(*MIXED, task="open")], [theirs], version=0)
    one.forget_strangers({"sum"})
    assert {(entry.task, entry.own) for entry in one.book.entries} == {("sum", True), ("open", True)}


def test_a_smaller_book_takes_the_newest_of_a_larger_one() -> None:
    before = rule()
    before.lessons([own(([10 + n], 1.0), WRONG, index=n) for n in range(9)], [], version=0)
    after = rule(book_size=3)
    after.restore(before.state())
    assert [entry.index for entry in after.book.entries] == [6, 7, 8]


def test_the_state_of_another_rule_and_none_at_all_begin_with_nothing() -> None:
    before = rule("book")
    before.lessons([own(*MIXED)], [], version=0)
    after = rule("own_book")
    after.restore(before.state())
    after.restore(b"")
    assert len(after.book) == 0


def test_a_state_that_could_not_be_read_again_is_not_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = rule()
    before.lessons([own(*MIXED)], [], version=0)
    monkeypatch.setattr(lessons, "MAX_STATE_BYTES", len(before.state()) - 1)
    assert before.state() == b"" and "exceeds the checkpoint limit" in caplog.text
    after = rule()
    after.restore(before.state())
    assert len(after.book) == 0


def test_a_state_of_just_the_limit_is_written_and_read_and_a_larger_one_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = rule(), rule()
    before.lessons([own(*MIXED)], [], version=0)
    state = before.state()
    monkeypatch.setattr(lessons, "MAX_STATE_BYTES", len(state))
    assert before.state() == state
    after.restore(state)
    assert len(after.book) == 1
    monkeypatch.setattr(lessons, "MAX_STATE_BYTES", len(state) - 1)
    with pytest.raises(CheckpointError, match=f"{len(state)} bytes, at most"):
        rule().restore(state)


def saved(token_ids: object) -> list[object]:
    """The state of a book with one entry."""
    return [{}, [["sum", "1", 0, 0, "sum 0=", token_ids, 1.0, "me", True, True]]]


@pytest.mark.parametrize(
    "state",
    [
        "rubbish",
        [FORMAT, "book", {"no": "book"}],
        [FORMAT + 1, "book", saved([3])],
        [FORMAT, "book", saved([])],
        [FORMAT, "book", saved(["x"])],
        [FORMAT, "book", saved([3] * 200_000)],
        [FORMAT, "b" * 257, saved([3])],
    ],
)
def test_a_damaged_state_is_an_error_that_says_so(state: object) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        rule().restore(msgspec.msgpack.encode(state))


def test_a_name_that_is_no_text_is_damage_too() -> None:
    state = msgspec.msgpack.encode([FORMAT, "book", saved([3])])
    with pytest.raises(CheckpointError, match="cannot read"):
        rule().restore(state.replace(b"book", b"b\xff\xffk", 1))


def test_so_is_what_is_nested_without_end() -> None:
    state = msgspec.msgpack.encode([FORMAT, "book", msgspec.Raw(b"\x91" * 100_000 + b"\x00")])
    with pytest.raises(CheckpointError, match="cannot read"):
        rule().restore(state)


def test_the_state_above_is_damaged_by_nothing_else() -> None:
    one = rule()
    one.restore(msgspec.msgpack.encode([FORMAT, "book", saved([3])]))
    assert len(one.book) == 1


def test_who_catches_up_replays_more_in_several_steps_of_so_many_answers() -> None:
    one = rule(book_replayed=6, step_answers=3)
    one.replayed, one.step_answers = 20, 5
    few = one.lessons([own(([10 + n], 1.0), WRONG, index=n) for n in range(12)], [], version=0)
    assert (len(few.replayed), few.replay_steps) == (12, 2)
    many = one.lessons([own(([50 + n], 1.0), WRONG, index=50 + n) for n in range(12)], [], version=1)
    assert (len(many.replayed), many.replay_steps) == (20, 4)
    one.replayed, one.step_answers = None, None
    usual = one.lessons([], [], version=2)
    assert (len(usual.replayed), usual.replay_steps) == (6, 2)


def test_the_book_tells_whose_answers_to_which_examples_it_holds() -> None:
    one = rule()
    mine, theirs = own(*MIXED, index=0), foreign(([4, 5], 1.0), ([4], 1.0), ([6], 0.0), index=5)
    one.lessons([mine], [theirs], version=0)
    assert one.origins() == {(mine.author, mine.example.key): 1, (theirs.author, theirs.example.key): 2}
