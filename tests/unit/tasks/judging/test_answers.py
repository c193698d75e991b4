"""Which answers count as right: those that say the same, however they are written."""

import pytest

from swarmnode.tasks.judging.answers import hashed, last_boxed, number_of, same_math, same_number, tagged


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (r"\frac12", "1/2"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (".5", "0.5"),
        ("1,000", "1000"),
        (r"\$18.90", "18.90"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\text{Monday}", "Monday"),
        (r"12\text{ inches}", "12"),
        ("x = 7", "7"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("24.", "24"),
        ("-3/4", r"-\frac{3}{4}"),
    ],
)
def test_the_same_answer_may_be_written_in_several_ways(found: str, right: str) -> None:
    assert same_math(found, right)
    assert same_math(right, found)


@pytest.mark.parametrize(
    ("found", "right"),
    [("1,2", "12"), ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"), ("2", "-2"), ("", "0"), ("2x+2", "2(x+1)")],
)
def test_what_says_something_else_is_wrong(found: str, right: str) -> None:
    assert not same_math(found, right)


def test_the_last_number_behind_four_hashes_counts() -> None:
    assert hashed("#### 1\nNo:\n#### $1,234.50 dollars") == "1,234.50"
    assert hashed("the answer is 42") is None
    assert hashed("#### none") is None


def test_a_box_that_is_not_closed_is_none() -> None:
    assert last_boxed(r"\boxed{1") is None
    assert last_boxed(r"\boxed{1} and \boxed{\sqrt{2}}") == r"\sqrt{2}"


def test_a_number_as_long_as_a_book_is_no_number() -> None:
    assert number_of("1" * 100_000) is None
    assert not same_number("9" * 100_000, "9" * 100_000)
    assert number_of(r"\frac{1}{0}") is None


def test_the_answer_is_what_stands_in_the_last_tags() -> None:
    assert tagged("<answer>3</answer> no: <answer>\n4\n</answer> so") == "4"
    assert tagged("4</answer>") == "4</answer>"
    assert tagged(" it is <answer>4") == "it is <answer>4"
