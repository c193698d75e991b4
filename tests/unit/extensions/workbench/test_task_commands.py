"""What `swarmnode task` prints and writes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app, main
from swarmnode.errors import StorageError, TaskError
from swarmnode.extensions.demonstration.tiny import MAX_POSITIONS
from swarmnode.extensions.workbench.check import check_task

ODD = """
def examples(seed):
    for number in range(10):
        yield {"prompt": f"{seed} {number}=", "answer": str(number), "kept": {1, 2}}

def reward(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

def reward_brief(completions, **columns):
    return [None for _ in completions]
"""


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    return file


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["task", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def fails(*arguments: str) -> BaseException:
    result = CliRunner().invoke(app, ["task", *arguments])
    assert result.exception is not None
    return result.exception


def test_the_list_has_a_sample_of_each_task_and_the_other_forms() -> None:
    text = run("list")
    assert "rev        rev " in text
    assert "FILE.py" in text
    listed = json.loads(run("list", "--json"))
    assert {"name": "rev", "version": "1", "prompt": listed["tasks"][0]["prompt"]} == listed["tasks"][0]
    assert {"NAME", "builtin", "FILE.py"} <= {form["form"] for form in listed["forms"] if form["ready"]}


def test_a_file_is_shown_with_version_rewards_and_questions(odd: Path) -> None:
    (shown,) = json.loads(run("show", str(odd), "--json", "--count", "3"))
    assert (shown["name"], shown["rewards"], shown["drawn"]) == ("odd", ["reward", "brief"], 10)
    assert shown["exchangeable"] is True
    assert [sample["prompt"] for sample in shown["samples"]] == ["0 0=", "0 1=", "0 2="]
    text = run("show", str(odd), "--seed", "7", "--count", "1")
    assert f"task odd, version {shown['version']}" in text
    assert "'7 0='" in text


def test_of_a_conversation_is_shown_what_was_said(tmp_path: Path) -> None:
    brief = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}]
    (tmp_path / "talk.py").write_text(
        f"def examples(seed):\n    yield {{'prompt': {brief}, 'answer': '4'}}\n"
    )
    for command in ("show", "check"):
        result = CliRunner().invoke(app, ["task", command, str(tmp_path / "talk.py")])
        assert "'2 + 2 = (before: system: Be brief.)'" in result.output


def test_answers_that_score_nothing_as_they_are_do_not_count_as_none_known(tmp_path: Path) -> None:
    """An environment wants a call of its tool, whatever the column `answer` has."""
    (tmp_path / "called.py").write_text(
        "def examples(seed):\n    yield '2 + 2 =', '4'\n"
        "def reward(completions, **columns):\n    return [float(one == 'add(2, 2)') for one in completions]\n"
    )
    said = run("check", str(tmp_path / "called.py"))
    assert "unknown (no `answer` or demonstration, taken as it is, scores better than nonsense" in said


def test_a_data_set_is_shown_as_the_settings_would_have_it(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1=", "gold": "2"}\n')
    said = ["--set", "tasks.reward=exact_match", "--home", str(tmp_path)]
    (shown,) = json.loads(run("show", f"{tmp_path / 'sums.jsonl'}?answer=gold", "--json", *said))
    assert shown["rewards"] == ["exact_match"] and shown["samples"][0]["columns"]["answer"] == "2"


def test_all_tasks_can_be_shown_at_once() -> None:
    assert len(json.loads(run("show", "builtin", "--json", "--count", "1"))) == 8


def test_a_task_without_an_example_says_so(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("def examples(seed):\n    return []\n")
    assert isinstance(fails("show", str(tmp_path / "none.py")), TaskError)


def test_a_new_file_passes_the_check(tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    assert str(file) in run("new", str(file))
    assert 18 <= len(file.read_text().splitlines()) <= 25
    report = check_task(str(file))
    assert report.ok
    assert report.lets_through is not None
    assert not any(report.lets_through.values())


def test_what_is_there_is_never_overwritten(odd: Path) -> None:
    error = fails("new", str(odd))
    assert isinstance(error, StorageError)
    assert "exists already" in error.message
    assert odd.read_text() == ODD


@pytest.mark.parametrize("name", ["task.txt", "-x.py", "a b.py"])
def test_a_name_that_no_task_may_have_is_refused(tmp_path: Path, name: str) -> None:
    assert isinstance(fails("new", "--", str(tmp_path / name)), TaskError)
    assert list(tmp_path.iterdir()) == []


def test_a_task_is_played_against_the_base_model_where_nothing_was_trained(
    odd: Path, quick_model: Path, tmp_path: Path
) -> None:
    where = ("--model", str(quick_model), "--home", str(tmp_path / "home"), "--set", "rollout.max_tokens=4")
    played = json.loads(run("try", str(odd), *where, "--count", "2", "--samples", "3", "--json"))
    assert played["policy"] == "base model, since this home has no checkpoint"
    assert sorted(example["prompt"] for example in played["examples"]) == ["0 0=", "0 1="]
    for example in played["examples"]:
        assert [set(answer["scores"]) for answer in example["answers"]] == [{"reward", "brief"}] * 3
        assert all(answer["reward"] in (0.0, 1.0) for answer in example["answers"])
    text = run("try", str(odd), *where, "--count", "1", "--greedy")
    assert "'0 0='" in text
    assert "brief unknown" in text


def test_answers_too_long_for_the_model_are_cut_when_a_task_is_tried(
    odd: Path, quick_model: Path, tmp_path: Path
) -> None:
    """A run that was told shorter ones is tried without being told again."""
    where = ("--model", str(quick_model), "--home", str(tmp_path / "home"))
    long = ("--set", f"rollout.max_tokens={MAX_POSITIONS}")
    assert json.loads(run("try", str(odd), *where, *long, "--count", "1", "--json"))["examples"]


ECHO = """
class Echo:
    most_turns = 2

    def reset(self, **columns):
        pass

    def step(self, said):
        return f"heard:{said}", 1.0, False, {}

def examples(seed):
    for number in range(10):
        yield f"Say {number}."

environment = Echo
"""


def test_a_task_that_answers_back_is_played_turn_by_turn(quick_model: Path, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    where = ("--model", str(quick_model), "--home", str(tmp_path / "home"))
    played = json.loads(run("try", str(tmp_path / "echo.py"), *where, "--json"))
    answers = [answer["text"] for example in played["examples"] for answer in example["answers"]]
    assert any("\n[user] heard:" in text for text in answers), answers


def test_a_check_says_how_often_the_untrained_model_is_right_and_what_follows(
    odd: Path, quick_model: Path, tmp_path: Path
) -> None:
    where = ("--model", str(quick_model), "--home", str(tmp_path / "home"), "--set", "rollout.max_tokens=2")
    file = tmp_path / "odd_enough.py"
    for reward, follows in (
        ("[0.0 for _ in completions]", "pass@1 0.0%, pass@2 0.0%. no answer is right yet"),
        ("[1.0 for _ in completions]", "pass@1 100.0%, pass@2 100.0%. nearly every answer is right"),
    ):
        file.write_text(MANY + f"def reward(completions, **columns):\n    return {reward}\n")
        assert f"untrained         64 answers: {follows}" in run("check", str(file), *where, "--samples", "2")


def test_a_check_does_not_call_ready_what_nothing_can_be_learnt_of_alone(
    quick_model: Path, tmp_path: Path
) -> None:
    where = ("--model", str(quick_model), "--home", str(tmp_path / "home"), "--set", "rollout.max_tokens=2")
    file = tmp_path / "far.py"
    judged = "[float(c == 9 * a) for c, a in zip(completions, answer)]"
    alone = f"{MANY}def reward(completions, answer, **columns):\n    return {judged}\n"
    file.write_text(alone)
    said = run("check", str(file), *where, "--samples", "2")
    assert "demonstrations with full marks" in said and "ready to train on" not in said
    assert said.strip().splitlines()[-1].startswith("a node on its own cannot learn anything yet")
    pair = 'yield f"{seed} {number}=", str(number)'
    row = 'yield {"prompt": f"{seed} {number}=", "answer": str(number), "demonstration": str(number) * 9}'
    file.write_text(alone.replace(pair, row))
    said = run("check", str(file), *where, "--samples", "2")
    assert "demonstrations    32 of 32 with full marks" in said
    assert "the demonstrations are learnt from first" in said
    assert said.strip().splitlines()[-1] == "ready to train on"


MANY = """
def examples(seed):
    for number in range(200):
        yield f"{seed} {number}=", str(number)

"""


ONLY_UNCONFINED = """
from swarmnode.tasks.processes.unconfined import is_unconfined_allowed

def examples(seed):
    yield from ((f"{number} {seed}=", str(number)) for number in range(50))

def reward(completions, answer, **columns):
    return [float(c == a) if is_unconfined_allowed() else None for c, a in zip(completions, answer)]
"""


def test_a_check_runs_programs_as_the_settings_of_a_node_say(tmp_path: Path) -> None:
    file = tmp_path / "programs.py"
    file.write_text(ONLY_UNCONFINED)
    assert "ready to train on" in run("check", str(file), "--set", "tasks.sandbox=optional")
    refused = CliRunner().invoke(app, ["task", "check", str(file)])
    assert refused.exit_code == 1 and "only None" in refused.stdout


BROKEN = """
def examples(seed):
    yield "1+1=", "2"

def marks(text):
    return 1 / len(text)

def reward(completions, **columns):
    return [marks(text) for text in completions]
"""


def test_the_traceback_of_a_reward_is_shown_to_whoever_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    monkeypatch.setattr("sys.argv", ["swarmnode", "task", "show", str(file)])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().err
    assert f'File "{file}", line 6, in marks' in shown and "in reward" in shown
    assert "error: reward reward failed: ZeroDivisionError('division by zero')" in shown
