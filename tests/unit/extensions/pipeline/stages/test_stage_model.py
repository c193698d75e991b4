"""A causal LM cut into stages is the causal LM."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, GPT2Config, GraniteConfig, Qwen2Config

from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.stages.stage_model import (
    PEFT_PREFIX,
    StageModel,
    StagePart,
    StageSettings,
    adapter_start,
    build_stage,
)
from swarmnode.extensions.pipeline.stages.trial_cut import CAN_BE_CUT, try_cut
from swarmnode.model.attention import packed_layout
from tests.unit.extensions.pipeline.tiny_models import (
    ADAPTER,
    CONFIGS,
    CPU,
    LAYERS,
    SETTINGS,
    nudge,
    single_machine,
    tiny_config,
    tiny_model,
)

FULL = StageSettings(trainable="full")
PACKS = try_cut(tiny_config())
IDS_1T = torch.arange(2, 14)[None]


def reader(model: Any) -> Callable[[Sequence[str]], dict[str, Tensor]]:
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    return lambda names: {name: state[name] for name in names}


def stages_of(model: Any, ends: Sequence[int], settings: StageSettings = FULL) -> list[StageModel]:
    return [
        build_stage(model.config, StagePart(first, end, has_ends=first == 0), reader(model), settings, PACKS)
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def logits(stages: Sequence[StageModel], ids_BT: Tensor, layout: Any = None) -> Tensor:
    hidden_BTD = stages[0].embed(ids_BT)
    for stage in stages:
        hidden_BTD = stage.forward(hidden_BTD, layout)
    return stages[0].head(stages[0].final_norm(hidden_BTD))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_stages_one_after_the_other_give_the_logits_of_the_whole(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    with torch.no_grad():
        found = logits(stages_of(model, [1, 4, LAYERS]), IDS_1T)
        torch.testing.assert_close(found, model(IDS_1T).logits, rtol=0, atol=1e-5)


def test_windows_stay_with_the_layers_that_have_them() -> None:
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
        use_sliding_window=True, sliding_window=3, max_window_layers=3,
    )  # fmt: skip
    assert config.layer_types is not None
    assert config.layer_types[2] != config.layer_types[3]
    assert try_cut(config) is True
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(IDS_1T).logits
        torch.testing.assert_close(
            logits(stages_of(model, [2, 4, LAYERS]), IDS_1T), expected, rtol=0, atol=1e-5
        )


def test_packed_sequences_do_not_see_each_other_in_any_stage() -> None:
    model = tiny_model()
    lengths = (5, 7)
    layout = packed_layout(lengths, CPU)
    with torch.no_grad():
        packed = logits(stages_of(model, [2, LAYERS]), IDS_1T, layout)[0]
        alone = [model(row[None]).logits[0] for row in IDS_1T[0].split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_the_families_we_name_can_be_cut_and_packed(family: str) -> None:
    assert try_cut(tiny_config(family)) is True


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=40, n_layer=2, n_embd=32, n_head=2, bos_token_id=1, eos_token_id=1),
        # Scales its embedding inside the decoder: every stage would do it again.
        GraniteConfig(vocab_size=40, hidden_size=32, num_attention_heads=2, embedding_multiplier=3.0),
        # Caps its scores, which no attention of a stage does.
        Gemma2Config(vocab_size=40, hidden_size=32, num_attention_heads=2, final_logit_softcapping=None),
    ],
    ids=["gpt2", "granite", "gemma2"],
)
def test_other_models_are_refused_with_what_was_found(config: Any) -> None:
    with pytest.raises(ModelError, match=rf"a {config.model_type} model cannot be cut into stages: .+"):
        try_cut(config)


def test_a_model_that_caps_its_scores_is_refused_with_that_reason_and_the_families_that_can_be_cut() -> None:
    with pytest.raises(ModelError, match="it caps the scores of attention") as refused:
        try_cut(Gemma2Config(vocab_size=40, hidden_size=32, num_attention_heads=2))
    assert refused.value.hint == f"{CAN_BE_CUT} can"


def test_trying_leaves_the_configuration_and_the_random_state_alone() -> None:
    config = tiny_config()
    before = config.to_dict(), torch.random.get_rng_state()
    try_cut(config)
    assert config.to_dict() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_a_stage_holds_its_own_layers_by_their_numbers_in_the_whole_model() -> None:
    middle = stages_of(tiny_model(), [1, 3, LAYERS])[1]
    names = set(middle.trainable())
    assert {name.split(".")[2] for name in names} == {"1", "2"}
    assert "model.layers.1.self_attn.q_proj.weight" in names
    data = stages_of(tiny_model(tied=False), [1, LAYERS])[0]
    assert {n for n in data.trainable() if ".layers." not in n} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    }  # fmt: skip


def test_adapters_of_all_stages_are_those_of_peft_on_the_whole_model() -> None:
    model = tiny_model()
    policy = single_machine(model)
    stages = stages_of(model, [2, LAYERS], SETTINGS)
    together = {name: p for stage in stages for name, p in stage.trainable().items()}
    assert {n: p.shape for n, p in together.items()} == {n: p.shape for n, p in policy.trainable().items()}
    nudge(together)
    with torch.no_grad():
        torch.testing.assert_close(logits(stages, IDS_1T), policy.model(IDS_1T).logits, rtol=0, atol=1e-5)


def test_an_adapter_starts_the_same_under_every_partition() -> None:
    model = tiny_model()
    starts = [
        {
            name: p.detach()
            for stage in stages_of(model, ends, SETTINGS)
            for name, p in stage.trainable().items()
        }
        for ends in ([LAYERS], [1, 2, LAYERS])
    ]
    assert starts[0].keys() == starts[1].keys()
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])
    first, second = (starts[0][f"{PEFT_PREFIX}model.layers.{n}.mlp.up_proj.lora_A.weight"] for n in (0, 1))
    assert not torch.equal(first, second)
    other = stages_of(model, [LAYERS], StageSettings(adapter=ADAPTER, seed=1))[0].trainable()
    assert not torch.equal(first, other[f"{PEFT_PREFIX}model.layers.0.mlp.up_proj.lora_A.weight"])


def test_an_adapter_starts_as_wide_as_pefts() -> None:
    start_RK = adapter_start(0, "model.layers.0.mlp.up_proj", (8, 64))
    assert start_RK.abs().max() <= 1 / 8
    assert start_RK.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)


@pytest.mark.parametrize("first, end", [(3, 2), (-1, 2), (0, LAYERS + 1)])
def test_a_stage_cannot_hold_layers_that_are_not_there(first: int, end: int) -> None:
    model = tiny_model()
    with pytest.raises(ModelError, match="layers"):
        build_stage(model.config, StagePart(first, end), reader(model), SETTINGS, PACKS)


def test_only_the_data_stage_has_ends() -> None:
    middle = stages_of(tiny_model(), [2, LAYERS])[1]
    with pytest.raises(ModelError, match="embedding"):
        middle.embed(IDS_1T)
    with pytest.raises(ModelError, match="head"):
        middle.final_norm(torch.zeros(1, 32))


def test_weights_of_another_shape_are_refused() -> None:
    model = tiny_model()
    read = reader(model)

    def cropped(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: tensor[..., :-1] for name, tensor in read(names).items()}

    with pytest.raises(ModelError, match="its file has"):
        build_stage(model.config, StagePart(1, 2), cropped, SETTINGS, PACKS)


def test_a_stage_in_bfloat16_trains_its_adapter_in_float32() -> None:
    settings = StageSettings(adapter=ADAPTER, dtype=torch.bfloat16)
    stage = stages_of(tiny_model(), [2, LAYERS], settings)[1]
    hidden_BTD = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert stage.forward(hidden_BTD).dtype == torch.bfloat16
    assert {p.dtype for p in stage.trainable().values()} == {torch.float32}
