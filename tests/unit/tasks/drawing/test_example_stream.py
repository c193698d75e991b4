"""Which examples a round trains on."""

from collections import Counter
from itertools import count

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.drawing.example_stream import MAX_SEEDS_PER_ROUND, ExampleStream, draw_round, round_seed
from swarmnode.tasks.task import is_held_out, redraw
from swarmnode.types import Example, ExampleKey

BY_NAME = {task.name: task for task in BUILTIN_TASKS}


class FiniteTask:
    """A task with a few examples per seed."""

    name, version = "finite", "1"

    def __init__(self, prompts):
        self._prompts = prompts

    def examples(self, seed):
        return (Example(ExampleKey("finite", "1", seed, i), p, {}) for i, p in enumerate(self._prompts))

    def score(self, example, completions):
        return [{"correct": 0.0}] * len(completions)


def prompts_with(*, held_out, count):
    return [p for p in map(str, range(1000)) if is_held_out(p) == held_out][:count]


def test_a_round_can_be_drawn_again_and_another_round_or_node_is_another_draw():
    first = draw_round(BUILTIN_TASKS, 0, 1, 32)
    assert first == draw_round(BUILTIN_TASKS, 0, 1, 32)
    for other in (draw_round(BUILTIN_TASKS, 0, 2, 32), draw_round(BUILTIN_TASKS, 1, 1, 32)):
        assert not {e.key for e in first} & {e.key for e in other}


def test_every_task_has_its_share_of_a_round():
    shares = Counter(e.key.task for e in draw_round(BUILTIN_TASKS, 0, 5, 32))
    assert shares == dict.fromkeys(BY_NAME, 4)


def test_rounds_smaller_than_the_number_of_tasks_still_reach_all_of_them():
    shares = Counter(e.key.task for r in range(8) for e in draw_round(BUILTIN_TASKS, 0, r, 3))
    assert shares == dict.fromkeys(BY_NAME, 3)


def test_a_stranger_draws_any_example_of_a_round_again_within_a_few_draws():
    for example in draw_round(BUILTIN_TASKS, 7, 1000, 64):
        assert example.key.index < 64
        assert redraw(BY_NAME[example.key.task], example.key) == example


def test_no_example_of_a_round_is_held_out():
    assert not any(is_held_out(e.prompt) for e in draw_round(BUILTIN_TASKS, 0, 0, 200))


def test_a_finite_task_goes_on_with_further_seeds():
    task = FiniteTask(prompts_with(held_out=False, count=3))
    drawn = draw_round([task], 0, 0, 8)
    assert len({e.key for e in drawn}) == 8
    assert [redraw(task, e.key) for e in drawn] == drawn


def test_tasks_take_turns_but_are_drawn_one_after_the_other():
    log = []

    class Logged(FiniteTask):
        def examples(self, seed):
            for example in super().examples(seed):
                log.append(self.name)
                yield example

    class Other(Logged):
        name = "other"

    prompts = prompts_with(held_out=False, count=3)
    drawn = draw_round([Logged(prompts), Other(prompts)], 0, 0, 6)
    assert [example.prompt for example in drawn] == [prompt for prompt in prompts for _ in range(2)]
    assert log == ["finite"] * 3 + ["other"] * 3


def test_a_task_without_training_examples_is_an_error_and_not_an_endless_search():
    with pytest.raises(TaskError, match="too few training examples"):
        draw_round([FiniteTask(prompts_with(held_out=True, count=3))], 0, 0, 1)
    with pytest.raises(TaskError, match="too few training examples"):
        draw_round([FiniteTask(prompts_with(held_out=False, count=1))], 0, 0, MAX_SEEDS_PER_ROUND + 1)


class Endless(FiniteTask):
    """Asks one question of each seed for ever."""

    def examples(self, seed):
        prompt = self._prompts[seed % len(self._prompts)]
        return (Example(ExampleKey(self.name, self.version, seed, index), prompt, {}) for index in count())


def test_one_prompt_for_all_that_is_held_out_is_an_error_that_says_why():
    with pytest.raises(TaskError, match="too few training examples") as caught:
        draw_round([Endless(prompts_with(held_out=True, count=1))], 0, 0, 1)
    assert "alike" in caught.value.hint and "reset()" in caught.value.hint


def test_a_seed_whose_only_prompt_is_held_out_is_passed_over():
    prompts = [*prompts_with(held_out=True, count=4), *prompts_with(held_out=False, count=1)]
    drawn = draw_round([Endless(prompts)], 0, 0, 3)
    assert [example.prompt for example in drawn] == [prompts[-1]] * 3


def test_seeds_of_rounds_do_not_repeat_over_nodes_rounds_and_attempts():
    seeds = {round_seed(n, r, a) for n in range(20) for r in range(20) for a in range(3)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_gives_round_after_round_and_goes_on_where_it_was_left() -> None:
    rounds = [draw_round([BY_NAME["max"]], 3, number, 4) for number in (1, 2, 3)]
    expected = [example for one in rounds for example in one]
    stream = ExampleStream([BY_NAME["max"]], 3, 4)
    first = [next(stream) for _ in range(6)]
    later = ExampleStream([BY_NAME["max"]], 3, 4, stream.place)
    assert first + [next(later) for _ in range(6)] == expected


def test_a_stream_whose_rounds_have_another_size_now_gives_nothing_twice() -> None:
    stream = ExampleStream([BY_NAME["max"]], 3, 4)
    before = [next(stream).key for _ in range(6)]
    later = ExampleStream([BY_NAME["max"]], 3, 8, stream.place)
    after = [next(later).key for _ in range(16)]
    assert len({*before, *after}) == 22
