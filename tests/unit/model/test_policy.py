"""Which layers LoRA changes, of models without weights."""

import pytest
from pydantic import ValidationError
from transformers import Qwen3MoeConfig

from swarmnode.errors import ModelError
from swarmnode.model.policy import LoraTargets, find_targets
from swarmnode.settings.config import PolicyConfig
from tests.families import outline

ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
DENSE = ("down_proj", "gate_proj", *ATTENTION[:2], "q_proj", "up_proj", "v_proj")


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", ATTENTION),
        ("mixtral", ATTENTION),
        ("olmoe", ATTENTION),
        ("gpt_oss", ATTENTION),
        ("deepseek_v2", ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_proj")),
    ],
)
def test_auto_leaves_experts_and_routers_alone(family: str, names: tuple[str, ...]) -> None:
    targets = find_targets(outline(family))
    assert targets.names == names
    assert targets.left_out[:2] == ("experts", "routers")


def test_auto_takes_a_shared_expert_but_not_the_gate_before_it() -> None:
    model = outline("qwen2_moe")
    assert find_targets(model).names == DENSE
    assert set(find_targets(model, ["all-linear"]).names) == {*DENSE, "shared_expert_gate"}


def test_what_peft_would_turn_into_experts_is_left_out_and_said() -> None:
    # DeepSeek's first layer is dense, but PEFT reads the names of its MLP as those of experts.
    assert find_targets(outline("deepseek_v2")).left_out == ("experts", "routers", "dense and shared MLPs")


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt2", ("c_attn", "c_fc", "c_proj")),
        ("phi3", ("down_proj", "gate_up_proj", "o_proj", "qkv_proj")),
        ("gemma3_text", DENSE),
        ("falcon", ("dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value")),
    ],
)
def test_every_linear_layer_of_a_dense_model_is_changed_but_the_head(
    family: str, names: tuple[str, ...]
) -> None:
    assert find_targets(outline(family)) == LoraTargets(names)


def test_names_are_taken_as_they_are_or_with_what_stands_before_them() -> None:
    model = outline("mistral")
    assert find_targets(model, ["q_proj", "v_proj"]).names == ("q_proj", "v_proj")
    assert find_targets(model, ["layers.0.mlp.up_proj"]).names == ("model.layers.0.mlp.up_proj",)


@pytest.mark.parametrize(
    ("family", "name"), [("mistral", "qproj"), ("mistral", "lm_head"), ("qwen3_moe", "gate_proj")]
)
def test_a_name_that_lora_cannot_change_is_refused_with_those_it_can(family: str, name: str) -> None:
    with pytest.raises(ModelError, match=rf"lora_targets: {family} has no linear layer {name}") as caught:
        find_targets(outline(family), [name])
    assert "q_proj" in caught.value.hint


def test_a_model_of_nothing_but_experts_is_refused_with_the_settings_name() -> None:
    model = outline("qwen3_moe")
    for layer in model.model.layers:
        del layer.self_attn
    assert isinstance(model.config, Qwen3MoeConfig)
    with pytest.raises(ModelError, match="qwen3_moe has no linear layer") as caught:
        find_targets(model)
    assert "policy.lora_targets" in caught.value.hint


@pytest.mark.parametrize("names", [(), ("auto", "q_proj"), ("all-linear", "auto"), ("",)])
def test_a_word_and_names_do_not_go_together(names: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="must be auto, all-linear, or names of layers"):
        PolicyConfig(lora_targets=names)
