"""`swarmnode config show` tells what `join` would use."""

import json
from pathlib import Path

from typer.testing import CliRunner

from swarmnode.cli.app import app
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
