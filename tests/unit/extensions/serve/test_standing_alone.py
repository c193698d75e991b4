"""How a checkpoint answers where no node runs."""

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from swarmnode.cli.settings import of_policy
from swarmnode.errors import CheckpointError, EngineError
from swarmnode.extensions.serve.answering_socket import NOTE, SocketNote
from swarmnode.extensions.serve.standing_alone import answering
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.showing.node_status import PipelineStatus
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


def test_a_member_of_a_pipeline_loads_no_whole_model_beside_its_stage_unless_a_run_is_named(
    tmp_path: Path,
) -> None:
    settings = load_settings(home=tmp_path, assignments=["policy.model=attic"])
    in_pipeline = replace(STATUS, model="attic", pipeline=PipelineStatus(name="upstairs"))
    with shown_page(lambda: in_pipeline) as page:
        write_running(settings.paths.running, RunningNode(os.getpid(), "me", "127.0.0.1", page.port))
        for base, best in (False, False), (True, False), (False, True):
            with (
                pytest.raises(EngineError, match="member of pipeline upstairs runs here") as refused,
                answering(settings, base=base, best=best, model=None, run=None),
            ):
                pass
            assert "--run NAME" in refused.value.hint
        with (
            pytest.raises(CheckpointError, match="no checkpoint of attic"),
            answering(settings, base=False, best=False, model=None, run="mine"),
        ):
            pass


def test_each_policy_of_a_running_node_is_asked_at_the_node_by_its_name(tmp_path: Path) -> None:
    first = load_settings(home=tmp_path, assignments=["policy.model=attic"])
    note = first.paths.state / NOTE
    note.parent.mkdir(parents=True)
    note.write_bytes(msgspec.json.encode(SocketNote(os.getpid(), str(tmp_path))))
    first.paths.policy(1).state.mkdir(parents=True)
    second = of_policy(first, 1)

    def asked(policy: int) -> tuple[str, str, str | None]:
        settings = second if policy else first
        with answering(settings, base=False, best=False, model=None, run=None, policy=policy) as found:
            return found.about, found.policy, found.find()

    assert asked(0) == ("the running node", "policy", str(tmp_path))
    with pytest.raises(CheckpointError, match="no checkpoint of attic"):
        asked(1)  # of an earlier run: now one policy trains
    write_running(second.paths.running, RunningNode(os.getpid(), "me", "127.0.0.1", 0))
    assert asked(1) == ("policy-1 of the running node", "policy-1", str(tmp_path))
