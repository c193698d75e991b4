"""Rewards as other trainers have them, copied unchanged: each in its own words, all with the same answer."""

import sys
from pathlib import Path

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.digests import source_of
from swarmnode.tasks.judging.rewards import call_reward, load_reward, score_with
from swarmnode.tasks.loader import load_task
from swarmnode.types import Example, ExampleKey

REWARDS = '''
import asyncio


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature."""
    assert data_source == "sums"
    return {"score": float(solution_str == ground_truth), "acc": 1}


def plain_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """verl's own for GSM8K has this one."""
    return score if solution_str == ground_truth else format_score


async def async_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": float(solution_str == ground_truth)}


async def custom_rm(args, sample, **kwargs):
    """slime's signature."""
    assert sample.metadata["data_source"] == "sums"
    return float(sample.response == sample.label)


async def batched_rm(args, samples):
    return [float(sample.response == sample.label) for sample in samples]


class Task:
    """nanochat's."""

    def reward(self, conversation, assistant_response):
        assert conversation["messages"][0] == {"role": "user", "content": "2 + 2 ="}
        return float(conversation["messages"][-1]["content"] == assistant_response)


def nanochat_reward(conversation, assistant_response):
    return Task().reward(conversation, assistant_response)


def genrl_reward(completions, answer, metadata):
    assert metadata == {"data_source": "sums"}
    return [float(completion == answer) for completion in completions]


async def verifiers_reward(completion, answer, state):
    """One of a Rubric of verifiers."""
    assert completion[-1]["role"] == "assistant" and state["prompt"][-1]["content"] == "2 + 2 ="
    return 1.0 if completion[-1]["content"] == answer == state["answer"] else 0.0


def plain_verifiers_reward(prompt, completion, answer, info, **kwargs):
    assert info == {} and kwargs["data_source"] == "sums"
    return completion[-1]["content"] == answer


def trl_reward(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]
'''

EXAMPLE = Example(ExampleKey("t", "1", 0, 0), "2 + 2 =", {"answer": "4", "data_source": "sums"})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rewards_of_others.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rewards_of_others", raising=False)
    return "rewards_of_others"


@pytest.mark.parametrize(
    ("convention", "name"),
    [
        ("verl:", "compute_score"),
        ("", "compute_score"),
        ("", "plain_score"),
        ("", "async_score"),
        ("slime:", "custom_rm"),
        ("", "custom_rm"),
        ("", "batched_rm"),
        ("nanochat:", "Task"),
        ("", "nanochat_reward"),
        ("verifiers:", "verifiers_reward"),
        ("", "verifiers_reward"),
        ("", "plain_verifiers_reward"),
        ("genrl:", "genrl_reward"),
        ("", "trl_reward"),
    ],
)
@pytest.mark.parametrize("conversational", [False, True])
def test_a_reward_of_another_trainer_runs_unchanged(
    module: str, convention: str, name: str, conversational: bool
) -> None:
    reward = load_reward(f"{convention}{module}:{name}")
    example = Example(EXAMPLE.key, EXAMPLE.prompt, EXAMPLE.columns, conversational and name != "trl_reward")
    assert score_with({"r": reward}, example, ["4", "5"]) == [{"r": 1.0}, {"r": 0.0}]


def test_verls_ground_truth_is_found_where_its_data_sets_have_it(module: str) -> None:
    columns = {"data_source": ["sums"], "reward_model": [{"style": "rule", "ground_truth": "4"}]}
    assert call_reward(load_reward(f"{module}:compute_score"), ["?"], ["4"], columns) == [1.0]


def test_a_data_set_of_verl_trains_with_its_reward(module: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(
        '{"data_source": "sums", "prompt": [{"role": "user", "content": "2 + 2 ="}],'
        ' "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train"}}\n'
    )
    task = load_task(f"{path}?reward={module}:compute_score")
    example = next(iter(task.examples(0)))
    assert task.score(example, ["4", "5"]) == [{"compute_score": 1.0}, {"compute_score": 0.0}]


def test_a_task_file_may_use_one_as_its_reward(module: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"from {module} import plain_score as reward\n\ndef examples(seed):\n    yield '2 + 2 =', '4'\n"
    )
    task = load_task(str(path))
    assert task.score(next(iter(task.examples(0))), ["4", "5"]) == [{"reward": 1.0}, {"reward": 0.0}]


def test_an_adapted_reward_has_the_version_of_the_function_inside(tmp_path: Path) -> None:
    sources: set[str] = set()
    for name, text in (("one", REWARDS), ("other", REWARDS.replace("solution_str ==", "solution_str !="))):
        (tmp_path / f"{name}.py").write_text(text)
        sources.add(source_of(load_reward(f"verl:{tmp_path / name}.py:compute_score")))
    assert len(sources) == 2


def test_a_function_that_is_called_like_a_trainer_is_a_function(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "genrl.py").write_text("def reward(completions):\n    return [7.0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call_reward(load_reward("genrl:reward"), ["?"], ["4"]) == [7.0]
    sys.modules.pop("genrl")


def test_what_is_not_there_is_said(module: str) -> None:
    with pytest.raises(TaskError, match="no reward '"):
        load_reward(f"verl:{module}:nothing")
