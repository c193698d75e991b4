"""A member reads what its stage holds, and no more."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.pipeline_local import load_stage
from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.stages.loading import INDEX_FILE, SINGLE_FILE, WeightFolder
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from tests.unit.extensions.pipeline.tiny_models import LAYERS, SETTINGS, saved, tiny_config, tiny_model

PACKS = try_cut(tiny_config())
FULL = StageSettings(trainable="full")
MIDDLE = StagePart(2, 4)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(tied=False)


@pytest.fixture(scope="module", params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = "5GB" if request.param == "one file" else "30KB"
    return saved(model, tmp_path_factory.mktemp("model"), shard_size=size)


class Allocated(TorchDispatchMode):
    """Counts the bytes of every tensor that torch allocates memory for."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}

    @property
    def size_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                # Held on to, so that no address comes twice.
                self._storages[storage.data_ptr()] = storage
        return found


def size_of(parameters: dict[str, Any]) -> int:
    return sum(p.nbytes for p in parameters.values())


@pytest.mark.parametrize("part", [StagePart(0, 2, has_ends=True), MIDDLE, StagePart(4, LAYERS)])
def test_a_stage_has_the_weights_of_the_model(model: Any, folder: Path, part: StagePart) -> None:
    whole = dict(model.named_parameters())
    found = load_stage(folder, part, FULL, packs=PACKS).trainable()
    assert all(torch.equal(parameter, whole[name]) for name, parameter in found.items())
    assert len(found) == 11 * (part.end_layer - part.first_layer) + 3 * part.has_ends


class ReadFolder(WeightFolder):
    """Knows the bytes of the tensors that were read from it."""

    read_bytes = 0

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        found = super().read(names)
        ReadFolder.read_bytes = size_of(found)
        return found


def test_only_the_stages_own_tensors_are_read(model: Any, folder: Path) -> None:
    stage = load_stage(folder, MIDDLE, FULL, packs=PACKS, weights=ReadFolder.open(folder))
    assert ReadFolder.read_bytes == size_of(stage.trainable())
    assert ReadFolder.read_bytes < 0.4 * size_of(dict(model.named_parameters()))


def test_no_more_memory_is_taken_than_the_stage_needs(model: Any, folder: Path) -> None:
    with Allocated() as allocated:
        stage = load_stage(folder, MIDDLE, FULL, packs=PACKS)
    own = size_of(stage.trainable())
    # Each tensor as it is mapped and its copy; beside them the rotary angles.
    assert own < allocated.size_bytes < 2 * own + 1024 < size_of(dict(model.named_parameters()))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_no_file_stays_mapped_behind_a_stage(folder: Path) -> None:
    stage = load_stage(folder, MIDDLE, FULL, packs=PACKS)
    assert stage.trainable()
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_a_tied_head_is_read_once_and_stays_tied(tmp_path: Path) -> None:
    weights = ReadFolder.open(saved(tiny_model(tied=True), tmp_path))
    stage = load_stage(tmp_path, StagePart(0, 1, has_ends=True), FULL, packs=PACKS, weights=weights)
    assert stage.head.weight is stage.trainable()["model.embed_tokens.weight"]
    assert "lm_head.weight" not in stage.trainable()
    assert ReadFolder.read_bytes == size_of(stage.trainable())


def test_weights_are_converted_to_the_type_that_the_stage_computes_in(folder: Path) -> None:
    settings = StageSettings(trainable="full", dtype=torch.bfloat16)
    found = load_stage(folder, MIDDLE, settings, packs=PACKS).trainable()
    assert {p.dtype for p in found.values()} == {torch.bfloat16}


def test_a_family_that_cannot_be_cut_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 60_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    saved_weights = WeightFolder(tmp_path, {})
    with pytest.raises(ModelError, match="gpt2 model cannot be cut"):
        load_stage(tmp_path, MIDDLE, SETTINGS, weights=saved_weights)


def test_a_folder_without_a_model_is_no_folder_to_load_from(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load"):
        load_stage(tmp_path, MIDDLE, SETTINGS)
    with pytest.raises(ModelError, match="cannot be read"):
        WeightFolder.open(tmp_path)


def test_damaged_files_are_told_by_their_names(model: Any, tmp_path: Path) -> None:
    saved(model, tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=SINGLE_FILE):
        load_stage(tmp_path, MIDDLE, SETTINGS, packs=PACKS)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load"):
        load_stage(tmp_path, MIDDLE, SETTINGS, packs=PACKS)


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../a.safetensors"}}']
)
def test_an_index_names_files_beside_it_and_nothing_else(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ModelError, match=INDEX_FILE):
        WeightFolder.open(tmp_path)


def test_a_tensor_that_is_missing_is_named(folder: Path) -> None:
    weights = WeightFolder.open(folder)
    with pytest.raises(ModelError, match=r"holds no model\.layers\.9"):
        weights.read(["model.layers.9.mlp.up_proj.weight"])
    wrong = WeightFolder(folder, {"model.layers.9": next(iter(weights.file_of.values()))})
    with pytest.raises(ModelError, match="its index is wrong"):
        wrong.read(["model.layers.9"])


def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3, dtype=torch.uint8)}, str(tmp_path / SINGLE_FILE))
    with pytest.raises(ModelError, match="quantized"):
        WeightFolder.open(tmp_path).read(["a"])
