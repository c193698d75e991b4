"""Before and after on standard suites: who is asked what, what counts, and what the table says."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import CheckpointError, ConfigError, TaskError
from swarmnode.extensions.suites.formats import Prompting
from swarmnode.extensions.suites.suite import load_suites
from swarmnode.extensions.suites.suite_evaluation import evaluate_suites, holds, measure
from swarmnode.extensions.suites.suite_report import SuiteEvaluation, SuiteResult, SuiteScore
from swarmnode.machine.storage import resolve_paths
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.testing.fake_engine import FakeEngine
from tests.suite_samples import GSM8K, IFEVAL, MATH, json_lines
from tests.unit.node.commands.test_offline import at, trained_on
from tests.unit.training.test_evaluation import END, Letters


@pytest.fixture
def config() -> Config:
    return load_config(environ={}, assignments=["rollout.max_tokens=4", "rollout.engine='embedded'"]).config


def measured(files: list[Path], answers: list[str], *, max_tokens: int = 40) -> dict[str, SuiteScore]:
    """Every question is answered in turn by `answers`."""
    asked: dict[tuple[int, ...], int] = {}

    def answer(request: Request) -> list[int]:
        place = asked.get(request.prompt_ids, 0)
        asked[request.prompt_ids] = place + 1
        return [*map(ord, answers[place % len(answers)]), END]

    suites = load_suites(files)
    questions = {name: suite.questions(Prompting(chat=True)) for name, suite in suites.items()}
    renderer = Letters()
    sampling = SamplingParams(max_tokens)
    return measure(FakeEngine(answer), renderer, suites, questions, sampling, samples=len(answers))  # type: ignore[arg-type]


def test_accuracy_is_the_share_of_right_answers_with_its_standard_error(tmp_path: Path) -> None:
    score = measured([json_lines(tmp_path / "gsm8k.jsonl", GSM8K)], ["#### 42"])["gsm8k"]
    assert score.pass_at == {1: 0.5}
    assert score.standard_error == {1: pytest.approx(0.5)}
    assert (score.answered, score.judged, score.cut_share) == (2, 2, 0.0)


def test_pass_at_k_is_estimated_from_all_answers(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "gsm8k.jsonl", GSM8K[:1])
    score = measured([file], ["#### 42", "#### 1", "#### 2", "#### 3"])["gsm8k"]
    assert score.pass_at == {1: 0.25, 2: 0.5, 4: 1.0}
    assert score.standard_error == {1: None, 2: None, 4: None}, "one question says nothing of its spread"


def test_several_suites_are_asked_at_once_and_scored_apart(tmp_path: Path) -> None:
    files = [json_lines(tmp_path / "gsm8k.jsonl", GSM8K), json_lines(tmp_path / "math.jsonl", MATH)]
    scores = measured(files, ["\\boxed{(1,2)}"])
    assert {name: score.pass_at[1] for name, score in scores.items()} == {"gsm8k": 0.0, "math": 0.5}


def test_answers_that_ran_out_of_tokens_are_counted(tmp_path: Path) -> None:
    score = measured([json_lines(tmp_path / "gsm8k.jsonl", GSM8K)], ["#### 42"], max_tokens=3)["gsm8k"]
    assert (score.cut_share, score.pass_at[1]) == (1.0, 0.0)


def test_base_model_and_checkpoint_stand_side_by_side(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    model, home = str(quick_model), tmp_path / "home"
    file = json_lines(tmp_path / "gsm8k.jsonl", GSM8K)
    trained_on(config, model, home, "rev", f"{file}?answer=answer")
    found = evaluate_suites(at(config, model, resolve_paths(home)), [file], shots=0)
    assert (found.policy, found.sampling) == ("checkpoint of round 1", "greedy")
    (suite,) = found.suites
    assert suite.before == suite.after, "nothing was learned"
    assert (suite.asked, suite.rows, suite.prompting) == (2, 2, "zero-shot")
    assert suite.trained_on
    assert any("trained on this file" in line for line in found.lines())


def test_without_a_checkpoint_only_the_base_model_can_be_measured(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    file = json_lines(tmp_path / "gsm8k.jsonl", GSM8K)
    paths = resolve_paths(tmp_path / "home")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        evaluate_suites(at(config, str(quick_model), paths), [file])
    found = evaluate_suites(
        at(config, str(quick_model), paths), [file], base=True, limit=1, samples=2, shots=0
    )
    assert found.policy is None
    assert (found.suites[0].after, found.suites[0].asked) == (None, 1)
    assert any("the first 1 of 2 questions" in line for line in found.lines())


def test_a_suite_that_cannot_be_read_is_refused_before_a_model_is_loaded(
    config: Config, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="no suite"):
        evaluate_suites(at(config, "no-model", resolve_paths(tmp_path)), [tmp_path / "none.jsonl"])
    with pytest.raises(ConfigError, match="greedy decoding gives"):
        evaluate_suites(at(config, "no-model", resolve_paths(tmp_path)), [], greedy=True, samples=2)


def test_a_question_that_is_too_long_is_told_and_not_counted(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    long = {"question": "Why? " * 4000, "answer": "#### 1"}
    file = json_lines(tmp_path / "gsm8k.jsonl", [*GSM8K, long])
    found = evaluate_suites(at(config, str(quick_model), resolve_paths(tmp_path)), [file], base=True, shots=0)
    assert (found.suites[0].asked, found.suites[0].before.answered) == (3, 2)
    assert "gsm8k, before: 1 question too long to ask" in list(found.lines())


def score(value: float) -> SuiteScore:
    return SuiteScore({1: value, 2: None}, {1: 0.05, 2: None}, answered=99, judged=90, cut_share=0.125)


def test_the_table_has_a_line_for_each_k_and_says_what_was_not_measured() -> None:
    suite = SuiteResult(
        "ifeval", "ab", "ifeval", "zero-shot, chat", 120, 100, {"language:response_language": 20},
        trained_on=False, before=score(0.25), after=score(0.5),
    )  # fmt: skip
    result = SuiteEvaluation("tiny", "checkpoint of round 3", "sampled at temperature 1", 2, 512, (suite,))
    text = "\n".join(result.lines())
    assert "before: base model; after: checkpoint of round 3" in text
    (line,) = [line for line in text.splitlines() if "pass@1" in line]
    assert line.split() == [
        "ifeval", "ifeval", "zero-shot,", "chat", "100", "pass@1",
        "0.250", "+-", "0.050", "0.500", "+-", "0.050", "+0.250",
    ]  # fmt: skip
    assert "ifeval: 20 questions unknown and not counted: language:response_language (20)" in text
    assert "ifeval, after: no answer to 9 questions could be judged" in text
    assert "ifeval, after: 12.5% of answers reached rollout.max_tokens" in text


def test_only_a_file_of_the_suite_itself_counts_as_trained_on(tmp_path: Path) -> None:
    assert holds(tmp_path, str(tmp_path / "train.jsonl"))
    assert holds(tmp_path / "a.jsonl", f"{tmp_path / 'a.jsonl'}?reward=numeric_match")
    assert not holds(tmp_path / "a.jsonl", str(tmp_path / "b.jsonl"))
    assert not holds(Path.cwd(), "rev")


def run(*arguments: str) -> str:
    return CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False).stdout


def test_the_command_prints_a_table_or_json(quick_model: Path, tmp_path: Path) -> None:
    file = str(json_lines(tmp_path / "ifeval.jsonl", IFEVAL))
    where = ("--model", str(quick_model), "--home", str(tmp_path), "--set", "rollout.max_tokens=4", "--base")
    found = json.loads(run("--suite", file, *where, "--json"))
    assert (found["suites"][0]["asked"], found["suites"][0]["unknown"]) == (
        1,
        {"language:response_language": 1},
    )
    assert "pass@1" in run("--suite", file, *where)


def test_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be combined"):
        run("--suite", "a.jsonl", "--task", "rev")
    with pytest.raises(ConfigError, match="apply only to suites"):
        run("--limit", "3")


def test_a_suite_that_does_not_fit_says_the_way_out_in_a_line_and_fails(
    quick_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(quick_model, tmp_path / "small")
    stated = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**stated, "max_position_embeddings": 32}))
    file = json_lines(tmp_path / "gsm8k.jsonl", GSM8K)
    asked = ["eval", "--suite", str(file), "--base", "--model", str(model), "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(app, [*asked, "--shots", "2", "--set", "rollout.max_tokens=8"])
    assert done.exit_code == 1
    assert (
        "gsm8k, before: 2 questions too long to ask; --shots 0 leaves out the worked examples" in done.stdout
    )
    assert [one.message for one in caplog.records if "skipping" in one.message] == []
