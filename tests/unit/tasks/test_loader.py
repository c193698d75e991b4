"""From what a user types to a task, or to one clear sentence about what is wrong."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.digests import judged_version
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.judging.rewards import load_reward
from swarmnode.tasks.loader import load_task, load_tasks
from swarmnode.tasks.task import redraw, score_strictly

TEN_LINES = """
import random

def examples(seed):
    rng = random.Random(seed)
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        yield f"{a} + {b} =", str(a + b)

def reward(completions, answer, **columns):
    return [1.0 if c.strip() == a else 0.0 for c, a in zip(completions, answer)]
"""


@pytest.fixture
def write(tmp_path):
    def write_task(source, name="sums.py"):
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write_task


def first(task, seed=0):
    return next(iter(task.examples(seed)))


def test_a_person_writes_a_task_in_ten_lines(write):
    task = load_task(write(TEN_LINES))
    example = first(task)
    assert task.name == "sums"
    assert task.score(example, [example.columns["answer"], "no"]) == [{"reward": 1.0}, {"reward": 0.0}]
    assert [e.key.task for e in draw_round([task], 0, 0, 3)] == ["sums"] * 3


def test_without_a_reward_of_its_own_the_exact_answer_counts(write):
    task = load_task(write('def examples(seed):\n    yield "2 + 2 =", "4"\n'))
    assert task.score(first(task), ["4", "5"]) == [{"correct": 1.0}, {"correct": 0.0}]


def test_examples_may_be_pairs_dictionaries_and_bare_prompts(write):
    source = """
def examples(seed):
    return ["a poem", ("2 + 2 =", "4"), {"prompt": "3 + 3 =", "answer": "6", "level": 1}]

def reward(completions):
    return [0.0] * len(completions)
"""
    drawn = list(load_task(write(source)).examples(0))
    assert [(e.prompt, e.columns) for e in drawn] == [
        ("a poem", {}),
        ("2 + 2 =", {"answer": "4"}),
        ("3 + 3 =", {"answer": "6", "level": 1}),
    ]
    assert [e.key.index for e in drawn] == [0, 1, 2]


def test_several_rewards_keep_their_names(write):
    source = """
from swarmnode.tasks.judging.rewards import load_reward

def examples(seed):
    yield "?", "4"

def reward(completions, **columns):
    return [float(len(c)) for c in completions]

reward_format = load_reward("think_format")
"""
    task = load_task(write(source))
    assert task.score(first(task), ["four"]) == [{"reward": 4.0, "format": 0.0}]


def test_the_version_is_that_of_the_text_and_not_of_its_place_or_line_endings(write, tmp_path):
    version = load_task(write(TEN_LINES)).version
    (tmp_path / "windows").mkdir()
    copy = tmp_path / "windows" / "sums.py"
    copy.write_bytes(TEN_LINES.replace("\n", "\r\n").encode())
    assert load_task(str(copy)).version == version
    assert load_task(write(TEN_LINES + "# changed\n")).version != version


IMPORTS = """
{how}

def examples(seed):
    yield "What is 2 + 2?", "4"

def reward(completions, answer, **columns):
    return [{called}(c, a) for c, a in zip(completions, answer)]
"""


@pytest.mark.parametrize(
    ("how", "called"),
    [("from grading_beside import grade", "grade"), ("import grading_beside", "grading_beside.grade")],
)
def test_what_lies_beside_and_is_imported_is_part_of_the_version(write, tmp_path, monkeypatch, how, called):
    monkeypatch.setattr(sys, "path", [*sys.path])

    def versions(grading: str) -> tuple[str, str]:
        for old in (tmp_path / "__pycache__").glob("*"):
            old.unlink()
        monkeypatch.delitem(sys.modules, "grading_beside", raising=False)
        write(grading, "grading_beside.py")
        path = write(IMPORTS.format(how=how, called=called))
        reward = load_reward(f"{path}:reward")
        return load_task(path).version, judged_version("rows", {"reward": reward})

    equal = "import json\n\ndef grade(text, answer):\n    return float(text == answer)\n"
    found = versions(equal)
    assert versions(equal) == found
    begins = versions(equal.replace("text == answer", "text.startswith(answer)"))
    assert begins[0] != found[0] and begins[1] != found[1]


def test_a_version_function_tells_apart_files_that_read_other_data(write):
    version = (
        "from pathlib import Path\n\ndef version():\n    return Path(__file__).with_name('d').read_text()\n"
    )
    source = TEN_LINES + version
    versions = set()
    for data in ("first", "second"):
        write(data, "d")
        versions.add(load_task(write(source)).version)
    assert len(versions) == 2


def test_dataclasses_work_in_a_task_file(write):
    source = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Question:
    text: str

def examples(seed):
    yield Question("?").text, "4"
"""
    assert first(load_task(write(source))).prompt == "?"


def test_builtin_stands_for_all_eight():
    assert len(load_tasks(["builtin"])) == 8
    assert [t.name for t in load_tasks(["gcd", "rev"])] == ["gcd", "rev"]


@pytest.mark.parametrize("specs", [["rev", "rev"], ["builtin", "rev"]])
def test_a_task_is_named_once(specs):
    with pytest.raises(TaskError, match="two tasks are named rev"):
        load_tasks(specs)


def test_no_task_at_all_is_an_error():
    with pytest.raises(TaskError, match="no task"):
        load_tasks([])


def test_a_mistyped_name_is_answered_with_the_closest():
    with pytest.raises(TaskError) as caught:
        load_task("bitopp")
    assert caught.value.hint == "did you mean bitop?"


@pytest.mark.parametrize(
    ("source", "complaint", "line"),
    [
        ("def examples(seed)\n    yield 1\n", "syntax error", 1),
        ("x = 1\nimport not_installed_at_all\n", "not_installed_at_all", 2),
        ("x = 1\n\nraise SystemExit('bye')\n", "cannot be loaded", 3),
        ("def examples(seed):\n    yield '?'\n\ndef version():\n    return 1 / 0\n", "version", 5),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_its_line(write, source, complaint, line):
    path = write(source)
    with pytest.raises(TaskError, match=complaint) as caught:
        load_task(path)
    assert path in str(caught.value)
    assert caught.value.hint == f"see {path} line {line}"


@pytest.mark.parametrize("source", ["", "examples = 3\n", "def examples():\n    yield '?'\n"])
def test_a_file_without_examples_is_told_what_to_write(write, source):
    with pytest.raises(TaskError, match=r"no function examples\(seed\)") as caught:
        load_task(write(source))
    assert "def examples(seed)" in caught.value.hint


def test_a_missing_file_and_one_that_is_no_text_are_task_errors(tmp_path):
    with pytest.raises(TaskError, match="cannot read"):
        load_task(str(tmp_path / "nowhere.py"))
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="UTF-8"):
        load_task(str(tmp_path / "binary.py"))


SEEDS_THE_GLOBAL_RANDOM = """
import random
import time

def examples(seed):
    random.seed(seed)
    for _ in range(100):
        time.sleep(0.0001)    # lets other threads run
        yield f"{random.randrange(10_000)} + 1 ="

def reward(completions):
    random.seed(0)
    return [random.random() for _ in completions]
"""


@pytest.fixture
def two_careless_tasks(write):
    """Two tasks that share `random` with each other."""
    return [load_task(write(SEEDS_THE_GLOBAL_RANDOM, name)) for name in ("one.py", "two.py")]


def prompts(task, seed, count=100):
    return [example.prompt for example in islice(task.examples(seed), count)]


def test_draws_from_one_global_random_may_be_read_in_turns(two_careless_tasks):
    one, two = two_careless_tasks
    alone = prompts(one, 0), prompts(two, 1)
    turns = list(zip(one.examples(0), two.examples(1), strict=True))
    assert ([a.prompt for a, _ in turns], [b.prompt for _, b in turns]) == alone


def test_threads_that_draw_and_score_do_not_disturb_each_other(two_careless_tasks):
    jobs = [(task, seed) for seed in range(8) for task in two_careless_tasks]
    alone = [prompts(task, seed) for task, seed in jobs]
    example, (reward,) = first(jobs[0][0]), jobs[0][0].score(first(jobs[0][0]), ["4"])
    with ThreadPoolExecutor(max_workers=4) as threads:
        drawn = threads.map(lambda job: prompts(*job), jobs)
        scored = threads.map(lambda job: job[0].score(example, ["4"]), jobs)
        assert list(drawn) == alone
        assert list(scored) == [[reward]] * len(jobs)


def test_every_example_of_a_round_with_careless_tasks_can_be_drawn_again(two_careless_tasks):
    by_name = {task.name: task for task in two_careless_tasks}
    for example in draw_round(two_careless_tasks, 0, 0, 40):
        assert redraw(by_name[example.key.task], example.key) == example


def test_a_long_draw_is_one_sequence_without_gap_or_repetition(write):
    task = load_task(write("def examples(seed):\n    return map(str, range(1000))\n"))
    assert prompts(task, 0, 2000) == [str(number) for number in range(1000)]
    assert [example.key.index for example in task.examples(0)] == list(range(1000))


def test_a_task_may_draw_from_another_file(write):
    other = write("def examples(seed):\n    yield '2 + 2 ='\n", "other.py")
    source = f"""
from swarmnode.tasks.loader import load_task

def examples(seed):
    for example in load_task({other!r}).examples(seed):
        yield example.prompt + " ?"
"""
    assert prompts(load_task(write(source)), 0) == ["2 + 2 = ?"]


def test_a_task_may_import_what_lies_beside_it(write, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    write("ANSWER = '4'\n", "beside_the_sums.py")
    source = "from beside_the_sums import ANSWER\n\ndef examples(seed):\n    yield '2 + 2 =', ANSWER\n"
    assert first(load_task(write(source))).columns["answer"] == "4"


@pytest.mark.parametrize("value", ["2e6", "-1e300", "True * 1e7"])
def test_a_reward_that_nobody_could_announce_is_an_error(write, value):
    source = (
        f"def examples(seed):\n    yield '?'\n\ndef reward(completions, **columns):\n    return [{value}]\n"
    )
    task = load_task(write(source))
    with pytest.raises(TaskError, match=r"not a number up to 1e\+06"):
        score_strictly(task, first(task), ["x"])


def test_a_file_name_must_do_as_a_task_name(write):
    with pytest.raises(TaskError, match="invalid task name"):
        load_task(write(TEN_LINES, "my sums.py"))


def test_examples_that_fail_midway_say_where(write):
    path = write("def examples(seed):\n    yield '?', '4'\n    yield '?', str(1 / seed)\n")
    examples = load_task(path).examples(0)
    next(iter(examples))
    with pytest.raises(TaskError, match="ZeroDivisionError") as caught:
        list(load_task(path).examples(0))
    assert caught.value.hint == f"see {path} line 3"


@pytest.mark.parametrize(
    "row", ["3", "('?', [4])", "{'question': '?'}", "{'prompt': 3}", "''", "('', '4')", "None"]
)
def test_examples_of_another_shape_are_refused(write, row):
    with pytest.raises(TaskError):
        first(load_task(write(f"def examples(seed):\n    yield {row}\n")))


def test_a_score_function_is_not_silently_ignored(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def examples(seed):\n    yield 'a', 'b'\n\ndef score(example, completions):\n    return [1.0]\n"
    )
    with pytest.raises(TaskError, match="does not use"):
        load_task(str(path))


AS_MESSAGES = """
def examples(seed):
    yield {"prompt": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}

def reward(completions, **columns):
    return [float(completion[0]["content"] == "4") for completion in completions]
"""


def test_a_prompt_may_be_a_message_of_the_user_and_then_rewards_get_messages(write):
    task = load_task(write(AS_MESSAGES))
    example = first(task)
    assert (example.prompt, example.conversational) == ("2 + 2 =", True)
    assert task.score(example, ["4", "5"]) == [{"reward": 1.0}, {"reward": 0.0}]


CONVERSATION = """
def examples(seed):
    yield {
        "prompt": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": "2 + 2 ="},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "And 3 + 3?", "name": None},
        ],
        "answer": "6",
    }

def reward(prompts, completions, **columns):
    assert [message["role"] for message in prompts[0]] == ["system", "user", "assistant", "user"]
    return [float(completion == [{"role": "assistant", "content": "6"}]) for completion in completions]
"""


def test_a_prompt_may_be_a_conversation_and_rewards_get_all_of_it(write):
    task = load_task(write(CONVERSATION))
    example = first(task)
    assert example.messages[0] == {"role": "system", "content": "Answer with a number."}
    assert example.messages[-1] == {"role": "user", "content": "And 3 + 3?"}
    assert task.score(example, ["6", "5"]) == [{"reward": 1.0}, {"reward": 0.0}]


def test_a_message_may_be_a_list_of_texts_as_in_data_sets_with_pictures(write):
    parts = "[{'type': 'text', 'text': '2 + ', 'image': None}, {'type': 'text', 'text': '3?'}]"
    prompt = f"[{{'role': 'user', 'content': {parts}}}]"
    example = first(load_task(write(f"def examples(seed):\n    yield {{'prompt': {prompt}}}\n")))
    assert example.messages == [{"role": "user", "content": "2 + 3?"}]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("[{'role': 'user', 'content': '?'}, {'role': 'assistant', 'content': '!'}]", "does not end with"),
        ("[{'role': 'system', 'content': 'be brief'}]", "does not end with"),
        ("[{'role': 'user', 'content': ''}]", "does not end with"),
        ("[{'role': 'user', 'content': [{'type': 'image'}]}]", "part that is not text: {'type': 'image'}"),
        ("[{'role': 'tool', 'content': '7'}]", "a prompt has an invalid message"),
        ("[{'role': 'user', 'content': '?', 'tool_calls': [1]}]", "a prompt has an invalid message"),
        ("['?']", "a prompt has an invalid message"),
        ("[]", "invalid prompt"),
    ],
)
def test_what_is_no_prompt_is_refused_with_what_to_do(write, messages, complaint):
    with pytest.raises(TaskError, match=complaint) as caught:
        first(load_task(write(f"def examples(seed):\n    yield {{'prompt': {messages}}}\n")))
    assert caught.value.hint


def test_a_kind_of_task_that_nobody_brings_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(TaskError, match="there is no task 'number-gym:chain_sum'") as caught:
        load_task("number-gym:chain_sum")
    assert "task kinds are hf" in caught.value.hint


def test_who_names_a_file_of_another_kind_reads_which_kinds_there_are() -> None:
    with pytest.raises(TaskError, match=r"there is no task 'questions\.json'") as caught:
        load_task("questions.json")
    assert "a data set (.jsonl, .csv, .parquet)" in caught.value.hint
