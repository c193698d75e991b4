import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training.rules import book as saved
from swarmnode.training.rules.book import AUTHOR_SHARE, MAX_TOKENS, Book, Entry


def entry(
    number: int, *, task: str = "sum", index: int | None = None, author: str = "me", own: bool = True
) -> Entry:
    place = number if index is None else index
    return Entry(task, "1", 0, place, f"{task} {place}=", (10 + number,), 1.0, author, own, own)


def test_the_oldest_answer_leaves_a_full_book() -> None:
    book = Book(3, 4)
    assert all(book.add(entry(number)) for number in range(5))
    assert [one.index for one in book.entries] == [2, 3, 4]


def test_the_same_tokens_for_the_same_example_are_one_answer() -> None:
    book = Book(10, 4)
    assert book.add(entry(1))
    assert not book.add(entry(1))
    assert book.add(entry(1, index=2)), "to another example it is another answer"
    assert len(book) == 2


def test_a_strangers_answer_that_we_find_ourselves_is_ours() -> None:
    book = Book(10, 4)
    book.add(entry(1, author="stranger", own=False))
    assert book.foreign == 1
    assert not book.add(entry(1))
    assert (book.foreign, book.entries[0].own) == (0, True)
    assert not book.add(entry(1, author="stranger", own=False)) and book.foreign == 0


def test_no_example_fills_the_book() -> None:
    book = Book(100, 4)
    for number in range(20):
        book.add(entry(number, index=7))
    assert len(book) == 4


def test_strangers_do_not_keep_our_own_answers_to_an_example_out() -> None:
    book = Book(100, 2)
    for number in range(5):
        book.add(entry(number, index=7, author="stranger", own=False))
    assert book.add(entry(9, index=7))
    assert [one.own for one in book.entries] == [False, True]
    book.add(entry(10, index=7))
    assert not book.add(entry(11, index=7)), "our own do not displace each other"
    assert [one.own for one in book.entries] == [True, True]


def test_strangers_do_not_displace_each_other_from_an_example() -> None:
    book = Book(100, 2)
    came = [book.add(entry(number, index=7, author=f"stranger {number}", own=False)) for number in range(4)]
    assert came == [True, True, False, False]
    assert [one.author for one in book.entries] == ["stranger 0", "stranger 1"]


def test_one_stranger_has_a_quarter_of_the_book_at_most() -> None:
    book = Book(100, 4)
    for number in range(40):
        book.add(entry(number))
    for number in range(300):
        book.add(entry(1000 + number, author="flood", own=False))
    assert book.foreign == 100 * AUTHOR_SHARE
    assert len(book) == 40 + 25, "nobody else left for them"
    assert [one.index for one in book.entries if not one.own] == list(range(1275, 1300)), "its newest"


def test_we_may_fill_our_book_alone() -> None:
    book = Book(100, 4)
    for number in range(300):
        book.add(entry(number))
    assert len(book) == 100


def test_a_draw_prefers_tasks_that_we_fail_on_and_forgets_none() -> None:
    book = Book(2000, 4)
    for number in range(1000):
        book.add(entry(number, task="hard" if number % 2 else "easy"))
    drawn = book.draw(64, {"hard": 0.1, "easy": 0.95}, random.Random(0))
    hard = sum(one.task == "hard" for one in drawn)
    assert len(drawn) == 64 and 48 <= hard < 64
    mastered = [book.draw(64, {"hard": 0.0, "easy": 1.0}, random.Random(seed)) for seed in range(5)]
    assert any(one.task == "easy" for drawn in mastered for one in drawn)


def test_a_task_without_a_pass_rate_counts_as_one_that_we_fail_on() -> None:
    book = Book(10, 4)
    book.add(entry(1, task="unknown"))
    book.add(entry(2, task="mastered"))
    drawn = [book.draw(1, {"mastered": 1.0}, random.Random(seed))[0].task for seed in range(20)]
    assert drawn.count("unknown") > 15


@pytest.mark.parametrize("held", [0, 1, 5, 64, 70, 500])
def test_a_draw_has_no_answer_twice_and_as_many_as_asked_for_where_there_are_so_many(held: int) -> None:
    book = Book(2000, 4)
    for number in range(held):
        book.add(entry(number))
    drawn = book.draw(64, {}, random.Random(0))
    assert len({one.token_ids for one in drawn}) == len(drawn) == min(held, 64)


def test_a_draw_has_no_more_answers_of_others_than_it_may_and_all_of_our_own_there_is_room_for() -> None:
    book = Book(2000, 4)
    for number in range(30):
        book.add(entry(number, own=number < 5, author="us" if number < 5 else "stranger"))
    for foreign, found in ((8, 13), (0, 5), (40, 20), (None, 20)):
        drawn = book.draw(20, {}, random.Random(0), foreign=foreign)
        assert len(drawn) == found and (foreign is None or sum(not one.own for one in drawn) <= foreign)


def test_what_is_not_wanted_any_more_leaves_with_its_counts() -> None:
    book = Book(10, 1)
    book.add(entry(1, author="stranger", own=False))
    book.add(entry(2))
    assert book.keep_only(lambda one: one.own) == 1
    assert (len(book), book.foreign) == (1, 0)
    assert book.add(entry(5, index=1)), "there is room for its example again"


def test_what_has_left_takes_no_bytes_and_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MAX_BOOK_BYTES", 10 * entry(1, author="stranger 1").saved_bytes)
    book = Book(100, 4)
    for turn in range(3):
        for number in range(10):
            assert book.add(entry(number, author=f"stranger {number}", own=False))
        assert len(book) == 10, turn
        assert book.keep_only(lambda one: False) == 10
    assert not book._of_stranger and not book._of_example


def test_one_answer_of_a_stranger_has_room_in_the_smallest_book() -> None:
    book = Book(1, 4)
    assert book.add(entry(1, author="stranger", own=False))
    assert (len(book), book.foreign) == (1, 1)


def test_the_book_knows_which_answers_it_holds() -> None:
    book = Book(10, 4)
    book.add(entry(1, author="stranger", own=False))
    assert entry(1) in book, "no matter whose"
    assert entry(2, index=1) not in book and entry(1, index=2) not in book


@pytest.mark.parametrize("change", [{"seed": 1}, {"version": "2"}, {"task": "product"}])
def test_an_example_of_another_draw_version_or_task_is_another_example(change: dict[str, Any]) -> None:
    book = Book(10, 1)
    assert book.add(entry(1)) and book.add(msgspec.structs.replace(entry(1), **change))


def test_a_saved_answer_cannot_have_been_given_more_than_it_has() -> None:
    until_given = msgspec.to_builtins(entry(1))[:10]
    assert msgspec.convert([*until_given, [[0, 1]]], type=Entry).given == ((0, 1),)
    with pytest.raises(msgspec.ValidationError, match="cannot be the environment's"):
        msgspec.convert([*until_given, [[0, 2]]], type=Entry)


def lines_of_emptying(held: int) -> int:
    """Lines of Python that run while a book of so many answers is emptied."""
    book = Book(held, 4)
    for number in range(held):
        book.add(entry(number, author=f"stranger {number}", own=False))
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        assert book.keep_only(lambda one: False) == held
    finally:
        sys.settrace(before)
    return lines


def test_a_book_ten_times_as_large_is_emptied_in_ten_times_as_many_lines() -> None:
    assert lines_of_emptying(400) <= 11 * lines_of_emptying(40)


def test_an_answer_that_no_saved_book_may_hold_does_not_enter() -> None:
    book = Book(10, 4)
    assert not book.add(msgspec.structs.replace(entry(1), token_ids=(7,) * (MAX_TOKENS + 1)))
    assert book.add(msgspec.structs.replace(entry(1), token_ids=(7,) * MAX_TOKENS))


def test_the_oldest_leave_a_book_that_is_larger_than_a_checkpoint_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved, "MAX_BOOK_BYTES", 1000)
    book = Book(100, 4)
    for number in range(50):
        book.add(entry(number))
    assert 0 < len(book) < 50 and book.entries[-1].index == 49
    assert len(msgspec.msgpack.encode(book.entries)) <= 1000


def test_an_answer_that_becomes_ours_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MAX_BOOK_BYTES", 1000)
    book = Book(100, 4)
    for number in range(6):
        book.add(entry(number, author="stranger", own=False))
        book.add(entry(number))
    assert len(book) == 6


@pytest.mark.parametrize("token", [0, 70_000, 2**32 - 1])
@pytest.mark.parametrize("text", ["", "a question", "\U0001f600" * 300])
def test_no_answer_takes_more_bytes_than_the_book_counts_for_it(token: int, text: str) -> None:
    stretches = tuple((place, place + 1) for place in range(0, 60, 2))
    long = Entry("t" * 64, "v", 2**63 - 1, 10**9, text, (token,) * 70, 0.1, "a" * 64, True, True, stretches)
    assert len(msgspec.msgpack.encode(long)) <= long.saved_bytes


def test_token_ids_alone_take_no_more_bytes_than_the_book_counts_for_them() -> None:
    long = msgspec.structs.replace(entry(1), token_ids=(2**32 - 1,) * 1000)
    assert len(msgspec.msgpack.encode(long)) <= long.saved_bytes


def test_an_answer_that_becomes_ours_is_as_large_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MAX_BOOK_BYTES", 20 * entry(10).saved_bytes)
    book = Book(100, 4)
    for number in range(10, 20):
        book.add(entry(number, author="stranger of a very long name", own=False))
        book.add(entry(number))
    for number in range(20, 30):
        book.add(entry(number))
    assert len(book) == 20


arrivals = st.lists(
    st.builds(
        lambda number, index, author: entry(number, index=index, author=author, own=author == "me"),
        st.integers(0, 6),
        st.integers(0, 6),
        st.sampled_from(["me", "a", "b", "c"]),
    ),
    max_size=120,
)


@given(arrivals, st.integers(1, 12), st.integers(1, 3))
def test_whatever_arrives_no_bound_is_exceeded_and_the_counts_are_true(
    entries: list[Entry], size: int, per_example: int
) -> None:
    book = Book(size, per_example)
    for number, one in enumerate(entries):
        before = len(book)
        assert not book.add(one) or len(book) <= before + 1
        if number % 7 == 6:
            book.keep_only(lambda kept: kept.index != number % 5)  # noqa: B023 - called at once
    kept = book.entries
    assert len(book) == len(kept) <= size
    assert book.foreign == sum(not one.own for one in kept)
    assert max(Counter(one.example for one in kept).values(), default=0) <= per_example
    strangers = Counter(one.author for one in kept if not one.own)
    assert max(strangers.values(), default=0) <= max(1, size * AUTHOR_SHARE)
    assert len({(one.example, one.token_ids) for one in kept}) == len(kept)
