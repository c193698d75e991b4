"""Data sets as tasks: whatever format the rows are in, and whatever is wrong with one of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from swarmnode.errors import TaskError
from swarmnode.machine.installing import how_to_install
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.judging.rewards import load_reward, named_rewards
from swarmnode.tasks.kinds import data, tables
from swarmnode.tasks.kinds import hub_datasets as hub
from swarmnode.tasks.kinds.data import shuffled
from swarmnode.tasks.kinds.rewarded_task import rewarded
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate
from swarmnode.tasks.specs import judged_elsewhere
from swarmnode.tasks.task import Task, draw_held_out, draw_train, is_exchangeable, redraw

ROWS = [{"question": f"{a} + 1 =", "answer": str(a + 1), "level": a % 3} for a in range(60)]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_rows(rows: list[Any], name: str = "sums.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(path)

    return write_rows


def prompts(task: Task, seed: int = 0) -> list[str]:
    return [example.prompt for example in task.examples(seed)]


def test_a_file_of_json_lines_is_a_task(write: Write) -> None:
    task = load_task(write(ROWS))
    assert task.name == "sums"
    examples = {example.prompt: example for example in task.examples(0)}
    assert len(examples) == 60
    assert examples["4 + 1 ="].columns == {"question": "4 + 1 =", "answer": "5", "level": 1}
    assert task.score(examples["4 + 1 ="], ["5", "6"]) == [{"correct": 1.0}, {"correct": 0.0}]


def test_each_seed_asks_in_another_order_that_a_peer_finds_again(write: Write) -> None:
    task, copy = load_task(write(ROWS)), load_task(write(ROWS))
    assert prompts(task, 1) == prompts(copy, 1) != prompts(task, 2)
    assert sorted(prompts(task, 1)) == sorted(prompts(task, 2))
    for example in draw_round([task], 7, 3, 8):
        assert redraw(copy, example.key) == example


def test_every_row_comes_once_in_every_order() -> None:
    for count in (1, 2, 7, 100):
        assert sorted(shuffled(f"a/{count}", count)) == list(range(count))
    assert list(shuffled("x", 100)) != list(shuffled("y", 100)) != list(range(100))


def test_the_version_follows_from_rows_and_rewards_and_not_from_the_place(
    write: Write, tmp_path: Path
) -> None:
    path = write(ROWS)
    version = load_task(path).version
    (tmp_path / "copy").mkdir()
    reordered = [dict(reversed(row.items())) for row in ROWS]
    assert load_task(write(reordered, "copy/sums.jsonl")).version == version
    assert load_task(write(ROWS[:-1], "copy/sums.jsonl")).version != version
    assert load_task(f"{path}?reward=numeric_match").version != version
    assert load_task(f"{path}?answer=level").version != version


def test_the_text_of_a_reward_is_part_of_the_version(write: Write, tmp_path: Path) -> None:
    path, reward = write(ROWS), tmp_path / "mine.py"
    versions: set[str] = set()
    for weight in (1.0, 2.0):
        reward.write_text(
            f"def halves(completions, **columns):\n    return [{weight} * len(c) for c in completions]\n"
        )
        task = load_task(f"{path}?reward={reward}:halves")
        versions.add(task.version)
        assert task.score(next(iter(task.examples(0))), ["four"]) == [{"halves": 4 * weight}]
    assert len(versions) == 2


def test_a_script_and_a_command_that_name_one_judge_mean_one_version(write: Write, tmp_path: Path) -> None:
    path, judge = write(ROWS), tmp_path / "mine.py"
    judge.write_text(
        "WEIGHT = 2.0\ndef weighs(text): return WEIGHT * len(text)\n"
        "def longs(completions, **columns): return [weighs(c) for c in completions]\n"
    )
    command = load_task(f"{path}?reward={judge}:longs")
    rows = load_task(judged_elsewhere(f"{path}?reward=numeric_match"))
    script = rewarded(rows, named_rewards([load_reward(f"{judge}:longs")]))
    assert (script.name, script.version) == (command.name, command.version)
    assert redraw(script, next(iter(draw_train(command, 0))).key)
    judge.write_text(judge.read_text().replace("2.0", "3.0"))
    assert load_task(f"{path}?reward={judge}:longs").version != command.version


def test_who_judges_a_data_set_elsewhere_needs_no_answer_column(write: Write) -> None:
    path = write([{"prompt": f"Say {number}."} for number in range(9)])
    with pytest.raises(TaskError, match="no answer"):
        load_task(path)
    rows = load_task(judged_elsewhere(path))
    assert rows.score(next(iter(rows.examples(0))), ["one"]) == [{}]


def test_comma_separated_values(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text('problem,solution\n"1,000 + 1 =",1001\n"two\nlines",2\n', encoding="utf-8-sig")
    task = load_task(str(path))
    found = {example.prompt: example.columns for example in task.examples(0)}
    assert found["1,000 + 1 ="] == {"problem": "1,000 + 1 =", "solution": "1001", "answer": "1001"}
    assert set(found) == {"1,000 + 1 =", "two\nlines"}


def test_parquet_and_folders_of_datasets_are_the_same_task(write: Write, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    version = load_task(write(ROWS)).version
    loaded = datasets.Dataset.from_list(ROWS)
    loaded.to_parquet(tmp_path / "sums.parquet")
    assert load_task(str(tmp_path / "sums.parquet")).version == version
    loaded.save_to_disk(tmp_path / "sums")
    assert load_task(str(tmp_path / "sums")).version == version
    splits = datasets.DatasetDict({"train": loaded, "test": loaded.select(range(5))})
    splits.save_to_disk(tmp_path / "both")
    assert len(prompts(load_task(str(tmp_path / "both")))) == 60
    assert len(prompts(load_task(f"{tmp_path / 'both'}?split=test"))) == 5
    with pytest.raises(TaskError, match="has no split 'dev'"):
        load_task(f"{tmp_path / 'both'}?split=dev")
    measured = load_task(f"{tmp_path / 'both'}?evaluation={tmp_path / 'both'}%3Fsplit=test")
    assert len(prompts(measured)) == 55 and len(list(draw_held_out(measured, 0))) == 5


@pytest.mark.parametrize("name", ["sums.parquet", "sums"])
def test_what_is_not_installed_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module.partition(".")[0])

    monkeypatch.setattr("importlib.import_module", missing)
    path = tmp_path / name
    path.touch() if path.suffix else path.mkdir()
    with pytest.raises(TaskError, match="is not installed") as caught:
        load_task(str(path))
    assert caught.value.hint == how_to_install("data")


def test_a_hub_that_does_not_answer_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    monkeypatch.setattr(hub, "trouble_with_hub", lambda *_, **__: "no line today")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for _ in range(2):
        with pytest.raises(TaskError, match="the hub cannot be reached: no line today"):
            load_task("hf:nobody/has-this")
        assert not (huggingface_hub.constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)


def test_a_name_that_no_set_of_the_hub_has_is_refused() -> None:
    with pytest.raises(TaskError, match="not a data set name"):
        load_task("hf:a/b/c/d")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "?", "answer": "4"}\n{"prompt": \n', "line 2 is not JSON"),
        ('{"prompt": "?", "answer": "4"}\n\n[1]\n', "line 3 is not a JSON object"),
        ('{"prompt": "?", "answer": "4"}\n{"answer": "4"}\n', "line 2 has no column 'prompt'"),
        ('{"text": "?", "answer": "4"}\n', "line 1 has no column 'prompt'"),
        ('{"prompt": "?"}\n', "line 1 has no answer"),
        ('{"prompt": "?", "answer": ["4"]}\n', "line 1 has no answer"),
        ('{"prompt": "", "answer": "4"}\n', "line 1: invalid prompt ''"),
        ('{"prompt": 7, "answer": "4"}\n', "line 1: invalid prompt 7"),
        ('{"prompt": "?", "answer": "4", "n": %s}\n' % 10**30, "line 1 has a value that cannot"),
        ("[" * 3000 + "]" * 3000, "line 1 is not JSON"),
        ("", "has no rows"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=complaint):
        load_task(str(path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prompt,answer\n?,4\n?,4,5\n", "line 3 has 3 fields, but the first line has 2"),
        ('prompt,answer\n?,4\n"?"x,4\n', "line 3:"),
    ],
)
def test_a_bad_line_of_comma_separated_values_too(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TaskError, match=complaint):
        load_task(str(path))


def test_a_field_of_comma_separated_values_is_as_long_as_a_row_may_be(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f"prompt,answer\n{'x' * 200_000},4\n")
    assert len(next(iter(load_task(str(path)).examples(0))).prompt) == 200_000


def test_sizes_are_bounded(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(ROWS)
    with monkeypatch.context() as limits:
        limits.setattr(data, "MAX_ROWS", 59)
        with pytest.raises(TaskError, match="more than 59 rows"):
            load_task(path)
    with monkeypatch.context() as limits:
        limits.setattr(tables, "MAX_ROW_BYTES", 40)
        with pytest.raises(TaskError, match="line 1 is longer than 40 bytes"):
            load_task(path)
    with monkeypatch.context() as limits:
        limits.setattr(tables, "MAX_DATA_BYTES", 100)
        with pytest.raises(TaskError, match="is larger than"):
            load_task(path)
    with monkeypatch.context() as limits:
        limits.setattr(data, "MAX_KEPT_BYTES", 100)
        with pytest.raises(TaskError, match="takes more than"):
            load_task(path)


def test_a_column_may_have_a_plus_in_its_name(write: Write) -> None:
    path = write([{"C++": "?", "answer": "4"}])
    assert next(iter(load_task(f"{path}?prompt=C++").examples(0))).prompt == "?"


def test_columns_are_found_by_their_usual_names_or_by_the_settings(write: Write) -> None:
    path = write([{"query": "?", "text": "what?", "label": 3, "gold": "4"}])
    example = next(iter(load_task(path).examples(0)))
    assert (example.prompt, example.columns["answer"]) == ("?", "3")
    example = next(iter(load_task(f"{path}?prompt=text&answer=gold").examples(0)))
    assert (example.prompt, example.columns["answer"]) == ("what?", "4")
    with pytest.raises(TaskError, match="no column 'gole'") as caught:
        load_task(f"{path}?answer=gole")
    assert caught.value.hint == "did you mean gold?"


def test_with_a_reward_of_its_own_columns_reach_it_as_they_are(write: Write, tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    source = "def same(completions, answer, question, level):\n    return [float(a == 2) for a in answer]\n"
    reward.write_text(source)
    task = load_task(f"{write([{'question': '1 + 1 =', 'answer': 2, 'level': 1}])}?reward={reward}:same")
    assert task.score(next(iter(task.examples(0))), ["?"]) == [{"same": 1.0}]


def test_a_conversation_that_ends_with_its_answer_is_a_question(write: Write) -> None:
    rows = [{"messages": [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]}]
    example = next(iter(load_task(write(rows)).examples(0)))
    assert (example.prompt, example.columns) == ("1 + 1 =", {"answer": "2"})
    assert example.conversational


def test_a_system_message_may_come_before_every_question(write: Write) -> None:
    path = write(ROWS)
    task = load_task(f"{path}?system=Answer%20with%20a%20number.")
    example = next(iter(task.examples(0)))
    assert [message["role"] for message in example.messages] == ["system", "user"]
    assert example.messages[0]["content"] == "Answer with a number."
    assert task.version != load_task(path).version
    talk = [{"prompt": [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}], "answer": "4"}]
    with pytest.raises(TaskError, match="line 1 already has a system message"):
        load_task(f"{write(talk)}?system=No")


def test_the_final_answer_of_gsm8k_is_found_by_our_rewards(write: Write) -> None:
    rows = [{"question": "1 + 1?", "answer": "One and one is <<1+1=2>>2.\n#### 2"}]
    task = load_task(f"{write(rows)}?reward=numeric_match&reward=boxed_match")
    scores = task.score(next(iter(task.examples(0))), ["it is 2", r"\boxed{2}", "3"])
    assert scores == [
        {"numeric_match": 1.0, "boxed_match": 0.0},
        {"numeric_match": 1.0, "boxed_match": 1.0},
        {"numeric_match": 0.0, "boxed_match": 0.0},
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("reward=nothing", "no reward 'nothing'"),
        ("reward=numeric_match&reward=numeric_match", "two rewards are named numeric_match"),
        ("rewards=x", "unknown option 'rewards'"),
    ],
)
def test_wrong_options_are_refused(write: Write, options: str, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        load_task(f"{write(ROWS)}?{options}")


def test_a_file_that_is_not_there_is_one_clear_sentence() -> None:
    with pytest.raises(TaskError, match=r"no data set at nowhere/sums\.jsonl"):
        load_task("nowhere/sums.jsonl")


def test_a_node_reads_it_in_a_process_of_its_own(write: Write) -> None:
    path = write(ROWS)
    task, here = isolate(f"{path}?private=true", timeout_s=30.0), load_task(path)
    assert isinstance(task, IsolatedTask)
    with task:
        assert (task.name, task.version, task.spec) == ("sums", here.version, f"{path}?private=true")
        assert list(task.examples(3)) == list(here.examples(3))
        assert is_exchangeable(here)
        assert not is_exchangeable(task)


def test_a_row_without_the_answer_that_the_others_have_is_told_and_not_guessed_at() -> None:
    with pytest.raises(TaskError, match="row 2 has no column 'solution'") as caught:
        as_task([{"question": "1+1=", "solution": "2"}, {"question": "2+2="}])
    assert "question" not in caught.value.hint and "every row" in caught.value.hint
