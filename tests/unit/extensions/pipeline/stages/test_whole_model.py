from pathlib import Path

import pytest
import torch

from swarmnode.errors import ModelError
from swarmnode.extensions.demonstration.tiny import build_quick_tiny
from swarmnode.extensions.pipeline.stages.whole_model import load_tokenizer, open_model
from swarmnode.model.base_model import load_base_model
from swarmnode.settings.config import PolicyConfig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_quick_tiny(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_only_looked_at_is_recognised_as_the_one_that_is_loaded(
    tiny: Path, dtype: str
) -> None:
    loaded = load_base_model(str(tiny), PolicyConfig.model_validate({"dtype": dtype}))
    seen = open_model(str(tiny), getattr(torch, dtype))
    assert seen.fingerprint == loaded.fingerprint
    assert (seen.family, seen.max_positions) == (loaded.family, loaded.max_positions)
    assert seen.card == loaded.card


def test_another_models_weights_have_another_fingerprint(tiny: Path, tmp_path: Path) -> None:
    other = load_base_model(str(tiny), PolicyConfig())
    with torch.no_grad():
        other.model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    other.model.save_pretrained(tmp_path)
    assert (
        open_model(str(tmp_path), torch.float32).fingerprint
        != open_model(str(tiny), torch.float32).fingerprint
    )


def test_the_tokenizer_comes_without_the_weights(tiny: Path) -> None:
    loaded = load_base_model(str(tiny), PolicyConfig())
    tokenizer, ends = load_tokenizer(open_model(str(tiny), torch.float32))
    assert ends == loaded.eos_token_ids
    assert tokenizer.encode("rev abc=") == loaded.tokenizer.encode("rev abc=")


def test_a_folder_without_weights_is_refused_in_words(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(ModelError, match="safetensors"):
        open_model(str(tmp_path), torch.float32)
