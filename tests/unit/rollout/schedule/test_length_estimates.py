"""How long answers will be, from those that came."""

import pytest

from swarmnode.rollout.schedule.length_estimates import MAX_PROMPTS, MAX_TASKS, LengthEstimates
from swarmnode.types import Example, ExampleKey


def example(prompt: str, task: str = "sums") -> Example:
    return Example(ExampleKey(task, "1", 0, 0), prompt)


def test_a_prompt_is_as_long_as_it_was_and_a_new_one_as_its_task() -> None:
    lengths = LengthEstimates()
    for _ in range(60):
        lengths.observe(example("easy"), 10)
        lengths.observe(example("hard"), 90)
    assert lengths.expected_tokens(example("easy")) == 10
    assert lengths.expected_tokens(example("new")) == pytest.approx(50, abs=5)
    assert lengths.expected_tokens(example("new", "poems")) is None


def test_an_estimate_follows_the_policy() -> None:
    lengths = LengthEstimates()
    lengths.observe(example("a"), 100)
    for _ in range(6):
        lengths.observe(example("a"), 10)
    assert lengths.expected_tokens(example("a")) == pytest.approx(10, abs=2)


def test_long_ones_start_first_the_unknown_before_all_and_equals_as_they_came() -> None:
    lengths = LengthEstimates()
    lengths.observe(example("short"), 5)
    lengths.observe(example("long"), 500)
    asked = [example("short"), example("one"), example("long"), example("two"), example("?", "poems")]
    assert [e.prompt for e in lengths.longest_first(asked)] == ["?", "long", "one", "two", "short"]


def test_memory_is_bounded_and_the_longest_unseen_is_forgotten() -> None:
    lengths = LengthEstimates()
    for i in range(MAX_PROMPTS + 10):
        lengths.observe(example("kept"), 7)
        lengths.observe(example(f"prompt {i}", f"task {i}"), 50)
    assert (len(lengths.prompts), len(lengths.tasks)) == (MAX_PROMPTS, MAX_TASKS)
    assert lengths.expected_tokens(example("kept")) == 7
    assert lengths.expected_tokens(example("prompt 0", "task 0")) is None


def test_estimates_go_on_from_what_was_kept() -> None:
    lengths = LengthEstimates()
    lengths.observe(example("a"), 100)
    again = LengthEstimates(lengths.prompts, lengths.tasks)
    for estimates in (lengths, again):
        estimates.observe(example("a"), 10)
    assert again.expected_tokens(example("a")) == lengths.expected_tokens(example("a")) == 55
