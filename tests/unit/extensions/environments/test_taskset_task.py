"""Tasksets of verifiers: one question, one answer, scored by the taskset itself."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.task import is_exchangeable, redraw

REVERSE = """
import verifiers.v1 as vf


class Word(vf.TaskData):
    answer: str


class Reverse(vf.Task[Word]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        return {"turns": float(len(trace.assistant_messages))}

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Settings(vf.TasksetConfig):
    words: int = 30


class Words(vf.Taskset[Reverse, Settings]):
    def load(self):
        for number in range(self.config.words):
            word = f"word{number}"
            yield Reverse(Word(prompt=f"Reverse {word}", system_prompt="Be brief.", answer=word[::-1]))


__all__ = ["Words"]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A taskset in the folder that the node is started in."""
    pytest.importorskip("verifiers.v1", reason="the extra `verifiers` is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    path = tmp_path / "reverse_words.py"
    path.write_text(REVERSE)
    yield path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


def test_a_taskset_is_a_task_with_its_own_judge(package: Path) -> None:
    task = load_task("verifiers:reverse-words")
    example = draw_round([task], 1, 1, 1)[0]
    assert [message["role"] for message in example.messages] == ["system", "user"]
    assert example.messages[1]["content"].startswith("Reverse word")
    assert task.score(example, [example.columns["answer"], "no"]) == [
        {"correct": 2.0, "turns": 1.0},
        {"correct": 0.0, "turns": 1.0},
    ]
    assert redraw(load_task("verifiers:owner/reverse-words@1.0"), example.key) == example


def test_fields_of_its_configuration_stand_in_the_name(package: Path) -> None:
    task = load_task("verifiers:reverse-words?words=7&private=true")
    assert len(list(task.examples(0))) == 7
    assert not is_exchangeable(task)
    assert task.version != load_task("verifiers:reverse-words").version
    with pytest.raises(TaskError, match="wordss"):
        load_task("verifiers:reverse-words?wordss=7")


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (
            "self, trace: vf.Trace) -> float",
            "self, trace: vf.Trace, runtime: vf.Runtime) -> float",
            "runtime",
        ),
        (
            "class Reverse(vf.Task[Word]):",
            "class Reverse(vf.Task[Word]):\n    NEEDS_CONTAINER = True",
            "a container",
        ),
        ("@vf.reward", "@vf.metric", "has no reward"),
        ("range(self.config.words)", "range(0)", "has no tasks"),
        ("__all__", "_all", "cannot be loaded"),
    ],
)
def test_what_one_answer_is_not_enough_for_is_refused(
    package: Path, before: str, after: str, complaint: str
) -> None:
    source = REVERSE.replace("(weight=2.0)", "") if after == "@vf.metric" else REVERSE
    package.with_name("other_words.py").write_text(source.replace(before, after))
    with pytest.raises(TaskError, match=complaint):
        load_task("verifiers:other-words")


def test_a_reward_that_fails_scores_nothing_and_says_so(package: Path, caplog) -> None:
    package.with_name("failing_words.py").write_text(
        REVERSE.replace("return float(trace", "return 1 / 0 + float(trace")
    )
    task = load_task("verifiers:failing-words")
    example = next(iter(task.examples(0)))
    (scores,) = task.score(example, ["?"])
    assert all(value is None for value in scores.values())
    assert "cannot score an answer" in caplog.text


def test_a_taskset_that_is_not_there_is_one_sentence_and_the_way_to_it(package: Path) -> None:
    with pytest.raises(TaskError, match="taskset 'nobody-has-this' not found") as caught:
        load_task("verifiers:nobody-has-this")
    assert caught.value.message.endswith("(tried to import 'nobody_has_this')")
    assert "install its package" in caught.value.hint and str(package.parent) in caught.value.hint


def test_who_has_a_taskset_with_tools_is_told_where_tools_go(package: Path) -> None:
    tools = (
        "\n    @classmethod\n    def toolsets(cls, config):\n        return [vf.Toolset(vf.ToolsetConfig())]"
    )
    head = "class Reverse(vf.Task[Word]):"
    package.with_name("tool_words.py").write_text(REVERSE.replace(head, head + tools))
    with pytest.raises(TaskError, match="tool-words has tools") as caught:
        load_task("verifiers:tool-words")
    assert "tools=[...]" in caught.value.hint and "docs/environments.md" in caught.value.hint


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module.partition(".")[0])

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(TaskError, match="needs verifiers, which is not installed") as caught:
        load_task("verifiers:reverse-words")
    assert caught.value.hint == 'pip install "verifiers>=0.4,<0.5"'
