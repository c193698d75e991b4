"""Loading a base model: precision, 4 bits, and layers that are computed again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from swarmnode.cpu_kernels import kernels
from swarmnode.errors import ModelError
from swarmnode.extensions.native.compiler import library
from swarmnode.machine.hardware import cpu_has_bf16
from swarmnode.machine.installing import how_to_install
from swarmnode.model.adapters import nf4
from swarmnode.model.base_model import (
    LoadedModel,
    enable_checkpointing,
    load_base_model,
)
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig

IDS = torch.arange(2, 34)[None]


def test_four_bits_without_bitsandbytes_are_refused_with_a_way_out(
    quick_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    with pytest.raises(ModelError) as caught:
        load_base_model(str(quick_model), PolicyConfig(quantization="nf4", device="cpu"))
    assert caught.value.message == "policy.quantization = nf4 is unavailable: bitsandbytes is not installed"
    assert how_to_install("quant") in caught.value.hint


def test_four_bits_are_refused_where_bitsandbytes_does_not_train() -> None:
    with pytest.raises(ModelError, match="it needs a CUDA card or a CPU, not mps"):
        nf4.nf4_arguments(torch.float32, torch.device("mps"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_bits_on_a_cpu_train_and_say_that_they_are_slow(
    quick_model: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    pytest.importorskip("bitsandbytes")
    config = PolicyConfig(quantization="nf4", dtype=dtype, device="cpu", lora_rank=4)  # pyright: ignore[reportArgumentType]
    whole = load_base_model(str(quick_model), PolicyConfig(device="cpu"))
    packed = load_base_model(str(quick_model), config)
    assert "4-bit weights on a CPU" in caplog.text
    assert packed.is_quantized and packed.parameters == whole.parameters
    assert packed.card == whole.card and packed.fingerprint != whole.fingerprint
    size = {
        loaded: sum(p.numel() * p.element_size() for p in loaded.model.model.layers.parameters())
        for loaded in (whole, packed)
    }
    assert size[packed] < size[whole] / 7
    policy = Policy(packed, config, seed=0)
    gradients, _ = gradients_and_saved(policy)
    # What a rollout engine does with the same layers.
    with torch.inference_mode():
        policy.model(input_ids=IDS)
    again, _ = gradients_and_saved(policy)
    assert all(torch.equal(gradients[name], again[name]) for name in policy.trainable())


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_cpu_computes_narrow_models_in_float32_unless_asked(
    quick_model: Path, name: str, dtype: torch.dtype
) -> None:
    config = PolicyConfig(dtype=name, device="cpu")  # pyright: ignore[reportArgumentType]
    assert load_base_model(str(quick_model), config).model.dtype == dtype


def test_a_node_does_without_our_kernels_when_told_so(quick_model: Path) -> None:
    load_base_model(str(quick_model), PolicyConfig(device="cpu", cpu_kernels="off"))
    assert not kernels().fits(torch.ones(1))
    load_base_model(str(quick_model), PolicyConfig(device="cpu"))
    assert kernels().fits(torch.ones(1)) == (library() is not None)


def test_a_wide_model_is_loaded_as_the_units_of_this_cpu_suggest(quick_model: Path, tmp_path: Path) -> None:
    wide = Qwen3Config(
        vocab_size=258, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(wide).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(quick_model).save_pretrained(tmp_path)
    expected = torch.bfloat16 if cpu_has_bf16() else torch.float32
    assert load_base_model(str(tmp_path), PolicyConfig(device="cpu")).model.dtype == expected
    assert (
        load_base_model(str(tmp_path), PolicyConfig(device="cpu", dtype="float32")).model.dtype
        == torch.float32
    )


@pytest.fixture
def folder(quick_model: Path, tmp_path: Path) -> Path:
    """A copy of the quick model that a test may spoil."""
    return shutil.copytree(quick_model, tmp_path / "model")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as raised:
        load_base_model(str(folder), PolicyConfig(device="cpu"))
    return raised.value.message


def test_a_folder_without_a_tokenizer_says_so(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert refusal(folder) == f"{folder} has no tokenizer"  # Of Qwen 3 transformers builds an empty one,
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    reason = "Couldn't instantiate the backend tokenizer"
    assert refusal(folder) == f"cannot read the tokenizer of {folder}: {reason}"  # and of Llama none.


def test_a_tensor_of_another_shape_is_named_with_both(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    width = config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": width + 2}))
    said = refusal(folder)
    assert "model.layers.0.mlp.down_proj.weight has the shape" in said
    assert str(width) in said and f"{width + 2})" in said


def test_a_tensor_that_is_in_no_file_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"] + 1
    kinds = {"layer_types": ["full_attention"] * layers} if "layer_types" in config else {}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers, **kinds}))
    assert f"model.layers.{layers - 1}.input_layernorm.weight is missing from its files" in refusal(folder)


def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused_at_once(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(100)
    model.config.pad_token_id = None
    model.save_pretrained(folder)
    last = max(set(tokenizer.get_vocab().values()) - tokenizer.added_tokens_decoder.keys())
    assert f"ids up to {last}, but the model's embedding has 100 rows" in refusal(folder)


def test_an_added_token_that_no_text_uses_may_lie_beyond_the_embedding(folder: Path) -> None:
    """Gemma 3's tokenizer has one for pictures, which its text models do not embed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<picture {number}>" for number in range(500)])
    tokenizer.save_pretrained(folder)
    loaded = load_base_model(str(folder), PolicyConfig(device="cpu"))
    assert len(loaded.tokenizer) > len(loaded.model.get_input_embeddings().weight)


def test_a_model_that_does_not_fit_says_so_also_on_a_cpu(
    quick_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def too_large(*args: object, **kwargs: object) -> None:
        torch.empty(2**58)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", too_large)
    with pytest.raises(ModelError, match="does not fit into memory"):
        load_base_model(str(quick_model), PolicyConfig(device="cpu"))


def test_an_adapter_does_not_count_as_part_of_the_base(base: LoadedModel) -> None:
    parameters, card = base.parameters, base.card
    Policy(base, PolicyConfig(lora_rank=4), seed=0)
    assert (base.parameters, base.card) == (parameters, card)
    assert card is not None and card.parameters == parameters and not base.is_quantized


def gradients_and_saved(policy: Policy) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one pass, and the bytes that were kept between forward and backward."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.model.model(input_ids=IDS, use_cache=False).last_hidden_state
    size = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)
    hidden.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.trainable().items() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return gradients, size


def test_recomputed_layers_keep_less_and_give_the_same_gradients_in_eval_mode(nudged: Policy) -> None:
    modes = [module.training for module in nudged.model.modules()]
    plain, kept = gradients_and_saved(nudged)
    assert enable_checkpointing(nudged.model) == 2
    again, kept_again = gradients_and_saved(nudged)
    assert kept_again < kept / 3
    assert len(plain) == len(nudged.trainable())
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    # transformers' own switch asks for train mode, in which some families drop activations out.
    assert [module.training for module in nudged.model.modules()] == modes


def test_checkpointing_can_be_turned_on_twice(nudged: Policy) -> None:
    layers = nudged.model.model.layers
    enable_checkpointing(nudged.model)
    once = [layer.forward for layer in layers]
    enable_checkpointing(nudged.model)
    assert [layer.forward for layer in layers] == once


def test_a_model_has_one_fingerprint_in_whatever_type_it_is_loaded(quick_model: Path) -> None:
    found = [
        load_base_model(str(quick_model), PolicyConfig(device="cpu", dtype=dtype)).fingerprint
        for dtype in ("float32", "bfloat16")
    ]
    assert found[0] == found[1], "else a home that moves to another machine loses its checkpoints"
