"""Two members of a pipeline that generate rollouts while their stages wait, as processes."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Join = Callable[..., Any]

pytestmark = pytest.mark.slow

TASK = """
def examples(seed):
    for number in range(1000):
        yield {'prompt': f'say {seed % 1000} {number}:'}


def reward(completions, **columns):
    return [float(len(text) % 2) for text in completions]
"""


def test_members_share_what_they_generate_while_they_wait(
    join: Join, quick_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "shout.py").write_text(TASK)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "lines.txt").write_text("\n".join(f"{n} and {n} is {2 * n}" for n in range(4000)))
    pipeline = (
        *("--pipeline", "idle", "--task", str(tmp_path / "shout.py")),
        *("--set", f"pipeline.idle_model={quick_model}", "--set", f"pipeline.text={tmp_path / 'texts'}"),
        *("--set", "pipeline.stages=2", "--set", "pipeline.micro_batch_tokens=2048"),
    )
    first = join(*pipeline, home="first")
    second = join(first.running().addresses[0], *pipeline, home="second")
    for member in (first, second):
        member.until(lambda member=member: member.status()["pipeline"]["idle_tokens"] > 0)
    for member in (first, second):
        member.until(lambda member=member: member.status()["exchange"]["published"] > 2)
        member.until(lambda member=member: member.status()["exchange"]["headers"] > 2)
    assert 0 < first.status()["pipeline"]["idle_share"] <= 1
    assert {first.status()["pipeline"]["stage"], second.status()["pipeline"]["stage"]} == {0, 1}
    for member in (first, second):
        member.kill(signal.SIGTERM)
    for member in (first, second):
        assert member.summary()["stopped"] == "stopped on request"
        assert "Traceback" not in member.story
        assert "no more rollouts" not in member.story


def test_an_idle_model_that_is_none_is_said_before_anybody_is_joined(join: Join) -> None:
    node = join("--pipeline", "idle", "--set", "pipeline.idle_model=./nowhere")
    assert node.wait() != 0
    assert "pipeline.idle_model = ./nowhere cannot be used" in node.story
    assert "Traceback" not in node.story
    assert not node.paths.running.exists()
