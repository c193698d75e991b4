import msgspec
import pytest

from swarmnode.training.rules.task_marks import MEMORY_ANSWERS, Marks, Saved, TaskMarks, needs_of
from tests.answered import foreign, own

WRONG, RIGHT = ([2], 0.0), ([3], 1.0)


def test_with_rewards_of_zero_and_one_full_marks_are_one() -> None:
    marks = TaskMarks()
    marks.record([own(RIGHT, WRONG, index=0), own(RIGHT, WRONG, WRONG, index=1)], [])
    assert marks.has_full("sum", 1.0)
    assert not marks.has_full("sum", 0.9)
    assert not marks.has_full("sum", 0.0)
    assert not marks.has_full("sum", None), "not scored is not right"


def test_the_first_success_of_a_task_has_full_marks_and_failures_never_do() -> None:
    marks = TaskMarks()
    marks.record([own(WRONG, WRONG, index=0), own(WRONG, RIGHT, index=1)], [])
    assert marks.has_full("sum", 1.0) and not marks.has_full("sum", 0.0)


def test_only_a_stranger_ever_succeeded_and_our_failures_are_still_failures() -> None:
    marks = TaskMarks()
    marks.record([own(WRONG, WRONG, index=0)], [foreign(RIGHT, WRONG, index=7)])
    assert marks.has_full("sum", 1.0) and not marks.has_full("sum", 0.0)
    assert marks.pass_rates == {"sum": 0.0}


def test_where_all_rewards_were_equal_nothing_is_known() -> None:
    marks = TaskMarks()
    marks.record([own(([2], 0.5), ([3], 0.5))], [])
    assert marks.full("sum") is None and not marks.has_full("sum", 0.5)
    assert marks.pass_rates == {} and not marks.has_full("never heard of", 1.0)


def test_partial_credit_is_not_full_marks_once_more_was_reached() -> None:
    """Share of right characters: while nobody gets all of it, the best so far counts."""
    marks = TaskMarks()
    marks.record([own(([2], 0.5), ([3], 0.25), index=0), own(([2], 0.5), ([3], 0.0), index=1)], [])
    assert marks.has_full("sum", 0.5) and not marks.has_full("sum", 0.25)
    marks.record([own(([2], 1.0), ([3], 0.5), index=2), own(([4], 1.0), index=3)], [])
    assert marks.has_full("sum", 1.0) and not marks.has_full("sum", 0.5)


def test_where_rewards_are_continuous_the_best_few_percent_count_and_not_one_answer() -> None:
    marks = TaskMarks()
    for index in range(20):
        marks.record([own(*(([place], place / 100 + index / 1e4) for place in range(100)), index=index)], [])
    full = marks.full("sum")
    assert full is not None and 0.95 < full < 0.99


def test_one_example_that_fools_the_judge_does_not_devalue_all_other_answers() -> None:
    marks = TaskMarks()
    marks.record(
        [own(RIGHT, WRONG, index=0), own(RIGHT, WRONG, index=1)], [foreign(([9], 1e6), WRONG, index=5)]
    )
    assert marks.has_full("sum", 1.0)
    marks.record([], [foreign(([9], 1e6), ([8], 1e6), index=5)])
    assert marks.has_full("sum", 1.0), "the same example again is no confirmation"


def test_full_marks_are_never_below_our_own_mean() -> None:
    marks = TaskMarks()
    for index in range(50):
        marks.record([own(*[RIGHT] * 63, WRONG, index=index)], [])
    mean = marks.by_task["sum"].mean
    assert mean is not None and not marks.has_full("sum", mean)


def test_the_pass_rate_follows_our_own_answers_alone() -> None:
    marks = TaskMarks()
    marks.record([own(RIGHT, WRONG, index=0), own(WRONG, WRONG, index=1)], [foreign(RIGHT, RIGHT, index=2)])
    assert marks.pass_rates == {"sum": 0.25}
    marks.record([own(*[RIGHT] * MEMORY_ANSWERS, index=3)], [])
    assert marks.pass_rates["sum"] == pytest.approx((0.25 + 1) / 2), "half of it is of the newest answers"
    assert needs_of(marks.pass_rates) == {"sum": pytest.approx(0.375)}


def test_what_passed_before_a_better_answer_was_known_is_forgotten() -> None:
    marks = TaskMarks()
    marks.record([own(([2], 0.5), ([3], 0.5), ([4], 0.0), index=n) for n in range(9)], [])
    assert marks.pass_rates["sum"] == pytest.approx(2 / 3)
    marks.record([own(([2], 0.5), ([3], 0.5), index=9)], [foreign(RIGHT, WRONG, index=n) for n in (20, 21)])
    assert marks.pass_rates["sum"] == 0.0


def test_tasks_are_judged_apart_and_can_be_forgotten() -> None:
    marks = TaskMarks()
    marks.record([own(([2], 10.0), ([3], 0.0), task="a"), own(RIGHT, WRONG, task="b")], [])
    assert marks.has_full("b", 1.0) and not marks.has_full("a", 1.0)
    marks.keep_only({"a": "1"})
    assert set(marks.by_task) == {"a"}


def test_marks_survive_being_written_down() -> None:
    marks = TaskMarks()
    marks.record([own(RIGHT, WRONG), own(WRONG, WRONG, task="b")], [])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(marks.by_task), type=Saved) == marks.by_task


def test_a_mark_that_only_one_example_got_counts_from_just_above_the_others() -> None:
    assert Marks(0.0, 1.0, (0, 1), confirmed=0.0).full == pytest.approx(0.0, abs=1e-5)
