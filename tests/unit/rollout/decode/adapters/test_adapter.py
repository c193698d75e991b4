"""Merging a LoRA into rounded weights: what arrives of a small update, and what it is worth."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.extensions.generate.model_lora import own_model
from swarmnode.rollout.decode.adapters.adapter import LoraPair, lora_pairs, lost_share, merged_weight, stretch
from swarmnode.rollout.decode.weights import FusedWeights
from swarmnode.rollout.engine import PolicyUpdate

OUT, IN, RANK = 96, 160, 8
FIRST_STEP = 1e-4
"""Adam's first step moves each entry of B by the learning rate."""


def base_weight(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(0)
    return (0.02 * torch.randn(OUT, IN)).to(dtype)


def after_steps(size: float) -> LoraPair:
    torch.manual_seed(1)
    bound = IN**-0.5
    return LoraPair(
        torch.empty(RANK, IN).uniform_(-bound, bound), size * torch.randn(OUT, RANK).sign(), scaling=2.0
    )


@pytest.mark.parametrize("size", [FIRST_STEP / 30, FIRST_STEP, 3 * FIRST_STEP, 100 * FIRST_STEP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_of_an_update_is_lost_along_it(size: float, dtype: torch.dtype) -> None:
    base, pair = base_weight(dtype), after_steps(size)
    merged = merged_weight(base, pair)
    assert merged.dtype == dtype
    assert abs(lost_share(base, pair.delta(), merged)) < 0.03


def test_plain_rounding_loses_most_of_a_first_step() -> None:
    """What there would be to do without it."""
    base, delta = base_weight(), after_steps(FIRST_STEP).delta()
    rounded = (base.float() + delta).bfloat16()
    assert lost_share(base, delta, rounded) > 0.3
    assert (rounded == base).float().mean() > 0.7


@pytest.mark.parametrize("size", [FIRST_STEP, 3 * FIRST_STEP])
def test_inputs_along_the_update_see_it_whole_and_others_no_more_noise_than_by_chance(size: float) -> None:
    """Against rounding to nearest and stochastic rounding, by what the products of a layer get wrong."""
    base, pair = base_weight(), after_steps(size)
    delta = pair.delta()
    inputs = torch.randn(64, RANK) @ pair.a
    wanted = inputs @ delta.T

    def wrong(merged: Tensor) -> float:
        return float((inputs @ (merged.float() - base.float()).T - wanted).norm() / wanted.norm())

    bits = (base.float() + delta).view(torch.int32)
    chance = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    stochastic = ((bits + chance) & -(1 << 16)).view(torch.float32)
    ours = wrong(merged_weight(base, pair))
    assert ours < wrong((base.float() + delta).bfloat16())
    assert ours < wrong(stochastic)


def test_an_update_larger_than_the_rounding_is_rounded_and_nothing_else() -> None:
    base, pair = base_weight(), after_steps(100 * FIRST_STEP)
    assert stretch(base.float(), pair.delta(), torch.bfloat16) == 1.0
    assert torch.equal(merged_weight(base, pair), (base.float() + pair.delta()).bfloat16())


def test_float32_is_a_sum() -> None:
    base, pair = base_weight(torch.float32), after_steps(FIRST_STEP)
    assert torch.equal(merged_weight(base, pair), base + pair.delta())


@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_no_update_and_one_below_all_sense_leave_the_base(size: float) -> None:
    base = base_weight()
    assert torch.equal(merged_weight(base, after_steps(size)), base)


def test_merging_twice_gives_the_same_and_leaves_the_base_alone() -> None:
    base, pair = base_weight(), after_steps(FIRST_STEP)
    before = base.clone()
    assert torch.equal(merged_weight(base, pair), merged_weight(base, pair))
    assert torch.equal(base, before)


MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


def small_policy(model: PreTrainedModel) -> PolicyUpdate:
    tensors: dict[str, Tensor] = {}
    torch.manual_seed(2)
    for name in MODULES:
        rows, columns = model.get_submodule(name).weight.shape
        a = torch.empty(4, columns).uniform_(-(columns**-0.5), columns**-0.5)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = FIRST_STEP * torch.randn(rows, 4).sign()
    return PolicyUpdate(1, tensors, 2.0)


Merge = Callable[[PreTrainedModel, PolicyUpdate], dict[str, Tensor]]


def by_embedded_engine(model: PreTrainedModel, update: PolicyUpdate) -> dict[str, Tensor]:
    weights = FusedWeights(model, torch.device("cpu"))
    return {name: weights._merged(name, weights.pairs(update)) for name in MODULES}


def by_plain_loop(model: PreTrainedModel, update: PolicyUpdate) -> dict[str, Tensor]:
    own, lora = own_model(model)
    lora.take(lora_pairs(update, lora.shapes()))
    return {name: own.get_submodule(name).weight.detach() for name in MODULES}


@pytest.mark.parametrize("merge", [by_embedded_engine, by_plain_loop])
def test_every_engine_that_merges_keeps_the_update(tiny: PreTrainedModel, merge: Merge) -> None:
    model = copy.deepcopy(tiny).bfloat16()
    update = small_policy(model)
    pairs = FusedWeights(model, torch.device("cpu")).pairs(update)
    for name, merged in merge(model, update).items():
        base = model.get_submodule(name).weight.detach()
        assert abs(lost_share(base, pairs[name].delta(), merged)) < 0.05
