"""`swarmnode pipeline plan` as a user types it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import ConfigError, StorageError
from swarmnode.extensions.pipeline.plans import report
from swarmnode.extensions.pipeline.plans.report import Study
from swarmnode.extensions.pipeline.scheduling.plan import decode_plan, digest
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

ROOT = Path(__file__).parents[4]
INSTANCES = ROOT / "benchmarks" / "instances"
PAGE = (ROOT / "docs" / "pipeline.md").read_text()
GEO8 = str(INSTANCES / "geo8_skip25.json")


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["pipeline", "plan", *words], env={"COLUMNS": "80"})


def test_it_prints_what_the_plan_is_worth() -> None:
    done = plan(str(INSTANCES / "geo20_skip33.json"), "--steps", "40")
    assert done.exit_code == 0, done.output
    for promised in ("makespan", "lower bound", "gap", "CPU s", "33.3%", "60 of 60", "violations   none"):
        assert promised in done.output
    assert "full pipeline" in done.output
    assert sum(line.startswith(tuple(f"s{i} " for i in range(6))) for line in done.output.splitlines()) == 20
    assert max(map(len, done.output.splitlines())) <= 80


def test_json_is_one_object_whose_numbers_agree_with_the_plan_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = plan(GEO8, "--steps", "40", "--seed", "3", "--json", "--out", str(out))
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    written = decode_plan(out.read_bytes())
    assert told["digest"] == digest(written)
    assert told["makespan_s"] == simulate(written).makespan_s
    assert told["violations"] == []
    assert list(told)[:3] == ["makespan_s", "bound_s", "gap"]
    assert told["seed"] == 3


def test_a_free_map_is_searched_when_asked() -> None:
    told = json.loads(plan(GEO8, "--steps", "20", "--free-map", "--json").output)
    assert [each["name"] for each in told["compared"]][-1] == "skipping, own map"
    assert told["any_map_bound_s"] > 0


def test_averaging_makes_the_iteration_longer() -> None:
    without, with_ = (
        json.loads(plan(GEO8, "--steps", "20", "--json", *more).output) for more in ((), ("--averaging",))
    )
    assert [use["averaging_s"] for use in without["stages"]] == [0] * 4
    assert all(use["averaging_s"] > 0 for use in with_["stages"])
    assert with_["makespan_s"] > without["makespan_s"]


def test_a_toml_instance_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text(
        "delays = [[0.0, 1.0], [1.0, 0.0]]\ncomp = [1.0, 1.0]\nmemory = 1\npath_len = 2\n"
        'stages = [[0], [1]]\nlocations = ["[bold]ann", "bob"]\n'
    )
    done = plan(str(file), "--steps", "5")
    assert done.exit_code == 0, done.output
    assert "makespan     9.25 s" in done.output
    assert done.output.count("[bold]ann") == 2  # table and chart


def test_the_picture_goes_to_the_file(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    picture = tmp_path / "chart.png"
    done = plan(GEO8, "--steps", "5", "--gantt", str(picture))
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert f"wrote {picture}" in done.output.replace("\n", "")
    assert "F forward" not in done.output


def test_a_plan_that_breaks_a_rule_ends_with_an_error_code(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = report.study

    def careless(*args: object, **kwargs: object) -> Study:
        result = honest(*args, **kwargs)  # type: ignore[arg-type]
        return replace(result, figures=replace(result.figures, violations=("node 7 is overbooked",)))

    monkeypatch.setattr(report, "study", careless)
    done = plan(GEO8, "--steps", "5")
    assert done.exit_code == 1
    assert "violation    node 7 is overbooked" in done.output
    assert plan(GEO8, "--steps", "5", "--json").exit_code == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "missing required field"), ('{"delays": 3}', "Expected `array`"), ("nothing", "malformed")],
)
def test_what_is_no_instance_is_refused_with_a_hint(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    error = plan(str(file)).exception
    assert isinstance(error, ConfigError)
    assert words in error.message
    assert "path_len" in error.hint


def test_mistakes_are_told_before_anything_is_searched(tmp_path: Path) -> None:
    def told(*words: str) -> BaseException | None:
        return plan(GEO8, *words).exception

    assert isinstance(told("--gantt", "chart.svg"), ConfigError)
    assert isinstance(told("--steps", "5", "--seconds", "1"), ConfigError)
    assert isinstance(told("--out", str(tmp_path / "missing" / "plan.json")), StorageError)
    assert isinstance(plan(str(tmp_path / "none.json")).exception, ConfigError)


def test_the_page_has_an_instance_that_can_be_planned_and_every_option(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    file = tmp_path / "example.toml"
    file.write_text(example[1])
    assert plan(str(file), "--steps", "5").exit_code == 0
    offered = set(re.findall(r"--[a-z-]+", plan("--help").output)) - {"--help"}
    assert offered == set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE))
