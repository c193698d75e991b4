"""The eight built-in tasks: right answers, the same draw everywhere, train and evaluation apart."""

import math
import re
from itertools import islice

import pytest

from swarmnode.tasks.builtin import BUILTIN_TASKS, StableRandom
from swarmnode.tasks.drawing.draw_digest import draw_digest
from swarmnode.tasks.processes.isolated_task import isolate
from swarmnode.tasks.task import MAX_INDEX, draw_held_out, draw_train, is_held_out, redraw, score_strictly

each_task = pytest.mark.parametrize("task", BUILTIN_TASKS, ids=lambda task: task.name)

GOLDEN = {
    "rev": ("rev ipdg=", "gdpi"),
    "sort": ("sort 59042=", "02459"),
    "next": ("next inq=", "jor"),
    "bitop": ("bitop 10011^11000=", "01011"),
    "pop": ("pop 0111=", "3"),
    "max": ("max 3655=", "6"),
    "bin": ("bin 025=", "000010101"),
    "gcd": ("gcd 28,7=", "7"),
}
"""The first example of seed 0. A change here means a new VERSION: nodes of both kinds would disagree."""

ORACLES = {
    "rev": lambda q: "".join(reversed(q)),
    "sort": lambda q: "".join(sorted(q)),
    "next": lambda q: q.translate({code: code + 1 for code in range(ord("a"), ord("z"))}),
    "bitop": lambda q: format(eval(re.sub(r"([01]+)", r"0b\1", q)), f"0{len(q) // 2}b"),
    "pop": lambda q: str(sum(map(int, q))),
    "max": lambda q: sorted(q)[-1],
    "bin": lambda q: format(int(q, 8), f"0{3 * len(q)}b"),
    "gcd": lambda q: str(math.gcd(*map(int, q.split(",")))),
}
"""The answers, found in another way than the tasks find them."""


@each_task
def test_the_first_example_is_the_same_on_every_platform_and_for_ever(task):
    example = next(task.examples(0))
    assert (example.prompt, example.columns["answer"]) == GOLDEN[task.name]


@each_task
def test_every_answer_is_right_and_short(task):
    for example in islice(task.examples(1), 500):
        name, _, query = example.prompt.removesuffix("=").partition(" ")
        assert name == task.name
        assert example.columns["answer"] == ORACLES[name](query)
        assert 1 <= len(example.columns["answer"]) <= 9


@each_task
def test_only_the_exact_answer_scores(task):
    example = next(task.examples(0))
    answer = example.columns["answer"]
    completions = [answer, f" {answer}\n", answer + answer, answer[:-1], ""]
    rewards = [scores["correct"] for scores in score_strictly(task, example, completions)]
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


@each_task
def test_train_and_evaluation_share_no_prompt_whatever_the_seeds(task):
    train = {e.prompt for seed in range(3) for e in draw_train(task, seed)}
    held_out = {e.prompt for seed in range(3) for e in draw_held_out(task, seed)}
    assert train
    assert held_out
    assert not train & held_out


@each_task
def test_about_one_prompt_in_five_is_held_out(task):
    prompts = {e.prompt for e in islice(task.examples(0), MAX_INDEX)}
    share = sum(map(is_held_out, prompts)) / len(prompts)
    # Four standard deviations of a fair draw: the smallest task has a few hundred prompts.
    assert abs(share - 0.2) < 4 * math.sqrt(0.2 * 0.8 / len(prompts))


@each_task
def test_any_training_example_is_found_again_from_its_key(task):
    for example in islice(draw_train(task, 2**63 - 1), 20):
        assert redraw(task, example.key) == example


@each_task
def test_another_process_draws_the_same_examples(task):
    with isolate(task.name, 60.0, builtin=True, random_hashes=True) as there:
        assert there.digest() == draw_digest(task)


def test_stable_random_reaches_every_value_about_equally_often():
    random = StableRandom("test")
    counts = [0] * 7
    for _ in range(7000):
        counts[random.between(0, 6)] += 1
    assert all(850 < count < 1150 for count in counts)
