"""The table of commands is shown whatever an installed package registers."""

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app


def test_a_registered_command_that_cannot_be_imported_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    about = tmp_path / "broken-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[swarmnode.command]\nbroken = no_longer_here:run\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0 and "\n  join " in shown.output and "broken" not in shown.output
    assert "'broken' cannot be imported" in caplog.text
