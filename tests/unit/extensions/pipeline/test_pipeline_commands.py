"""`swarmnode pipeline plan` as a user types it."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import ConfigError, StorageError
from swarmnode.extensions.pipeline.scheduling import plan_figures
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
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
    for promised in ("makespan", "per micro-batch", "33.3%", "60 of 60", "violations   none", "Australia"):
        assert promised in done.output
    assert sum(line.endswith("3/3 ") for line in done.output.splitlines()) == 20
    assert max(map(len, done.output.splitlines())) <= 80


def test_json_is_one_object_whose_numbers_agree_with_the_plan_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = plan(GEO8, "--steps", "40", "--seed", "3", "--json", "--out", str(out))
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    written = msgspec.json.decode(out.read_bytes(), type=Plan)
    assert told["digest"] == digest(written)
    assert told["makespan_s"] == simulate(written).makespan_s
    assert told["violations"] == []
    assert list(told)[:3] == ["makespan_s", "micro_batches", "in_flight"]


def test_a_free_map_is_searched_when_asked_and_the_better_one_kept() -> None:
    given, free = (
        json.loads(plan(GEO8, "--steps", "20", "--json", *more).output) for more in ((), ("--free-map",))
    )
    assert free["makespan_s"] < given["makespan_s"]
    assert [stage["nodes"] for stage in free["stages"]] != [stage["nodes"] for stage in given["stages"]]


def test_a_toml_instance_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text(
        "delays = [[0.0, 1.0], [1.0, 0.0]]\ncomp = [1.0, 1.0]\nmemory = 1\npath_len = 2\n"
        'stages = [[0], [1]]\nlocations = ["[bold]ann", "bob"]\n'
    )
    done = plan(str(file), "--steps", "5")
    assert done.exit_code == 0, done.output
    assert "makespan     9.25 s" in done.output
    assert "[bold]ann" in done.output


def test_a_plan_that_breaks_a_rule_ends_with_an_error_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_figures, "violations", lambda _: ["node 7 is overbooked"])
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
