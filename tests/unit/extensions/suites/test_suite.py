"""Suites: told by their columns, asked as usual, judged, and closed to all training."""

import gzip
import json
from pathlib import Path

import pytest

from swarmnode.errors import SandboxError, TaskError
from swarmnode.extensions.sandbox import sandbox
from swarmnode.extensions.sandbox.isolation import UNCONFINED
from swarmnode.extensions.suites.formats import Prompting
from swarmnode.extensions.suites.shots import GSM8K_SHOTS, MATH_SHOTS
from swarmnode.extensions.suites.suite import Suite, load_suites
from swarmnode.tasks.task import draw_held_out, draw_train, redraw
from swarmnode.types import Example
from tests.suite_samples import GSM8K, HUMANEVAL, IFEVAL, MATH, json_lines

CHAT, PLAIN = Prompting(chat=True), Prompting(chat=False)


def load(*paths: Path) -> list[Suite]:
    return list(load_suites(paths).values())


def first(suite: Suite, prompting: Prompting) -> Example:
    return suite.questions(prompting).asked[0]


def rights(suite: Suite, index: int, *texts: str) -> list[float | None]:
    example = suite.questions(CHAT).asked[index]
    return [scores["right"] for scores in suite.score(example, texts)]


@pytest.fixture
def gsm8k(tmp_path: Path) -> Suite:
    return load(json_lines(tmp_path / "gsm8k_test.jsonl", GSM8K))[0]


@pytest.fixture
def math(tmp_path: Path) -> Suite:
    return load(json_lines(tmp_path / "math.jsonl", MATH))[0]


def test_a_file_is_called_after_its_name_and_told_by_its_columns(gsm8k: Suite) -> None:
    assert (gsm8k.name, gsm8k.format.name, len(gsm8k.rows)) == ("gsm8k_test", "gsm8k", 2)


def test_nothing_of_a_suite_can_be_drawn_to_train_on_or_by_a_peer(gsm8k: Suite) -> None:
    key = first(gsm8k, CHAT).key
    for draw in (draw_train, draw_held_out):
        with pytest.raises(TaskError, match="ever trained on"):
            list(draw(gsm8k, 0))
    with pytest.raises(TaskError, match="ever trained on"):
        redraw(gsm8k, key)


def test_math_comes_as_a_folder_with_a_file_a_question(tmp_path: Path) -> None:
    for number, row in enumerate(MATH):
        (tmp_path / "MATH" / "test" / "algebra").mkdir(parents=True, exist_ok=True)
        (tmp_path / "MATH" / "test" / "algebra" / f"{number}.json").write_text(json.dumps(row))
    (suite,) = load(tmp_path / "MATH")
    assert (suite.name, suite.format.name, len(suite.rows)) == ("MATH", "math", 2)


def test_a_folder_of_several_formats_is_several_suites(tmp_path: Path) -> None:
    json_lines(tmp_path / "all" / "a.jsonl", GSM8K)
    (tmp_path / "all" / "b.json").write_text(json.dumps(IFEVAL))
    (tmp_path / "all" / "README.md").write_text("# Files")
    assert [suite.name for suite in load(tmp_path / "all")] == ["all-gsm8k", "all-ifeval"]


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in GSM8K).encode()))
    (suite,) = load(path)
    assert (suite.name, len(suite.rows)) == ("test", 2)


def test_a_damaged_file_and_one_that_is_too_deep_are_told(tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"{json.dumps(row)}\n" for row in GSM8K).encode())
    (tmp_path / "test.jsonl.gz").write_bytes(packed[:30] + b"\x00\xff\x13" + packed[33:])
    with pytest.raises(TaskError, match="check that it is complete"):
        load(tmp_path / "test.jsonl.gz")
    (tmp_path / "deep.json").write_text("[" * 3000 + "]" * 3000)
    with pytest.raises(TaskError, match="not JSON"):
        load(tmp_path / "deep.json")


def test_a_parquet_file_has_the_same_digest(tmp_path: Path, gsm8k: Suite) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([dict(row) for row in GSM8K])
    parquet.write_table(table, tmp_path / "gsm8k.parquet")
    (suite,) = load(tmp_path / "gsm8k.parquet")
    assert suite.version == gsm8k.version


def test_bad_rows_are_named_with_file_and_line_and_none_is_left_out(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "bad.jsonl", [*GSM8K, {"question": "?", "answer": "42"}, {"question": "?"}])
    with path.open("a") as file:
        file.write('\n{"question"\n[1]\n')
    with pytest.raises(TaskError, match="has 4 rows that cannot be used") as caught:
        load(path)
    for line, fault in [(3, "has no ####"), (4, "has no answer"), (6, "not JSON"), (7, "not a JSON object")]:
        assert f"{path} line {line}: " in caught.value.message
        assert fault in caught.value.message


def test_columns_of_no_format_are_told_with_those_of_all(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="match no known format") as caught:
        load(json_lines(tmp_path / "odd.jsonl", [{"text": "hello"}]))
    assert "gsm8k: question, answer" in caught.value.message


def test_what_is_not_there_and_what_is_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    for path, what in [("none.jsonl", "no suite"), ("empty", "no suite"), ("empty.jsonl", "no rows")]:
        with pytest.raises(TaskError, match=what):
            load(tmp_path / path)


def test_two_suites_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [json_lines(tmp_path / folder / "test.jsonl", GSM8K) for folder in "ab"]
    with pytest.raises(TaskError, match="two suites are called test"):
        load(*paths)


def test_a_chat_model_is_asked_the_question_alone_and_any_other_with_worked_examples(
    gsm8k: Suite, math: Suite
) -> None:
    assert first(gsm8k, CHAT).prompt.startswith("What is 6 times 7?")
    assert first(gsm8k, PLAIN).prompt.count("\nAnswer:") == len(GSM8K_SHOTS) + 1
    assert first(gsm8k, PLAIN).prompt.endswith("Question: What is 6 times 7?\nAnswer:")
    assert "\\boxed{}" in first(math, CHAT).prompt
    assert first(math, PLAIN).prompt.count("Solution:") == len(MATH_SHOTS) + 1
    assert gsm8k.format.describe(CHAT) == "zero-shot, chat"
    assert gsm8k.format.describe(PLAIN) == "8-shot"


def test_the_number_of_worked_examples_may_be_chosen(gsm8k: Suite, math: Suite) -> None:
    assert first(gsm8k, Prompting(chat=False, shots=0)).prompt == "Question: What is 6 times 7?\nAnswer:"
    assert gsm8k.format.describe(Prompting(chat=True, shots=2)) == "2-shot, chat"
    assert math.format.describe(Prompting(chat=False, shots=100)) == "4-shot"


@pytest.mark.parametrize(("suite", "shots"), [("gsm8k", GSM8K_SHOTS), ("math", MATH_SHOTS)])
def test_a_worked_example_is_right_by_the_suite_s_own_judge(
    suite: str, shots: tuple[tuple[str, str], ...], request: pytest.FixtureRequest
) -> None:
    form = request.getfixturevalue(suite).format
    columns = ("question", "answer") if suite == "gsm8k" else ("problem", "solution")
    for shot in shots:
        row = dict(zip(columns, shot, strict=True))
        assert form.fault(row) is None
        assert form.judge(row, [shot[1]]) == [1.0]


def test_gsm8k_takes_the_number_behind_the_hashes_or_in_a_box(gsm8k: Suite) -> None:
    texts = ("so\n#### 1000", r"\boxed{1,000}", "1000", "#### 10", "#### 1000\n\nQuestion: ?\nAnswer: #### 3")
    assert rights(gsm8k, 1, *texts) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_math_takes_what_is_in_the_last_box(math: Suite) -> None:
    texts = (r"\boxed{1}, no, \boxed{0.5}", "0.5", "\\boxed{1/2}\n\nProblem:\n2?\n\nSolution: \\boxed{2}")
    assert rights(math, 0, *texts) == [1.0, 0.0, 1.0]
    assert rights(math, 1, r"\boxed{\left(1, 2\right)}", r"\boxed{12}") == [1.0, 0.0]


def test_a_question_with_an_unknown_instruction_is_counted_and_not_asked(tmp_path: Path) -> None:
    (suite,) = load(json_lines(tmp_path / "ifeval.jsonl", IFEVAL))
    questions = suite.questions(CHAT)
    assert [example.prompt for example in questions.asked] == ["Write two words without a comma."]
    assert questions.unknown == {"language:response_language": 1}
    assert rights(suite, 0, "two words", "one", "two, words") == [1.0, 0.0, 0.0]
    unknown = Example(questions.asked[0].key, "?", suite.rows[1])
    assert suite.score(unknown, ["kaksi sanaa"]) == [{"right": None}]


def test_a_limit_takes_the_first_rows(gsm8k: Suite) -> None:
    assert [example.key.index for example in gsm8k.questions(CHAT, limit=1).asked] == [0]


def test_programs_are_refused_where_there_is_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: UNCONFINED)
    with pytest.raises(SandboxError, match="no sandbox to run strangers' programs in"):
        load(json_lines(tmp_path / "HumanEval.jsonl", HUMANEVAL))


def test_a_program_is_run_in_the_sandbox_up_to_where_it_ends(tmp_path: Path) -> None:
    (suite,) = load(json_lines(tmp_path / "HumanEval.jsonl", HUMANEVAL))
    answered = "So:\n```python\ndef double(n):\n    return n + n\n```"
    runs_on = "    return 2 * n\n\ndef more():\n    pass\n"
    assert rights(suite, 0, runs_on, answered, "    return n\n") == [1.0, 1.0, 0.0]
    assert first(suite, PLAIN).prompt == HUMANEVAL[0]["prompt"]
    assert "```python\ndef double(n):" in first(suite, CHAT).prompt


def test_what_a_model_makes_up_behind_an_answer_is_none_of_it(gsm8k: Suite) -> None:
    assert gsm8k.ended("2\n#### 2\n\nQuestion: 3?\nQuestion: 4?") == "2\n#### 2\n"
    assert gsm8k.ended("#### 2") == "#### 2"
