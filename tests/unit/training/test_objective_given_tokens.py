"""Conversations in training: an environment's tokens are read, and neither learned nor counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training import forward
from swarmnode.training.forward import Forward
from swarmnode.training.losses import StepSize
from swarmnode.training.objective import ScoredTokens, objective, shares_of
from swarmnode.training.packing import TrainingSample, completion_tokens, micro_batches
from swarmnode.training.token_weights import LARGEST_WEIGHT
from swarmnode.types import Span, Stretch, one_span

CPU = torch.device("cpu")
PROMPT = (3, 4, 5)


def sample(ids: Sequence[int], given: Sequence[Stretch], advantage: float, **changes: Any) -> TrainingSample:
    mask = masked(len(ids), given)
    logprobs = tuple(-2.0 - place / 10 if learned else 0.0 for place, learned in enumerate(mask))
    spans = one_span(0, len(ids))
    return replace(
        TrainingSample(PROMPT, tuple(ids), advantage, logprobs, spans, given=tuple(given)), **changes
    )


def masked(tokens: int, given: Sequence[Stretch]) -> list[bool]:
    """True where a token is learned."""
    return [not any(start <= place < end for start, end in given) for place in range(tokens)]


SAMPLES = (
    sample([6, 1, 20, 21, 22, 7, 8, 1, 23, 9, 1], [(2, 5), (8, 9)], 0.75),
    sample([10, 1, 24, 25, 11, 12, 1], [(2, 4)], -0.5),
    sample([13, 14, 15, 1], [], 1.25),
    # A stranger's, the end of whose first turn nobody is known to have sampled.
    sample([16, 1, 26, 17, 1], [(1, 3)], 0.25, behaviour_logprobs=None, spans=()),
    sample([18, 1, 27, 19], [(2, 3)], -1.0, prompt_ids=(5, 6)),
)


def learned(one: TrainingSample) -> list[bool]:
    return masked(len(one.completion_ids), one.given)


def naive_gradients(policy: Policy, config: TrainingConfig) -> list[Tensor]:
    """Every sample on its own, whole, with a loss at each of its tokens that a mask then takes away."""
    losses: list[Tensor] = []
    for one in SAMPLES:
        ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
        logits = policy.model(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(one.completion_ids)[:, None])[:, 0]
        weights = torch.ones_like(logprobs)
        if one.behaviour_logprobs is not None:
            weights = (
                (logprobs.detach() - torch.tensor(one.behaviour_logprobs)).exp().clamp(max=LARGEST_WEIGHT)
            )
        mask = torch.tensor(learned(one), dtype=logprobs.dtype)
        total = -(one.advantage * weights * logprobs * mask).sum()
        tokens = sum(sum(learned(mate)) for mate in SAMPLES)
        counted = tokens if config.loss == "dapo" else len(SAMPLES) * mask.sum()
        losses.append(total / counted)
    policy.model.zero_grad()
    torch.stack(losses).sum().backward()
    return [parameter.grad.clone() for parameter in policy.trainable().values() if parameter.grad is not None]


def trained_gradients(policy: Policy, config: TrainingConfig) -> list[Tensor]:
    forward = Forward(policy, config, temperature=1.0)
    size = StepSize(len(SAMPLES), completion_tokens(SAMPLES), 64)
    policy.model.zero_grad()
    for batch in forward.batches(SAMPLES):
        with forward.policies_of(batch):
            current = forward.logprobs(batch)
            scored = ScoredTokens(current, current.logprobs_N.detach(), None)
            (share,) = shares_of(batch)
            output, _ = objective(batch, share, scored, size, config, version=0)
            output.loss.backward()
    return [parameter.grad.clone() for parameter in policy.trainable().values() if parameter.grad is not None]


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_is_that_of_a_loss_masked_by_token(
    nudged: Policy, monkeypatch: pytest.MonkeyPatch, packed: bool, loss: str
) -> None:
    if not packed:
        monkeypatch.setattr(forward, "prepare_for_packing", lambda model: "it has layers of another type")
    config = TrainingConfig(loss=loss, micro_batch_tokens=64)
    expected = naive_gradients(nudged, config)
    assert len(expected) > 4 and all(gradient.abs().sum() > 0 for gradient in expected[::2])
    for found, wanted in zip(trained_gradients(nudged, config), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_row_holds_what_was_given_and_no_target_does(packed: bool) -> None:
    batches = list(micro_batches(SAMPLES, 64, CPU, packed=packed))
    targets = {token for batch in batches for token in batch.targets_N.tolist()}
    assert targets.isdisjoint(range(20, 30))
    read = {token for batch in batches for token in batch.input_ids_BT.flatten().tolist()}
    assert read >= set(range(20, 28))
    for batch in batches:
        rows = batch.input_ids_BT.flatten()
        assert packed or rows[batch.predictors_N + 1].tolist() == batch.targets_N.tolist()
        assert batch.completion_lengths == [sum(learned(one)) for one in batch.samples]
        assert (
            len(batch.targets_N)
            == len(batch.predictors_N)
            == len(batch.advantages_N)
            == sum(batch.completion_lengths)
        )


def test_versions_and_recorded_probabilities_are_those_of_the_learned_tokens() -> None:
    spans = (Span(4, 0, 4), Span(5, 4, 6, "stale"), Span(6, 6, 7))
    (batch,) = micro_batches([replace(SAMPLES[1], spans=spans), SAMPLES[3]], 64, CPU, packed=True)
    assert batch.own.versions_M.tolist() == [4, 4, 5, 5, 6]
    assert batch.own.stale_M.tolist() == [False, False, True, True, False]
    torch.testing.assert_close(batch.own.logprobs_M, torch.tensor([-2.0, -2.1, -2.4, -2.5, -2.6]))
    assert batch.own.mask_N.tolist() == [True] * 5 + [False] * 3
