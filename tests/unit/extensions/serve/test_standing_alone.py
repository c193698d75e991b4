"""How a checkpoint answers where no node runs."""

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from swarmnode.errors import CheckpointError
from swarmnode.extensions.serve.answering_socket import NOTE, SocketNote
from swarmnode.extensions.serve.standing_alone import answering
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.settings.config_layers import load_settings
from tests.shown_page import STATUS, shown_page


def test_a_node_answers_unless_another_run_or_model_than_its_own_is_named(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path, assignments=["policy.model=attic"])
    note = settings.paths.state / NOTE
    note.parent.mkdir(parents=True)
    note.write_bytes(msgspec.json.encode(SocketNote(os.getpid(), str(tmp_path))))

    def asked(model: str | None = None, run: str | None = None) -> str:
        with answering(settings, base=False, best=False, model=model, run=run) as found:
            return found.about

    assert asked() == "the running node"
    with pytest.raises(CheckpointError, match="no checkpoint of attic"):
        asked(run="mine")
    with shown_page(lambda: replace(STATUS, model="attic", run="mine")) as page:
        write_running(settings.paths.running, RunningNode(os.getpid(), "me", "127.0.0.1", page.port))
        assert asked("attic", "mine") == asked("attic") == asked(run="mine") == "the running node"
        with pytest.raises(CheckpointError):
            asked(run="another")
    settings = dataclasses.replace(
        settings, model=str(tmp_path / "models" / "attic")
    )  # of which a page shows the name
    with shown_page(lambda: replace(STATUS, model="attic", run="mine")) as page:
        write_running(settings.paths.running, RunningNode(os.getpid(), "me", "127.0.0.1", page.port))
        assert asked(settings.model) == "the running node"
    with shown_page(lambda: STATUS) as page:
        write_running(settings.paths.running, RunningNode(os.getpid(), "me", "127.0.0.1", page.port))
        with pytest.raises(CheckpointError):
            asked("attic")
