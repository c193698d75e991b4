"""A run is removed whole, and no other with it."""

from pathlib import Path

import pytest

from swarmnode.errors import CheckpointError
from swarmnode.extensions.home.runs_command import remove_run
from swarmnode.machine.storage import folder_bytes
from swarmnode.training.records import STATE
from tests.unit.training.checkpoints.test_run_folders import write


def test_a_removed_run_is_gone_and_the_others_are_not(tmp_path: Path) -> None:
    write(tmp_path, "keep", 1, at=1.0)
    write(tmp_path, "go", 1, at=2.0)
    assert folder_bytes(tmp_path / "go") == (tmp_path / "go" / "round-00000001" / STATE).stat().st_size
    assert remove_run(tmp_path, "go").name == "go"
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    for wrong in ("go", "..", "", "keep/round-00000001"):
        with pytest.raises(CheckpointError, match="no run"):
            remove_run(tmp_path, wrong)
    assert (tmp_path / "keep").exists()
