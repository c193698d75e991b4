"""Another version on the same home: identity and checkpoints go on, or a sentence says why not.

home_of_november_23/ was written by commit 4c79c1d in two rounds of `rev` with SETTINGS.
"""

import json
import shutil
from pathlib import Path

import pytest

import swarmnode as sn
from swarmnode.errors import CheckpointError
from swarmnode.machine.storage import resolve_paths
from swarmnode.training.records import FORMAT, STATE

HOME = Path(__file__).parent / "home_of_november_23"
PEER = "12D3KooWMvdWrmukSu2pkybDXDzMdE6Cx5cWUqhJMLvLFQd4MrgW"
SETTINGS = {
    "exchange.enabled": False,
    "rollout.groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 8,
    "rollout.overlap": "off",
    "node.eval_every": 0,
    "tasks.eval_examples": 2,
    "policy.lora_rank": 1,
    "policy.lora_targets": "q_proj",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    copied = shutil.copytree(HOME, tmp_path / "home")
    resolve_paths(copied).identity.chmod(0o600)
    return copied


def files(home: Path) -> dict[str, bytes]:
    """The checkpoints and the key."""
    paths = resolve_paths(home)
    kept = [path for path in (*paths.checkpoints.rglob("*"), paths.identity) if path.is_file()]
    return {path.relative_to(home).as_posix(): path.read_bytes() for path in kept}


def test_a_home_of_an_older_version_goes_on_with_its_identity_and_its_checkpoint(
    home: Path, quick_model: Path
) -> None:
    before = files(home)
    done = sn.run("rev", rounds=3, model=quick_model, home=home, settings=SETTINGS)
    assert (done.peer, done.rounds) == (PEER, 3)
    assert "resumed after round 2" in (resolve_paths(home).logs / "node.log").read_text()
    assert before.items() <= files(home).items(), "what was there is as it was"


def test_a_checkpoint_of_a_later_version_is_refused_in_a_sentence_and_kept(
    home: Path, quick_model: Path
) -> None:
    for file in home.rglob(STATE):
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": FORMAT + 1}))
    before = files(home)
    with pytest.raises(CheckpointError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
        sn.run("rev", rounds=3, model=quick_model, home=home, settings=SETTINGS)
    assert files(home) == before
