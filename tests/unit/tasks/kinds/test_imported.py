"""Tasks that live in a package: objects, classes and functions by import path, in a process of their own."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate
from swarmnode.tasks.specs import TaskKind, TaskSpec, absolute, parse_spec, with_defaults
from swarmnode.tasks.task import (
    Task,
    evaluation_size_of,
    is_exchangeable,
    judges_groups,
    levels_of,
    redraw,
)

PACKAGE = '''
from swarmnode.types import Example, ExampleKey


class Doubles:
    """A Task as a class."""

    name = "doubles"
    version = "3"

    def __init__(self, most=50):
        self.most = most

    def examples(self, seed):
        for index in range(self.most):
            key = ExampleKey("doubles", "3", seed, index)
            yield Example(key, f"2 * {index + seed} =", {"answer": str(2 * (index + seed))})

    def score(self, example, completions):
        return [{"right": float(c == example.columns["answer"])} for c in completions]


small = Doubles(most=5)


def large():
    return Doubles(most=500)


class Kept(Doubles):
    name = "kept"
    exchangeable = False


class Rows(Doubles):
    name = "rows"

    def examples(self, seed):
        yield "1 + 1 =", "2"
        yield {"prompt": "2 + 2 =", "answer": "4"}


class Told(Doubles):
    """Says all that a task may say of itself."""

    name = "told"
    judges_groups, levels, evaluation_size = True, 3, 50
    demonstrations = {"2 * 1 =": "2"}


class Growing(Doubles):
    """Its version is computed, and another one each time."""

    name = "growing"
    asked = 2

    @property
    def version(self):
        self.asked += 1
        return str(self.asked)


class Telling(Doubles):
    name = "telling"

    def demonstrations(self, example):
        return str(example.columns["answer"])


class Broken(Doubles):
    name = "broken"

    def examples(self, seed):
        yield "1 + 1 =", "2"
        raise ZeroDivisionError("no more")


class Unnameable(Doubles):
    name = "not a name"


def sums(seed):
    for a in range(40):
        yield f"{a} + {seed} =", str(a + seed)


def reward_short(completions, **columns):
    return [-float(len(c)) for c in completions]


number = 7
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package in the folder a node is started in, as the command line finds it."""
    folder = tmp_path / "mypackage"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "tasks.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "mypackage.tasks"
    for name in [name for name in sys.modules if name.split(".")[0] == "mypackage"]:
        del sys.modules[name]


def isolated(spec: str) -> IsolatedTask:
    task = isolate(spec, timeout_s=30.0)
    assert isinstance(task, IsolatedTask)
    return task


def drawn(task: Task) -> list[str]:
    return [example.prompt for example in task.examples(0)]


@pytest.mark.parametrize(("attribute", "examples"), [("small", 5), ("Doubles", 50), ("large", 500)])
def test_an_object_a_class_and_what_makes_one_are_tasks(package: str, attribute: str, examples: int) -> None:
    task = load_task(f"{package}:{attribute}")
    assert (task.name, task.version, len(drawn(task))) == ("doubles", "3", examples)
    example = draw_round([task], 0, 1, 1)[0]
    assert redraw(task, example.key) == example
    assert task.score(example, [str(example.columns["answer"]), "?"]) == [{"right": 1.0}, {"right": 0.0}]


def test_the_version_of_an_object_is_asked_for_once(package: str) -> None:
    task = load_task(f"{package}:Growing")
    found = [task.version, *(example.key.version for example in task.examples(0)), task.version]
    assert found == [found[0]] * 52


def test_a_task_that_judges_groups_stays_at_home_unless_it_says_otherwise(package: str) -> None:
    task = load_task(f"{package}:Told")
    assert judges_groups(task) and not is_exchangeable(task)
    with isolated(f"{package}:Told") as apart:
        assert not is_exchangeable(apart)


def test_a_function_is_a_task_with_the_rewards_of_its_module(package: str) -> None:
    task = load_task(f"{package}:sums")
    example = next(iter(task.examples(3)))
    assert (task.name, example.prompt, example.columns) == ("sums", "0 + 3 =", {"answer": "3"})
    assert task.score(example, ["3", "33"]) == [{"short": -1.0}, {"short": -2.0}]


def test_the_version_of_a_function_is_that_of_the_text_it_stands_in(package: str, tmp_path: Path) -> None:
    before = load_task(f"{package}:sums").version
    del sys.modules[package]
    (tmp_path / "mypackage" / "tasks.py").write_text(PACKAGE + "# changed\n")
    assert load_task(f"{package}:sums").version != before


def test_a_file_may_hold_an_object_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PACKAGE)
    assert load_task(f"{tmp_path / 'mine.py'}:small").name == "doubles"


def test_a_node_runs_them_in_a_process_of_their_own(package: str) -> None:
    task = isolate(f"{package}:small", timeout_s=30.0)
    assert isinstance(task, IsolatedTask)
    with task:
        assert package not in sys.modules
        assert drawn(task) == drawn(load_task(f"{package}:small"))
        example = next(iter(task.examples(0)))
        assert task.score(example, ["0"]) == [{"right": 1.0}]
        assert task.spec == f"{package}:small"


def test_a_package_that_changes_while_the_node_runs_is_an_error_and_no_other_task(
    package: str, tmp_path: Path
) -> None:
    task = isolate(f"{package}:sums", timeout_s=30.0)
    assert isinstance(task, IsolatedTask)
    with task:
        (tmp_path / "mypackage" / "tasks.py").write_text(PACKAGE + "# changed\n")
        task.interrupt()
        with pytest.raises(TaskError, match="changed while the node was running"):
            drawn(task)


def test_an_object_may_yield_rows_as_a_file_does(package: str) -> None:
    examples = list(load_task(f"{package}:Rows").examples(4))
    assert [(e.prompt, e.columns["answer"]) for e in examples] == [("1 + 1 =", "2"), ("2 + 2 =", "4")]
    assert [(e.key.task, e.key.seed, e.key.index) for e in examples] == [("rows", 4, 0), ("rows", 4, 1)]


def test_an_object_says_whether_it_may_be_exchanged(package: str) -> None:
    assert is_exchangeable(load_task(f"{package}:small"))
    assert not is_exchangeable(load_task(f"{package}:Kept"))
    kept = isolate(f"{package}:Kept", timeout_s=30.0)
    assert isinstance(kept, IsolatedTask)
    with kept:
        assert not is_exchangeable(kept)


def test_a_file_says_so_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("exchangeable = False\n\ndef examples(seed):\n    yield '?', '4'\n")
    assert not is_exchangeable(load_task(str(path)))
    assert is_exchangeable(load_task("rev"))


def test_what_an_object_says_of_itself_holds_here_and_in_a_process_of_its_own(package: str) -> None:
    here = load_task(f"{package}:Told")
    with ExitStack() as stack:
        for task in (here, stack.enter_context(isolated(f"{package}:Told"))):
            assert judges_groups(task) and (levels_of(task), evaluation_size_of(task)) == (3, 50)
            assert Demonstrations().of(task, next(iter(task.examples(1)))) == ("2",)
        telling = stack.enter_context(isolated(f"{package}:Telling"))
        assert Demonstrations().of(telling, next(iter(telling.examples(1)))) == ("2",)


@pytest.mark.parametrize(
    ("attribute", "complaint"),
    [
        ("nothing", "has no attribute 'nothing'"),
        ("number", "is not a task"),
        ("Unnameable", "invalid task name 'not a name'"),
        ("small?reward=x", "unknown option 'reward'"),
    ],
)
def test_what_is_no_task_is_one_clear_sentence(package: str, attribute: str, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        load_task(f"{package}:{attribute}")


def test_a_package_that_is_not_there_and_one_that_fails(package: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot import not_there") as missing:
        load_task("not_there.at_all:task")
    assert "install it, or run this in" in missing.value.hint
    (tmp_path / "mypackage" / "failing.py").write_text("\nimport not_there\n")
    with pytest.raises(TaskError, match="No module named 'not_there'") as failing:
        load_task("mypackage.failing:task")
    assert failing.value.hint.endswith("failing.py line 2")


def test_a_draw_that_fails_is_a_task_error_with_its_line(package: str) -> None:
    rows = load_task(f"{package}:Broken").examples(0)
    assert next(iter(rows)).prompt == "1 + 1 ="
    with pytest.raises(TaskError, match="no more") as caught:
        list(rows)
    assert "tasks.py line" in caught.value.hint


def test_a_spec_is_taken_apart_and_put_together_again() -> None:
    spec = parse_spec("data/q.jsonl?reward=numeric_match&reward=mine.py:f&answer=the%20answer")
    assert (spec.kind, spec.name) == (TaskKind.DATA, "data/q.jsonl")
    assert spec.options == {"reward": ("numeric_match", "mine.py:f"), "answer": ("the answer",)}
    assert parse_spec(str(spec)) == spec
    assert parse_spec("hf:openai/gsm8k:test").name == "openai/gsm8k:test"
    assert str(absolute(parse_spec("a.b:c"))) == "a.b:c"
    assert absolute(parse_spec("x.jsonl?answer=a")).name == str(Path.cwd() / "x.jsonl")
    rewards = "exact_match", "a.b:c", "verl:rw.py:f", "http://a.b:80/rw.py:1", "a:b/rw.py:f"
    whole = absolute(TaskSpec(TaskKind.DATA, "x.jsonl", {"reward": rewards})).options["reward"]
    here = Path.cwd()
    assert whole[:2] == ("exact_match", "a.b:c") and whole[3] == "http://a.b:80/rw.py:1"
    assert (whole[2], whole[4]) == (f"verl:{here}/rw.py:f", f"{here}/a:b/rw.py:f")
    assert absolute(TaskSpec(TaskKind.DATA, "x.jsonl", {"reward": whole})).options["reward"] == whole
    assert with_defaults(spec, {"answer": ["other"], "prompt": ["q"], "split": []}).options == {
        "prompt": ("q",),
        **spec.options,
    }


def test_options_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        parse_spec("x.jsonl?reward")
    with pytest.raises(TaskError, match="2 times"):
        parse_spec("x.jsonl?a=1&a=2").one("a")


def test_an_option_that_is_true_or_false_is_nothing_else() -> None:
    said = [
        parse_spec(f"x.jsonl{query}").flag("private") for query in ("", "?private=false", "?private=true")
    ]
    assert said == [False, False, True]
    for text in ("True", "1", "yes", "ture"):
        with pytest.raises(TaskError, match=f"private is '{text}'") as caught:
            parse_spec(f"x.jsonl?private={text}").flag("private")
        assert caught.value.hint == "write true or false"


def test_a_path_may_have_a_plus_beside_options() -> None:
    spec = parse_spec("c++/q.jsonl?answer=a+b")
    assert (spec.name, spec.options) == ("c++/q.jsonl", {"answer": ("a+b",)})
    assert parse_spec(str(spec)) == spec


def test_a_name_of_ours_is_no_folder_that_happens_to_lie_there(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rev", "countdown", "mine"):
        (tmp_path / name).mkdir()
    kinds = [parse_spec(name).kind for name in ("rev", "countdown", "mine", "./rev")]
    assert kinds == [TaskKind.BUILTIN, TaskKind.BUILTIN, TaskKind.DATA, TaskKind.DATA]
