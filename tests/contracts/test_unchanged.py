"""What people already have runs unchanged: rewards, data sets and tasks of other libraries, each with the
lines that a user has to write for it, three at most.

A line is one of a shell, of a settings file or of Python. A package that is not installed is skipped.
"""

import importlib.util
import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from swarmnode.chat import Turn
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.settings.config_layers import load_config
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.processes.isolated_task import IsolatedTask
from swarmnode.tasks.task import Task, is_environment, is_held_out, redraw, score_strictly
from swarmnode.types import Example

MOST_LINES = 3

TRL_REWARDS = {
    "accuracy_reward": "trl.rewards:accuracy_reward",
    "reasoning_accuracy_reward": "trl.rewards:reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards:think_format_reward",
    "get_soft_overlong_punishment": "get_soft_overlong_punishment(1000, 100)",
    "get_cosine_scaled_reward": "get_cosine_scaled_reward(max_len=1000)",
    "get_repetition_penalty_reward": "get_repetition_penalty_reward(ngram_size=2)",
}

FORTY = tuple(
    """ab acre advanced_geometry aiw basic_arithmetic bf binary_alternation bitwise_arithmetic caesar_cipher
    calendar_arithmetic chain_sum color_cube_rotation complex_arithmetic count_bits count_primes countdown
    course_schedule cryptarithm decimal_arithmetic dice fraction_simplification game_of_life gcd
    group_anagrams isomorphic_strings jugs largest_island lcm leg_counting letter_counting mini_sudoku
    number_sorting palindrome_generation prime_factorization products ransom_note self_reference
    simple_equations spell_backward word_sorting""".split()  # noqa: SIM905  forty lines otherwise
)


def one_of(task: Task) -> Example:
    """An example that a round draws, the same again from its key."""
    example = draw_round([task], 3, 1, 1)[0]
    assert redraw(task, example.key).prompt == example.prompt
    assert not is_held_out(example.prompt)
    return example


def joined(stack: ExitStack, arguments: Sequence[str], file: Path | None = None) -> Task:
    """The only task of a node with these settings, as `swarmnode join --task ... --set ...` has it."""
    names = tuple(after for flag, after in pairwise(arguments) if flag == "--task")
    settings = [after for flag, after in pairwise(arguments) if flag == "--set"]
    flags = {"tasks.names": names} if names else {}
    config = load_config(config_file=file, environ={}, assignments=settings, flags=flags).config
    (task,) = start_tasks(stack, config.tasks).values()
    return task


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A data set as people have it: a problem, and its solution in LaTeX."""
    path = tmp_path / "questions.jsonl"
    rows = [{"problem": f"Halve {2 * n}.", "solution": f"${n}$"} for n in range(1, 50)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("name", TRL_REWARDS)
def test_every_reward_of_trl(name: str, questions: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl.rewards", reason="trl is not installed")
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    functions = {name for name in trl.__all__ if callable(getattr(trl, name))}
    assert functions == set(TRL_REWARDS), "those that TRL 1.16 has"
    made = TRL_REWARDS[name]
    if "(" in made:
        file = tmp_path / "mine.py"
        lines = [f"from trl.rewards import {name}", f"mine = {made}", f"--set tasks.reward={file}:mine"]
        file.write_text("\n".join(lines[:2]))
        reward = f"{file}:mine"
    else:
        lines = [f"--set tasks.reward={made}"]
        reward = made
    with ExitStack() as stack:
        task = joined(stack, ["--task", str(questions), "--set", f"tasks.reward={reward}"])
        example = one_of(task)
        right = f"<think>half of it</think> So it is \\boxed{{{example.columns['solution'].strip('$')}}}"
        scores = score_strictly(task, example, [right, "no idea"])
    assert all(value is not None for named in scores for value in named.values())
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize("name", FORTY)
def test_forty_data_sets_of_reasoning_gym(name: str) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    from swarmnode.tasks.loader import load_task

    lines = [f"--task reasoning-gym:{name}"]
    task = load_task(lines[0].removeprefix("--task "))
    example = one_of(task)
    answer = example.columns["answer"]
    ((right,), (wrong,)) = (
        named.values() for named in task.score(example, [f"<answer>{answer}</answer>", ""])
    )
    assert right == 1.0
    assert wrong is not None
    assert wrong < 1.0
    assert len(lines) <= MOST_LINES


def test_a_data_set_of_reasoning_gym_with_parameters(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    lines = ["--task reasoning-gym:chain_sum?min_terms=6"]
    with ExitStack() as stack:
        task = joined(stack, ["--task", "reasoning-gym:chain_sum?min_terms=6"])
        example = one_of(task)
        assert sum(example.prompt.count(sign) for sign in "+-") >= 5
        assert task.score(example, [str(example.columns["answer"])]) == [{"score_answer": 1.0}]
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_data_set_in_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"halves.{suffix}"
    rows = [{"question": f"Half of {2 * n}?", "answer": str(n)} for n in range(60)]
    match suffix:
        case "jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        case "csv":
            path.write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows))
        case _:
            reason = "the extra `data` is not installed"
            pyarrow = pytest.importorskip("pyarrow", reason=reason)
            parquet = pytest.importorskip("pyarrow.parquet", reason=reason)
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    lines = [f"--task {path}", "--set tasks.reward=numeric_match"]
    with ExitStack() as stack:
        task = joined(stack, " ".join(lines).split())
        assert isinstance(task, IsolatedTask)
        example = one_of(task)
        answer = example.columns["answer"]
        assert task.score(example, [f"it is {answer}", "-1"]) == [
            {"numeric_match": 1.0},
            {"numeric_match": 0.0},
        ]
    assert len(lines) <= MOST_LINES


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str.strip() == ground_truth else 0.0
"""

SLIME = """
async def custom_rm(args, sample):
    return float(sample.response.strip() == sample.label)
"""


@pytest.mark.parametrize(
    ("source", "name", "row"),
    [
        (
            VERL,
            "compute_score",
            {
                "data_source": "halves",
                "prompt": [{"role": "user", "content": "Half of 4?"}],
                "reward_model": {"style": "rule", "ground_truth": "2"},
                "extra_info": {"index": 0},
            },
        ),
        (SLIME, "custom_rm", {"prompt": "Half of 4?", "label": "2"}),
    ],
)
def test_a_data_set_and_a_reward_of_another_trainer(
    source: str, name: str, row: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "theirs.py").write_text(source)
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    lines = [f"--task {tmp_path / 'train.jsonl'}", f"--set tasks.reward={tmp_path / 'theirs.py'}:{name}"]
    with ExitStack() as stack:
        task = joined(stack, " ".join(lines).split())
        assert task.score(next(iter(task.examples(0))), ["2", "3"]) == [{name: 1.0}, {name: 0.0}]
    assert len(lines) <= MOST_LINES


TASKSET = """
import verifiers.v1 as vf


class Word(vf.TaskData):
    answer: str


class Reverse(vf.Task[Word]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Words(vf.Taskset[Reverse, vf.TasksetConfig]):
    def load(self):
        for number in range(100):
            yield Reverse(Word(prompt=f"Reverse word{number}.", answer=f"word{number}"[::-1]))


__all__ = ["Words"]
"""


def test_a_taskset_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("the extra `verifiers` is not installed")
    (tmp_path / "reverse_words.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    lines = ["--task verifiers:owner/reverse-words"]
    with ExitStack() as stack:
        task = joined(stack, lines[0].split())
        assert isinstance(task, IsolatedTask)
        example = one_of(task)
        answer = example.columns["answer"]
        assert task.score(example, [answer, "no"]) == [{"correct": 1.0}, {"correct": 0.0}]
    assert len(lines) <= MOST_LINES


PACKAGE = """
class Halves:
    name, version = "halves", "1"

    def examples(self, seed):
        for number in range(seed % 10, 100):
            yield f"Half of {2 * number}?", str(number)

    def score(self, example, completions):
        return [{"right": float(text == example.columns["answer"])} for text in completions]
"""


def test_a_task_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "tasks.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    lines = ["--task mypackage.tasks:Halves"]
    with ExitStack() as stack:
        task = joined(stack, lines[0].split())
        assert isinstance(task, IsolatedTask)
        example = one_of(task)
        assert task.score(example, [example.columns["answer"], "no"]) == [{"right": 1.0}, {"right": 0.0}]
    assert len(lines) <= MOST_LINES


CALCULATOR = '''
def add(left: int, right: int) -> int:
    """Adds two numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left + right


def multiply(left: int, right: int) -> int:
    """Multiplies two numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left * right


def examples(seed):
    for number in range(100):
        question = [{"role": "user", "content": f"({number} + 1) * 3?"}]
        yield {"prompt": question, "answer": str((number + 1) * 3)}


def reward(completions, answer, **kwargs):
    return [float(messages[-1]["content"].strip() == right) for messages, right in zip(completions, answer)]
'''
"""Functions and a reward as they are passed to TRL's GRPOTrainer(tools=..., reward_funcs=reward)."""

SHOP = '''
class Shop:
    def reset(self, price, **kwargs) -> str:
        self.price, self.paid = price, 0
        return f" It costs {price}."

    def pay(self, amount: int) -> str:
        """Puts money on the counter.

        Args:
            amount: How much.
        """
        self.paid += amount
        return f"{self.price - self.paid} to go"

    def change(self) -> int:
        """Asks for the change."""
        return max(0, self.paid - self.price)

    def get_reward(self) -> float:
        return float(self.paid == self.price)


def examples(seed):
    for number in range(1, 100):
        yield {"prompt": f"Buy apple {number}.", "price": number}
'''
"""As it is passed to TRL's GRPOTrainer(environment_factory=Shop)."""


def answered(task: Task, example: Example, saids: Sequence[str]) -> tuple[Turn, ...]:
    assert is_environment(task)
    turns: list[Turn] = []
    for said in saids:
        turns.append(Turn(said, task.observe(example, [*turns, Turn(said)]) or ()))
    return tuple(turns)


def test_a_multi_turn_environment_with_two_tools(tmp_path: Path) -> None:
    lines = ["tools = [add, multiply]"]
    (tmp_path / "calculator.py").write_text("\n".join([CALCULATOR, *lines]))
    lines.append(f"--task {tmp_path / 'calculator.py'}")
    with ExitStack() as stack:
        task = joined(stack, lines[1].split())
        example = one_of(task)
        number = int(example.columns["answer"]) // 3
        calls = [{"name": "add", "arguments": {"left": number - 1, "right": 1}}]
        calls.append({"name": "multiply", "arguments": {"left": number, "right": 3}})
        said = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
        turns = answered(task, example, [*said, example.columns["answer"]])
        assert [m["content"] for t in turns for m in t.observed] == [str(number), str(3 * number)]
        assert task.score(example, [tuple(turns), (Turn("no"),)]) == [
            {"reward": 1.0},
            {"reward": 0.0},
        ]
    assert len(lines) <= MOST_LINES


def test_an_environment_factory_of_trl_with_two_tools(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    lines = [f"--task {tmp_path / 'shop.py'}:Shop"]
    with ExitStack() as stack:
        task = joined(stack, lines[0].split())
        example = one_of(task)
        price = example.columns["price"]
        assert example.messages[-1]["content"].endswith(f" It costs {price}.")
        turns = answered(task, example, [f"pay({price})", "change()", "Thanks."])
        assert [m["content"] for t in turns for m in t.observed] == ["0 to go", "0"]
        assert task.score(example, [tuple(turns)]) == [{"environment": 1.0}]
    assert len(lines) <= MOST_LINES
