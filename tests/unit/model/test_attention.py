"""Packed rows, with and without shared prompts, against their sequences alone, on small random models."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from swarmnode.errors import ModelError
from swarmnode.model.attention import (
    PACKED_ATTENTION,
    AttentionSettings,
    by_boxes,
    by_flash,
    flash_suits,
)
from swarmnode.model.layout import PackedLayout, packed_layout
from swarmnode.model.packable import prepare_for_packing
from swarmnode.model.policy import Policy
from tests.unit.model.flash_by_hand import flash_by_hand

pytestmark = pytest.mark.usefixtures("with_and_without_kernels")

CPU = torch.device("cpu")
seeded = settings(deadline=None, derandomize=True, max_examples=40)
SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def gemma2_with_a_window_in_every_other_layer() -> Any:
    no_cap = {"attn_logit_softcapping": None, "attn_implementation": "sdpa"}
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, sliding_window=6, **no_cap))


def mistral_with_a_window() -> Any:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6))


def mamba() -> Any:
    shape = {"vocab_size": 40, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    return MambaForCausalLM(MambaConfig(**shape, initializer_range=0.2))


def with_convolutions() -> Any:
    return Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]))


FAMILIES = [qwen2, qwen3, llama, gemma2_with_a_window_in_every_other_layer, mistral_with_a_window]


def build(family: Callable[[], Any], *, dtype: torch.dtype = torch.float64) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return family().to(dtype).eval()


@pytest.fixture(params=FAMILIES, ids=lambda family: family.__name__)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = build(request.param)
    assert prepare_for_packing(model) is None
    yield model


def rows_of(lengths: list[int], seed: int = 0) -> list[Tensor]:
    draw = random.Random(seed)
    return [torch.tensor([draw.randrange(2, 40) for _ in range(length)]) for length in lengths]


def packed_logits(model: Any, rows: list[Tensor], prompts: list[int | None] | None = None) -> Tensor:
    layout = packed_layout([len(row) for row in rows], CPU, prompts)
    return model(**layout.arguments(torch.cat(rows)[None])).logits[0]


LENGTHS = [7, 1, 19, 7, 3, 12, 1, 9]
"""Tokens of the runs of a row."""
TWO_GROUPS = [None, 0, 0, None, None, 4, 3, 4]
"""7 + 1 and 7 + 19; 7 + 1; 3 + 12 and 3 + 9. A prompt may have one completion, and two may be interleaved."""
with_and_without_shared_prompts = pytest.mark.parametrize(
    "prompts", [None, TWO_GROUPS], ids=["alone", "shared"]
)


def whole_sequences(rows: list[Tensor], prompts: list[int | None] | None) -> list[Tensor]:
    """What each run continues to the end of it."""
    befores = [None] * len(rows) if prompts is None else prompts
    return [
        row if before is None else torch.cat([rows[before], row])
        for row, before in zip(rows, befores, strict=True)
    ]


def logits_alone(model: Any, rows: list[Tensor], prompts: list[int | None] | None) -> list[Tensor]:
    """Of each run's own tokens, with its whole sequence alone in the model."""
    return [
        model(input_ids=whole[None], use_cache=False).logits[0, -len(row) :]
        for row, whole in zip(rows, whole_sequences(rows, prompts), strict=True)
    ]


@with_and_without_shared_prompts
def test_packed_logits_are_those_of_every_sequence_alone(
    model: Any, prompts: list[int | None] | None
) -> None:
    rows = rows_of(LENGTHS)
    alone = torch.cat(logits_alone(model, rows, prompts))
    torch.testing.assert_close(packed_logits(model, rows, prompts), alone, atol=1e-6, rtol=1e-6)


@with_and_without_shared_prompts
def test_packed_gradients_are_those_of_the_sequences_one_by_one(
    model: Any, prompts: list[int | None] | None
) -> None:
    rows = rows_of(LENGTHS)
    weights = [torch.linspace(-1, 1, len(row) * 40).view(-1, 40) for row in rows]
    (packed_logits(model, rows, prompts).log_softmax(-1) * torch.cat(weights)).sum().backward()
    packed = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for logits, weight in zip(logits_alone(model, rows, prompts), weights, strict=True):
        (logits.log_softmax(-1) * weight).sum().backward()
    for together, parameter in zip(packed, model.parameters(), strict=True):
        # The families compute their norms in float32 whatever the model's type, so this is not 1e-15.
        assert (together - parameter.grad).abs().max() <= 1e-6 * parameter.grad.abs().max()


def test_checkpointed_layers_get_the_layout_again_when_they_are_recomputed() -> None:
    gradients: list[Tensor] = []
    for checkpointed in (False, True):
        model = build(qwen3)
        assert prepare_for_packing(model) is None
        if checkpointed:
            model.gradient_checkpointing_enable()
            model.train()
        packed_logits(model, rows_of(LENGTHS), TWO_GROUPS).square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_no_row_sees_another_not_even_in_the_last_bit() -> None:
    model = build(qwen3, dtype=torch.float32)
    assert prepare_for_packing(model) is None
    rows = rows_of(LENGTHS)
    before = packed_logits(model, rows).split(LENGTHS)
    rows[2] = (rows[2] + 5) % 40
    after = packed_logits(model, rows).split(LENGTHS)
    changed = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert changed == [index == 2 for index in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("run", "seeing"),
    [(2, {2}), (0, {0, 1, 2}), (4, {4, 5, 7})],
    ids=["completion", "prompt", "other prompt"],
)
def test_a_completion_sees_its_prompt_and_itself_and_nothing_else(run: int, seeing: set[int]) -> None:
    model = build(qwen3, dtype=torch.float32)
    assert prepare_for_packing(model) is None
    rows = rows_of(LENGTHS)
    before = packed_logits(model, rows, TWO_GROUPS).split(LENGTHS)
    rows[run] = (rows[run] + 5) % 40
    after = packed_logits(model, rows, TWO_GROUPS).split(LENGTHS)
    changed = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert changed == [index in seeing for index in range(len(LENGTHS))]


def test_the_gradients_of_a_shared_prompt_are_added_up_in_the_same_order_every_time() -> None:
    model = build(qwen3, dtype=torch.float32)
    assert prepare_for_packing(model) is None
    found: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        packed_logits(model, rows_of(LENGTHS), TWO_GROUPS).square().sum().backward()
        found.append(model.model.layers[0].self_attn.v_proj.weight.grad.clone())
    assert torch.equal(*found)


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return found


def test_nothing_as_large_as_a_mask_over_the_whole_row_is_ever_made() -> None:
    model = build(mistral_with_a_window)
    assert prepare_for_packing(model) is None
    rows = rows_of([9, 10, 11] * 20)
    with Largest() as largest:
        packed_logits(model, rows).sum().backward()
    assert 0 < largest.elements < 600 * 600 / 4
    with Largest() as largest:
        packed_logits(model, rows, [None, *[0] * 59]).sum().backward()
    assert 0 < largest.elements < 600 * 600 / 4


def test_all_layers_of_a_row_share_one_mask() -> None:
    model = build(gemma2_with_a_window_in_every_other_layer)
    assert prepare_for_packing(model) is None
    layout = packed_layout(LENGTHS, CPU, TWO_GROUPS)
    model(**layout.arguments(torch.cat(rows_of(LENGTHS))[None]))
    number, box = next((n, box) for n, box in enumerate(layout.boxed.boxes) if box.continues)
    mask = layout.mask(number, None, torch.float64)
    assert mask is layout.mask(number, None, torch.float64) is not layout.mask(number, 6, torch.float64)
    assert mask is not None and mask.shape == (box.rows, 1, box.queries, box.keys)
    assert layout.mask(number, 1000, torch.float64) is mask, "a window wider than every sequence is none"


def test_a_prepared_model_generates_as_before() -> None:
    model, prepared = build(qwen3, dtype=torch.float32), build(qwen3, dtype=torch.float32)
    assert prepare_for_packing(prepared) is None
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]])
    for sampled in (False, True):
        texts: list[Tensor] = []
        for one in (model, prepared):
            torch.manual_seed(3)
            texts.append(
                one.generate(
                    input_ids=ids, attention_mask=(ids > 0).long(), max_new_tokens=12, do_sample=sampled
                )
            )
        assert torch.equal(*texts) and texts[0].shape[1] > 5


def test_a_saved_model_names_no_attention_of_ours(tmp_path: Path) -> None:
    model = build(qwen3, dtype=torch.float32)
    assert prepare_for_packing(model) is None
    assert model.config._attn_implementation == PACKED_ATTENTION
    model.save_pretrained(tmp_path)
    assert "swarmnode" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    assert Qwen3ForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_model_with_an_adapter_packs_and_switches_it_off(nudged: Policy) -> None:
    assert prepare_for_packing(nudged.model) is None
    rows = rows_of([4, 9])
    with torch.no_grad():
        adapted = packed_logits(nudged.model, rows)
        with nudged.peft_model.disable_adapter():
            base = packed_logits(nudged.model, rows)
            alone = nudged.model(input_ids=rows[1][None], use_cache=False).logits[0]
    torch.testing.assert_close(base[4:], alone, atol=1e-5, rtol=1e-5)
    assert (adapted - base).abs().max() > 1e-3


def test_preparing_twice_is_preparing_once() -> None:
    model = build(llama)
    assert prepare_for_packing(model) is None and prepare_for_packing(model) is None


def test_the_probe_takes_no_gradient_and_leaves_the_random_state_alone() -> None:
    model = build(qwen2)
    state = torch.get_rng_state()
    assert prepare_for_packing(model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", [mamba, with_convolutions])
def test_a_model_with_other_layers_than_attention_keeps_its_padding(family: Callable[[], Any]) -> None:
    model = build(family, dtype=torch.float32)
    before = model.config._attn_implementation
    assert prepare_for_packing(model) is not None
    assert model.config._attn_implementation == before


def test_a_layer_that_carries_something_from_token_to_token_is_found_by_trying() -> None:
    def add_half_of_the_token_before(module: Any, args: Any, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + 0.5 * torch.nn.functional.pad(hidden_BTD, (0, 0, 1, 0))[:, :-1]

    model = build(llama)
    handle = model.model.layers[0].mlp.register_forward_hook(add_half_of_the_token_before)
    reason = prepare_for_packing(model)
    assert reason is not None and "differ" in reason
    assert model.config._attn_implementation == "sdpa", "as it was"
    handle.remove()
    assert prepare_for_packing(model) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.5, 0.05, 0.01])
def test_a_leak_is_found_in_any_number_type_also_below_its_rounding(dtype: torch.dtype, share: float) -> None:
    """A hundredth of the token before moves the logits by less than bfloat16 rounds them."""

    def add_some_of_the_token_before(module: Any, args: Any, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + share * torch.nn.functional.pad(hidden_BTD, (0, 0, 1, 0))[:, :-1]

    model = build(llama).to(dtype)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(add_some_of_the_token_before)
    assert prepare_for_packing(model) is not None


@pytest.mark.parametrize("family", [qwen2, llama])
def test_a_model_in_bfloat16_is_never_refused_for_its_rounding(family: Callable[[], Any]) -> None:
    """Weights so large that logits of one sequence in two shapes differ by several hundredths."""
    for seed in range(6):
        torch.manual_seed(seed)
        model = family().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=0.3)
        assert prepare_for_packing(model.bfloat16()) is None


def test_an_attention_that_ours_does_not_replace_is_named() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager"))
    reason = prepare_for_packing(model)
    assert reason is not None and "eager" in reason
    assert model.config._attn_implementation == "eager"


def test_an_attention_that_takes_only_whole_sequences_is_found_by_trying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a kernel would whose causal mask lets the first query see one key only, however many there are."""

    def no_mask_of_its_own(layout: PackedLayout, number: int, window: int | None, dtype: torch.dtype) -> None:
        return None

    model = build(llama)
    monkeypatch.setattr(PackedLayout, "mask", no_mask_of_its_own)
    reason = prepare_for_packing(model)
    assert reason is not None and "differ" in reason


def test_a_window_that_the_layers_do_not_tell_the_attention_is_noticed() -> None:
    model = build(gemma2_with_a_window_in_every_other_layer)
    model.config.sliding_window = 50
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    reason = prepare_for_packing(model)
    assert reason is not None and "window" in reason


def test_a_position_bias_is_refused_rather_than_ignored() -> None:
    model = build(llama)
    assert prepare_for_packing(model) is None
    layout = packed_layout([2, 3], CPU)
    with pytest.raises(ModelError, match="position bias"):
        model(**layout.arguments(torch.arange(5)[None]), position_bias=torch.zeros(1))


def test_a_cap_of_the_scores_is_refused_rather_than_left_out() -> None:
    """transformers' SDPA leaves it out: packed and plain rows would agree on the logits of another model."""
    model = build(lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, attn_implementation="sdpa")))
    reason = prepare_for_packing(model)
    assert reason is not None and "caps no scores" in reason


def test_a_row_that_is_not_the_layouts_is_refused() -> None:
    model = build(llama)
    assert prepare_for_packing(model) is None
    with pytest.raises(ModelError, match="whole packed row"):
        model(**packed_layout([2, 3], CPU).arguments(torch.arange(5)[None]) | {
            "input_ids": torch.arange(4)[None], "position_ids": torch.arange(4)[None]
        })  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 4, 20, 100])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@with_and_without_shared_prompts
def test_sdpa_in_boxes_and_the_flash_kernel_agree(
    window: int | None, key_heads: int, prompts: list[int | None] | None
) -> None:
    """There is no C kernel for float64."""
    torch.manual_seed(0)
    layout = packed_layout(LENGTHS, CPU, prompts)
    settings = AttentionSettings(0.3, window, grouped=key_heads < 4)
    shapes = [(sum(LENGTHS), heads, 8) for heads in (4, key_heads, key_heads)]
    given_ones = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    boxes = by_boxes(*given_ones, layout, settings)
    flash = by_flash(*given_ones, layout, settings, kernel=flash_by_hand)
    torch.testing.assert_close(boxes, flash)
    towards = torch.randn_like(boxes)
    for one, other in zip(
        torch.autograd.grad(boxes, given_ones, towards), torch.autograd.grad(flash, given_ones, towards),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("prompts", [None, [None, 0]])
def test_torchs_kernel_takes_the_arguments_that_it_is_given(prompts: list[int | None] | None) -> None:
    meta = torch.device("meta")
    query = torch.empty(53, 4, 64, dtype=torch.bfloat16, device=meta)
    key = torch.empty(53, 2, 64, dtype=torch.bfloat16, device=meta)
    layout = packed_layout([50, 3], meta, prompts)
    settings = AttentionSettings(0.3, 16, grouped=True)
    assert by_flash(query, key, key, layout, settings, kernel=varlen_attn).shape == query.shape


def test_the_flash_kernel_is_asked_only_for_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    ampere, half = (8, 0), torch.bfloat16
    assert flash_suits(ampere, half, 64, 64)
    assert not flash_suits((7, 5), half, 64, 64), "Turing"
    assert not flash_suits(ampere, torch.float32, 64, 64)
    assert not flash_suits(ampere, half, 192, 128), "values narrower than keys"
    assert not flash_suits(ampere, half, 512, 512)


def gradients_of(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Output and gradients of a packed row with shared prompts, computed in `dtype`, as float64."""
    given_ones = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    layout = packed_layout(LENGTHS, CPU, TWO_GROUPS)
    found = by_boxes(*given_ones, layout, AttentionSettings(None, None, grouped=True))
    towards = torch.linspace(-1, 1, found.numel()).view_as(found).to(dtype)
    return tuple(one.double() for one in (found, *torch.autograd.grad(found, given_ones, towards)))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_short_sequences_are_attended_to_as_exactly_as_the_type_allows(
    dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 16) for heads in (4, 2, 2)]
    row = [torch.randn(shape).to(torch.bfloat16).double() for shape in shapes]
    exact = gradients_of(*row, torch.float64)
    for found, expected in zip(gradients_of(*row, dtype), exact, strict=True):
        assert (found - expected).norm() <= bound * expected.norm()
