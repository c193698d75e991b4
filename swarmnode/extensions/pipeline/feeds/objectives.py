"""Losses at the end of a path through the stages: cross-entropy for text, the trainer's own for rollouts.

rollout_feed.py, text_feed.py -> LossInputs, [Objective] -> iteration_driver.py -> StageWorker.loss
                                                |
                                      training/objective.py

The path is part of the policy: hidden states from another path are those of another policy. So the
log-probabilities of a micro-batch are computed along the path of its loss, which `LossInputs` carries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.model.head import TokenLogprobs, head_logprobs
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.losses import LossOutput, StepSize
from swarmnode.training.objective import ScoredTokens, objective, shares_of
from swarmnode.training.off_policy import MeasuredTokens
from swarmnode.training.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch with the inputs of its loss, all along one path."""

    batch: MicroBatch
    path: StagePath
    weight: int | None = None
    """The micro-batch's share of the divisor that turns the sum over a step into a mean: its number of
    answers for a loss over answers. None: its tokens."""

    @property
    def tokens(self) -> int:
        """The weight of the micro-batch: the tokens, or answers, that are learned from."""
        return len(self.batch.targets_N) if self.weight is None else self.weight


Objective = Callable[[StageModel, Tensor, LossInputs], LossOutput]
"""(data stage, hidden states [B, T, D] at the end of the path, inputs) -> a loss with its graph."""


def batch_logprobs(
    stage: StageModel,
    hidden_BTD: Tensor,
    batch: MicroBatch,
    temperature: float = 1.0,
    *,
    top_p: float = 1.0,
) -> TokenLogprobs:
    """Return the log-probabilities of the N completion tokens, from hidden states at the end of a path. Only
    on the data stage."""
    predictors_ND = hidden_BTD.flatten(0, 1)[batch.predictors_N]
    return head_logprobs(
        stage.head, stage.final_norm(predictors_ND), batch.targets_N, temperature, top_p=top_p
    )


def cross_entropy(step_tokens: int) -> Objective:
    """Return the loss: minus the mean log-probability of the completion tokens of a step of `step_tokens`
    tokens, in nats."""

    def loss(stage: StageModel, hidden_BTD: Tensor, inputs: LossInputs) -> LossOutput:
        found = batch_logprobs(stage, hidden_BTD, inputs.batch)
        value = -found.logprobs_N.sum() / step_tokens
        return LossOutput(value, torch.zeros((), dtype=torch.long), None, found.entropy_N.detach().sum())

    return loss


Measure = Callable[[LossInputs, LossOutput, MeasuredTokens], None]
"""Called with the measurements of a micro-batch each time its loss is computed."""


def policy_gradient(
    step: StepSize,
    config: TrainingConfig,
    *,
    temperature: float,
    top_p: float = 1.0,
    version: int,
    measure: Measure | None = None,
) -> Objective:
    """Return the trainer's own objective (training/objective.py) for one policy, at the end of a path.

    `step`: size of the whole optimizer step. `version`: the newest policy version, from which the age of
    tokens is counted.
    """

    def loss(stage: StageModel, hidden_BTD: Tensor, inputs: LossInputs) -> LossOutput:
        batch = inputs.batch
        found = batch_logprobs(stage, hidden_BTD, batch, temperature, top_p=top_p)
        # A pipeline takes one step per round, so the policy has not moved; and it has no reference.
        scored = ScoredTokens(found, found.logprobs_N.detach(), None)
        (share,) = shares_of(batch)  # A pipeline has one policy.
        output, measured = objective(batch, share, scored, step, config, version=version)
        if measure is not None:
            measure(inputs, output, measured)
        return output

    return loss
