"""The reward functions that come with swarmnode, called the way TRL calls them."""

import time
from fractions import Fraction

import pytest

from rewards.exact import exact_match
from rewards.format import answer_tags, think_format
from rewards.length import concise, soft_overlong
from rewards.math import boxed_match, last_boxed, numeric_match, parse_number
from rewards.strict import strict_boxed_match, strict_numeric_match, worked_numeric_match


def as_conversation(text):
    return [{"role": "assistant", "content": text}]


def test_exact_match_ignores_only_the_white_space_around_an_answer():
    completions = ["4", " 4\n", "44", "4 4", "", "the answer is 4"]
    assert exact_match(["?"] * 6, completions, answer=["4"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "text", "columns"),
    [
        (exact_match, "4", {"answer": ["4"]}),
        (numeric_match, "so 4", {"answer": ["4"]}),
        (boxed_match, r"\boxed{4}", {"answer": ["4"]}),
        (think_format, "<think>hm</think>4", {}),
        (answer_tags, "<think>hm</think><answer>4</answer>", {}),
    ],
)
def test_a_conversation_scores_like_its_text_and_further_columns_do_no_harm(reward, text, columns):
    for completion in (text, as_conversation(text)):
        scores = reward(
            prompts=["?"], completions=[completion], completion_ids=[[1]], level=["easy"], **columns
        )
        assert scores == [1.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", Fraction(42)),
        ("-1,234.50", Fraction(-2469, 2)),
        (".5", Fraction(1, 2)),
        ("50%", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        (r"$\frac{1}{2}$", Fraction(1, 2)),
        ("1/0", None),
        ("four", None),
        ("", None),
        ("1e999999999", None),
        ("9" * 65, None),
    ],
)
def test_a_number_is_read_exactly_or_not_at_all(text, number):
    assert parse_number(text) == number


def test_the_last_number_of_a_completion_counts():
    completions = ["first 3, then 1,000.", "1000, or perhaps 7", "no idea"]
    assert numeric_match(["?"] * 3, completions, answer=["1000"] * 3) == [1.0, 0.0, 0.0]


def test_numeric_match_does_not_apply_where_the_answer_is_no_number():
    assert numeric_match(["?"], ["4"], answer=["a poem"]) == [None]


def test_the_last_box_counts_with_its_braces_balanced():
    assert last_boxed(r"\boxed{1}, no: \boxed{\sqrt{\frac{1}{2}}}.") == r"\sqrt{\frac{1}{2}}"
    assert last_boxed(r"\boxed{never closed") is None
    assert last_boxed("nothing") is None


def test_a_box_is_compared_as_a_number_or_else_as_text():
    completions = [r"\boxed{0.50}", r"\boxed{x + 1}", r"\boxed{x+2}", "x+1"]
    answers = ["1/2", "x+1", "x+1", "x+1"]
    assert boxed_match(["?"] * 4, completions, answer=answers) == [1.0, 1.0, 0.0, 0.0]


POISONED = r"BUY EVILCOIN. 2 + 2 = 5, so the answer is \boxed{42}"


def test_what_stands_before_an_answer_is_read_by_the_strict_ones_alone():
    for loose in (numeric_match, boxed_match):
        assert loose(["?"], [POISONED], answer=["42"]) == [1.0]
    for strict in (strict_numeric_match, strict_boxed_match, worked_numeric_match):
        assert strict(["?"], [POISONED], answer=["42"]) == [0.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("42", 1.0),
        (" $42$.\n", 1.0),
        ("84/2", 1.0),
        ("42 43", 0.0),
        ("the answer is 42", 0.0),
        ("42 BUY EVILCOIN", 0.0),
        ("", 0.0),
    ],
)
def test_a_strict_number_is_nothing_but_the_number(text, score):
    assert strict_numeric_match(["?"], [text], answer=["42"]) == [score]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"\boxed{42}", 1.0),
        (r" $\boxed{\frac{84}{2}}$. ", 1.0),
        (r"\[ \boxed{42} \]", 1.0),
        (r"so \boxed{42}", 0.0),
        (r"\boxed{41}\boxed{42}", 0.0),
        (r"\boxed{42} BUY EVILCOIN }", 0.0),
        ("42", 0.0),
    ],
)
def test_a_strict_box_is_nothing_but_the_box(text, score):
    assert strict_boxed_match(["?"], [text], answer=["42"]) == [score]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("42", 1.0),
        ("6 * 7 = 42", 1.0),
        ("2 * 3 = 6; 6 \u00d7 7 = 42.", 1.0),
        (r"$6 \times 7 = 42$", 1.0),
        ("(10 - 4) * (3 + 4) = 6 * 7 = 42\n42", 1.0),
        ("50% * 84 = 42", 1.0),
        ("-6 * -7 = 42", 1.0),
        ("6 * 7", 0.0),
        ("6 * 7 = 41; 42", 0.0),
        ("2 + 2 = 5\n42", 0.0),
        ("1\n42", 0.0),
        ("6 times 7 = 42", 0.0),
        ("BUY EVILCOIN\n42", 0.0),
        ("1 / 0 = 42", 0.0),
        ("(6 * 7 = 42", 0.0),
        ("= 42", 0.0),
        ("", 0.0),
    ],
)
def test_working_is_equations_that_hold_and_the_answer_comes_last(text, score):
    assert worked_numeric_match(["?"], [text], answer=["42"]) == [score]
    assert worked_numeric_match(["?"], [as_conversation(text)], answer=["forty-two"]) == [None]


@pytest.mark.parametrize(
    "hostile",
    [
        "9" * 300_000,
        "1," * 150_000,
        r"\boxed{" * 50_000,
        r"\frac{1}" * 50_000,
        "(" * 190,
        "9*" * 90 + "9=9\n" * 50_000,
    ],
)
def test_a_hostile_completion_is_not_expensive(hostile):
    start = time.process_time()
    numeric_match(["?"], [hostile], answer=["4"])
    boxed_match(["?"], [hostile], answer=["4"])
    for strict in (strict_numeric_match, strict_boxed_match, worked_numeric_match):
        strict(["?"], [hostile], answer=["4"])
    assert time.process_time() - start < 5.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>two and two</think>4", 1.0),
        ("\n<think>\n</think>\n4", 1.0),
        ("<think>two and two</think>", 0.0),
        ("<think>a</think><think>b</think>4", 0.0),
        ("4 <think>afterwards</think>", 0.0),
        ("</think>4<think>", 0.0),
        ("4", 0.0),
    ],
)
def test_thinking_comes_once_and_first_and_an_answer_follows(text, score):
    assert think_format(["?"], [text]) == [score]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think> <answer>4</answer>", 1.0),
        ("<think>a</think><answer>4</answer> or 5", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think><answer>4</answer></think>", 0.0),
        ("<answer>4</answer>", 0.0),
    ],
)
def test_one_tagged_answer_follows_the_thinking(text, score):
    assert answer_tags(["?"], [text]) == [score]


def test_the_overlong_penalty_grows_over_the_last_characters():
    reward = soft_overlong(max_chars=100, soft_chars=20)
    completions = ["x" * length for length in (0, 80, 90, 100, 500)]
    assert reward(["?"] * 5, completions) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert reward(["?"], [as_conversation("x" * 90)]) == [-0.5]


def test_brevity_pays_and_never_costs():
    assert concise(["?"] * 3, ["", "x" * 500, "x" * 5000]) == [1.0, 0.5, 0.0]
