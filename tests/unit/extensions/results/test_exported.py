"""Which checkpoint is taken elsewhere, and how."""

import os
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoTokenizer

from swarmnode.errors import CheckpointError
from swarmnode.extensions.pipeline.states.stage_checkpoints import whole_snapshot
from swarmnode.extensions.results.exported import export_offline, for_merging
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.local_policy import checkpoint_store, load_policy
from swarmnode.node.commands.offline import evaluate_offline
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.training.checkpoints.checkpoint import Measure, Waiting, state_of
from swarmnode.training.records import Counters
from tests.unit.node.commands.test_offline import at, save


@pytest.fixture
def config() -> Config:
    return load_config(environ={}, assignments=["rollout.max_tokens=12", "rollout.engine='embedded'"]).config


def test_the_newest_checkpoint_is_exported_or_the_best(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    model, paths = str(quick_model), resolve_paths(tmp_path / "home")
    save(config, model, tmp_path / "home", [0.9, 0.1])
    newest = export_offline(at(config, model, paths), tmp_path / "newest", merged=False)
    best = export_offline(at(config, model, paths), tmp_path / "best", merged=False, best=True)
    assert (newest.what, best.what) == ("the adapter (PEFT) of round 2", "the adapter (PEFT) of round 1")
    assert (tmp_path / "best" / "adapter_model.safetensors").exists()


def test_an_exported_adapter_is_loaded_from_any_folder_with_its_tokenizer(
    config: Config, quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quick_model.parent)
    save(config, quick_model.name, tmp_path / "home", [None])
    export_offline(
        at(config, quick_model.name, resolve_paths(tmp_path / "home")), tmp_path / "out", merged=False
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("a word", return_tensors="pt")
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(**tokens).logits.shape[:2] == tokens["input_ids"].shape


def test_what_was_never_trained_is_not_loaded_to_be_exported_and_what_was_is_named(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").symlink_to(quick_model)
    save(config, str(tmp_path / "mine"), tmp_path, [None])
    with pytest.raises(CheckpointError, match=r"no checkpoint of tiny .* found .* of mine") as caught:
        export_offline(at(config, "tiny", resolve_paths(tmp_path)), tmp_path / "out", merged=False)
    assert "--model" in caught.value.hint
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "a base was built for nothing"


def test_what_a_pipeline_that_trains_all_weights_left_is_neither_measured_nor_exported(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    model, paths = str(quick_model), resolve_paths(tmp_path / "home")
    local = load_policy(config, model, paths, lambda *_: None)
    state = state_of(local.base.name, local.base.fingerprint, 3, Counters(round=3), 0, Measure())
    store = checkpoint_store(config, model, paths, local.base)
    store.write(whole_snapshot({}, state, config.policy, waiting=Waiting()))
    with pytest.raises(CheckpointError, match="trains all weights"):
        evaluate_offline(at(config, model, paths))
    with pytest.raises(CheckpointError, match="trains all weights"):
        export_offline(at(config, model, paths), tmp_path / "out", merged=False)
    assert not (tmp_path / "out").exists()


def test_a_merged_model_is_written_in_float32_also_where_the_node_trained_in_bfloat16(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    model, paths = str(quick_model), resolve_paths(tmp_path / "home")
    in_half = config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": "bfloat16"})})
    save(in_half, model, tmp_path / "home", [0.5])
    assert for_merging(in_half) is in_half, "as set"
    done = export_offline(at(config, model, paths), tmp_path / "merged", merged=True)
    assert done.what.startswith("the merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}


@pytest.mark.parametrize("merged", [False, True])
def test_others_may_read_what_is_exported_where_the_umask_lets_them(
    config: Config, quick_model: Path, tmp_path: Path, merged: bool
) -> None:
    paths = resolve_paths(tmp_path / "home")
    save(config, str(quick_model), tmp_path / "home", [0.5])
    umask = os.umask(0o022)
    try:
        export_offline(at(config, str(quick_model), paths), tmp_path / "exports" / "mine", merged=merged)
    finally:
        os.umask(umask)
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "exports").rglob("*") if path.is_file()}
    assert modes == {"0o644"}
    assert (tmp_path / "exports").stat().st_mode & 0o777 == 0o755


def test_a_file_system_without_modes_takes_an_export(
    config: Config, quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refuses)
    save(config, str(quick_model), tmp_path / "home", [0.5])
    paths = resolve_paths(tmp_path / "home")
    export_offline(at(config, str(quick_model), paths), tmp_path / "mine", merged=False)
    assert (tmp_path / "mine" / "adapter_model.safetensors").exists()
