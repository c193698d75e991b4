"""`swarmnode config show` tells what `join` would use."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import SwarmnodeError
from swarmnode.machine.storage import resolve_paths
from swarmnode.training.records import STATE
from tests.unit.training.checkpoints.test_run_folders import write


def shown(home: Path) -> dict[str, dict[str, object]]:
    return json.loads(CliRunner().invoke(app, ["config", "show", "--json", "--home", str(home)]).stdout)


def test_the_model_that_was_trained_here_is_shown_as_the_one_that_join_goes_on_with(tmp_path: Path) -> None:
    assert shown(tmp_path)["policy.model"] == {"value": "auto", "origin": "default"}
    model = tmp_path / "mine"
    model.mkdir()
    write(resolve_paths(tmp_path).checkpoints, "last", 1, at=1.0)
    (state,) = tmp_path.rglob(STATE)
    state.write_bytes(state.read_bytes().replace(b"/models/model", str(model).encode()))
    found = shown(tmp_path)
    assert found["policy.model"] == {"value": str(model), "origin": "trained in this home earlier"}
    assert found["rollout.max_tokens"]["origin"] == "default", "the tiny policy's preset is not its own"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["tasks.mixes=['rev', 'sort']"], "tasks.mixes has 2 entries for 1 policy"),
        (["network.port=4001", "node.http_port=4002", "node.policies=3"], "are too close"),
        (["network.port=65535", "node.policies=2"], "policy 1 would listen on port 65536"),
        (["network.announce=['nowhere']"], "nowhere"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_as_join_does(
    tmp_path: Path, given: list[str], said: str
) -> None:
    line = ["config", "show", "--home", str(tmp_path), *(part for one in given for part in ("--set", one))]
    with pytest.raises(SwarmnodeError, match=said):
        CliRunner().invoke(app, line, catch_exceptions=False)
