"""Environments on the workbench: an episode is rehearsed, and answered alike each time."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.chat import Turn, prompt_of
from swarmnode.extensions.environments.environment_task import OWN_REWARD
from swarmnode.extensions.workbench.check import check_task
from swarmnode.extensions.workbench.rehearsal import Rehearsal, difference_of, rehearse
from swarmnode.extensions.workbench.task_description import description_of
from swarmnode.extensions.workbench.template import write_template
from swarmnode.tasks.loader import load_task
from swarmnode.testing import FakeTask
from swarmnode.types import Example, ExampleKey


def test_a_new_environment_passes_the_check(tmp_path: Path) -> None:
    write_template(tmp_path / "guessing.py", environment=True)
    report = check_task(str(tmp_path / "guessing.py"))
    assert report.ok, report.findings
    assert report.episode is not None
    assert not report.episode.difference
    assert [message["role"] for turn in report.episode.turns for message in turn.observed] == ["tool"]
    portrait = description_of(load_task(str(tmp_path / "guessing.py")), count=1)
    assert (portrait.most_turns, portrait.tools, portrait.rewards) == (6, ("guess",), (OWN_REWARD,))


LOT = """
import random

class Dice:
    most_turns = 3
    exchangeable = {exchangeable}

    def reset(self, **columns):
        pass

    def step(self, said):
        return str(random.random()), 1.0, False, {{}}

def examples(seed):
    for number in range(500):
        yield f"Throw {{number + seed % 1000}}."

environment = Dice
"""


@pytest.mark.parametrize("exchangeable", [True, False])
def test_an_environment_that_answers_by_lot_must_stay_at_home(tmp_path: Path, exchangeable: bool) -> None:
    (tmp_path / "dice.py").write_text(LOT.format(exchangeable=exchangeable))
    report = check_task(str(tmp_path / "dice.py"))
    assert report.episode is not None
    assert report.episode.difference
    errors = [finding.what for finding in report.findings if finding.level == "error"]
    told = f"the environment answers the same words differently the second time: {report.episode.difference}"
    assert errors == ([told] if exchangeable else [])
    assert re.fullmatch(r"turn \d, .*: '.+', then '.+'", report.episode.difference)


def test_answers_that_differ_are_shown_from_there_on() -> None:
    def heard(text: str) -> Rehearsal:
        call = '<tool_call>{"name": "now"}</tool_call>'
        return Rehearsal((Turn(call, ({"role": "tool", "content": text},)),), {"won": 1.0})

    assert difference_of(heard("7"), heard("7")) == ""
    told = difference_of(heard("a" * 900 + "b"), heard("a" * 900 + "c" * 900))
    assert told.startswith(
        "turn 1, '{\"name\": \"now\"}': '...aaaaaaaaaaaaaaaaaaaab', then '...aaaaaaaaaaaaaaaaaaaac"
    )
    assert len(told) < 200
    lost = replace(heard("7"), scores={"won": 0.0})
    assert difference_of(heard("7"), lost) == "the rewards: {'won': 1.0}, then {'won': 0.0}"


def test_a_tool_may_require_what_its_schema_does_not_describe() -> None:
    tool = {
        "type": "function",
        "function": {"name": "go", "parameters": {"type": "object", "required": ["to"]}},
    }
    example = Example(
        ExampleKey("maze", "1", 0, 0), prompt_of([{"role": "user", "content": "?"}], [tool]), {}
    )
    task = Answering()
    assert (
        rehearse(task, example).turns[0].said
        == '<tool_call>{"name": "go", "arguments": {"to": "a"}}</tool_call>'
    )


class Answering(FakeTask):
    """An environment that says the same to everything."""

    most_turns, exchangeable = 2, True

    def score(self, example, completions):
        return [{"right": 1.0} for _ in completions]

    def observe(self, example, turns):
        return ({"role": "tool", "content": "there"},)
