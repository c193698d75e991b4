"""Stages in one process: their gradients are the single machine's, whatever the partition."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.pipeline_local import LocalPipeline
from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.feeds.objectives import (
    LossInputs,
    Objective,
    cross_entropy,
    policy_gradient,
)
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.model.policy import Policy
from swarmnode.registry import SEAMS
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.losses import StepSize
from swarmnode.training.packing import completion_tokens
from swarmnode.training.round import MeasuredRound, RoundOfPolicy
from swarmnode.training.trainer import train_together
from tests.unit.extensions.pipeline.tiny_models import (
    LAYERS,
    SETTINGS,
    batches,
    bypass,
    nudge,
    reorder,
    samples,
    saved,
    single_machine,
    tiny_config,
    tiny_model,
)  # fmt: skip

TOKENS = completion_tokens(samples())
PARTITIONS = [[6], [2, 6], [1, 3, 6]]
PACKS = try_cut(tiny_config())
FULL = StageSettings(trainable="full")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("model"))


def fresh(
    folder: Path, ends: Sequence[int], settings: StageSettings = SETTINGS, **more: Any
) -> LocalPipeline:
    found = LocalPipeline.load(folder, ends, settings, packs=PACKS, **more)
    if settings.trainable == "lora":
        for worker in found.workers:
            nudge(worker.model.trainable())
    return found


@functools.cache
def shared(folder: Path, *ends: int) -> LocalPipeline:
    """For tests that move no weights."""
    return fresh(folder, ends)


def pipeline_gradients(
    found: LocalPipeline, path: tuple[int, ...], objective: Objective, *, packed: bool
) -> dict[str, Tensor]:
    for batch in batches(packed):
        found.accumulate(LossInputs(batch, path), objective)
    return {name: t for one in found.take_gradients() for name, t in one.of_step(TOKENS).items()}


def gradients_of_cross_entropy(whole: Any, named: dict[str, Any]) -> dict[str, Tensor]:
    """By the plain model on padded rows, without any of the pipeline's code."""
    for batch in batches(packed=False):
        logits_BTV = whole(input_ids=batch.input_ids_BT).logits
        logits_NV = logits_BTV.flatten(0, 1)[batch.predictors_N]
        (torch.nn.functional.cross_entropy(logits_NV, batch.targets_N, reduction="sum") / TOKENS).backward()
    return {name: p.grad for name, p in named.items() if p.grad is not None}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())
    assert all(gradient.abs().max() > 1e-4 for gradient in expected.values())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ends", PARTITIONS)
def test_adapter_gradients_of_cross_entropy_are_the_single_machines(
    model: Any, folder: Path, ends: list[int], packed: bool
) -> None:
    policy = single_machine(model)
    expected = gradients_of_cross_entropy(policy.model, policy.trainable())
    found = shared(folder, *ends)
    same(pipeline_gradients(found, found.full_path, cross_entropy(TOKENS), packed=packed), expected)


@pytest.mark.parametrize(("ends", "tied"), [([6], True), ([2, 6], False), ([1, 3, 6], True)])
def test_with_full_training_every_gradient_is_the_single_machines(
    tmp_path: Path, ends: list[int], tied: bool
) -> None:
    whole = tiny_model(tied=tied)
    found = fresh(saved(whole, tmp_path), ends, FULL)
    expected = gradients_of_cross_entropy(whole, dict(whole.named_parameters()))
    same(pipeline_gradients(found, found.full_path, cross_entropy(TOKENS), packed=True), expected)


def test_activations_computed_again_give_the_same_gradients(model: Any, folder: Path) -> None:
    policy = single_machine(model)
    expected = gradients_of_cross_entropy(policy.model, policy.trainable())
    found = fresh(folder, [2, 6], activations="recomputed")
    same(pipeline_gradients(found, (0, 1), cross_entropy(TOKENS), packed=True), expected)


@pytest.mark.parametrize("loss", SEAMS["loss"].ours)
def test_a_step_of_each_policy_loss_is_the_single_machines(model: Any, folder: Path, loss: Any) -> None:
    config = TrainingConfig(loss=loss, grad_clip=1e9)
    policy = single_machine(model)
    expected = step_of_single_machine(policy, config)
    found = shared(folder, 1, 3, 6)
    step = StepSize(len(samples()), TOKENS, max_tokens=16)
    objective = policy_gradient(step, config, temperature=0.9, top_p=0.8, version=0)
    for batch in batches(packed=True):
        found.accumulate(LossInputs(batch, (0, 1, 2)), objective)
    same({n: t for one in found.take_gradients() for n, t in one.of_step(TOKENS).items()}, expected)


def step_of_single_machine(policy: Policy, config: TrainingConfig) -> dict[str, Tensor]:
    """The gradient that the node's own trainer steps along, read off a step of plain descent."""
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=1.0)
    forward = Forward(policy, config, temperature=0.9, top_p=0.8)
    train_together([RoundOfPolicy(policy, optimizer, config, forward, 16, [samples()], MeasuredRound())])
    return {name: before[name] - p.detach() for name, p in policy.trainable().items()}


@pytest.mark.parametrize("packed", [True, False])
def test_a_skipped_stage_is_the_identity_and_gets_no_gradient(model: Any, folder: Path, packed: bool) -> None:
    policy = single_machine(model)
    bypass(policy.model, [1, 2])
    expected = gradients_of_cross_entropy(policy.model, policy.trainable())
    found = shared(folder, 1, 3, 5, 6)
    gradients = pipeline_gradients(found, (0, 2, 3), cross_entropy(TOKENS), packed=packed)
    same(gradients, expected)
    assert not any(".layers.1." in name or ".layers.2." in name for name in gradients)


def test_a_swapped_path_is_the_model_with_these_blocks_swapped(model: Any, folder: Path) -> None:
    policy = single_machine(model)
    named = policy.trainable()
    reorder(policy.model, [0, 3, 4, 1, 2, 5])
    expected = gradients_of_cross_entropy(policy.model, named)
    found = shared(folder, 1, 3, 5, 6)
    same(pipeline_gradients(found, (0, 2, 1, 3), cross_entropy(TOKENS), packed=True), expected)


def test_log_probabilities_are_those_of_the_path(model: Any, folder: Path) -> None:
    policy = single_machine(model)
    batch = batches(packed=True)[0]
    found = shared(folder, 1, 3, 5, 6)
    whole = found.logprobs(batch, (0, 1, 2, 3)).logprobs_N
    bypass(policy.model, [3, 4])
    config = TrainingConfig()
    forward = Forward(policy, config, temperature=1.0)
    with torch.no_grad():
        expected = forward.logprobs(batch).logprobs_N
    skipped = found.logprobs(batch, (0, 1, 3)).logprobs_N
    torch.testing.assert_close(skipped, expected, rtol=0, atol=1e-5)
    assert (whole - skipped).abs().max() > 1e-2


def test_a_stage_is_weighted_by_the_tokens_that_really_passed_it(folder: Path) -> None:
    found = shared(folder, 2, 4, 6)
    first, second = batches(packed=True)[:2]
    tokens = sum(len(batch.targets_N) for batch in (first, second))
    for batch, path in ((first, (0, 1, 2)), (second, (0, 2))):
        found.accumulate(LossInputs(batch, path), cross_entropy(tokens))
    _, middle, last = found.take_gradients()
    assert (middle.visits, last.visits) == (1, 2)
    assert (middle.tokens, last.tokens) == (len(first.targets_N), tokens)
    name, summed = next((n, t) for n, t in middle.tensors.items() if t.abs().max() > 0)
    torch.testing.assert_close(middle.of_step(tokens)[name], summed * tokens / len(first.targets_N))
    assert all(torch.equal(t, last.tensors[n]) for n, t in last.of_step(tokens).items())


@pytest.mark.parametrize("path", [(), (1, 2), (0, 1, 1), (0, 3), (0, -1)])
def test_a_path_begins_at_the_data_stage_and_visits_no_stage_twice(folder: Path, path: Any) -> None:
    found = shared(folder, 2, 4, 6)
    with pytest.raises(ModelError, match="is no path"):
        found.accumulate(LossInputs(batches(packed=True)[0], path), cross_entropy(TOKENS))


@pytest.mark.parametrize("ends", [[], [2, 4], [4, 2, 6], [3, 7]])
def test_stages_must_hold_all_layers(folder: Path, ends: list[int]) -> None:
    with pytest.raises(ModelError, match="no partition"):
        LocalPipeline.load(folder, ends, SETTINGS)


def test_a_data_stage_may_hold_the_ends_alone(model: Any, folder: Path) -> None:
    policy = single_machine(model)
    expected = gradients_of_cross_entropy(policy.model, policy.trainable())
    found = shared(folder, 0, LAYERS)
    same(pipeline_gradients(found, (0, 1), cross_entropy(TOKENS), packed=True), expected)


def test_pipeline_steps_lower_the_loss(folder: Path) -> None:
    found = fresh(folder, [2, 4, 6])
    optimizers = [torch.optim.AdamW(w.model.trainable().values(), lr=1e-2) for w in found.workers]
    losses = []
    for _ in range(8):
        losses.append(
            sum(
                found.accumulate(LossInputs(batch, (0, 1, 2)), cross_entropy(TOKENS))
                for batch in batches(packed=True)
            )
        )
        for worker, optimizer, one in zip(found.workers, optimizers, found.take_gradients(), strict=True):
            assert worker.apply(one.of_step(TOKENS), optimizer, max_norm=1.0)
    assert losses[-1] < 0.8 * losses[0]
