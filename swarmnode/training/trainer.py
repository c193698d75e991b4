"""One round of learning: groups in, a new policy version out.

exchange, rollout -> [trainer] -> policy.version + 1 -> engine, checkpoint

GRPO on LoRA parameters as SAPO trains (section 4): group-normalised advantages, asymmetric clip, no KL.
The ratio's denominator is our policy at the start of the round (prox). Own tokens that another policy sampled
are corrected by weight; external groups are treated as if prox had sampled them.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from swarmnode.config import TrainingConfig
from swarmnode.errors import ModelError
from swarmnode.training.corrections import token_weights
from swarmnode.training.logprob import completion_logprobs, head_is_plain
from swarmnode.training.loss import LossOutput, clipped_policy_loss
from swarmnode.training.off_policy import MeasuredTokens, with_off_policy
from swarmnode.training.packing import MicroBatch, TrainingSample, micro_batches, to_samples
from swarmnode.training.policy import Policy
from swarmnode.training.records import TrainReport
from swarmnode.types import RolloutGroup, mean_or_none

log = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.99)
SMALLEST_MICRO_BATCH = 64
"""Tokens below which halving the micro-batch cannot help any more."""

Result = TypeVar("Result")
ProxLogprobs = dict[int, Tensor]
"""id(sample) -> log-probabilities of its tokens before the round."""


@dataclass(slots=True)
class _StepSums:
    """Sums over the micro-batches of one optimizer step."""

    loss: float = 0.0
    clipped: int = 0
    own_tokens: list[MeasuredTokens] = field(default_factory=list[MeasuredTokens])


@dataclass(slots=True)
class _Measured:
    """What is measured during one round, before it becomes a report."""

    groups: Counter[tuple[str, bool]] = field(default_factory=Counter[tuple[str, bool]])
    """(own or external, has a gradient) -> groups."""
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    clipped: int = 0
    own_tokens: list[MeasuredTokens] = field(default_factory=list[MeasuredTokens])

    def report(self, tokens: int, seconds: float) -> TrainReport:
        report = TrainReport(
            own_groups=self.groups["own", True],
            external_groups=self.groups["external", True],
            zero_advantage_own=self.groups["own", False],
            zero_advantage_external=self.groups["external", False],
            tokens=tokens,
            optimizer_steps=len(self.losses),
            loss=mean_or_none(self.losses),
            grad_norm=mean_or_none(self.norms),
            clipped_share=self.clipped / tokens if tokens else None,
            seconds=seconds,
        )
        return with_off_policy(report, self.own_tokens)


class Trainer:
    """Owns the optimizer of one policy's adapter. Calls block; the node has a worker thread for them."""

    def __init__(
        self,
        policy: Policy,
        config: TrainingConfig,
        *,
        temperature: float,
        seed: int,
        render: Callable[[str], tuple[int, ...]],
    ) -> None:
        self.policy = policy
        self.config = config
        self.temperature = temperature
        self.seed = seed
        self.render = render
        self.plain_head = head_is_plain(policy.model)
        self.micro_batch_tokens = config.micro_batch_tokens
        self.optimizer = torch.optim.AdamW(
            list(policy.trainable().values()), lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0
        )

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        """Train on the groups that have a gradient, and raise the policy version by one.

        The model stays in eval mode: with dropout the ratio would compare two different networks.
        Without a single such group no optimizer step is taken (Adam would move on momentum alone) and the
        version stays.
        """
        started = time.perf_counter()
        measured = _Measured()
        samples = self._samples(own, measured, "own") + self._samples(external, measured, "external")
        steps = self._shuffled_steps(samples)
        prox = self._prox_logprobs([sample for step in steps[1:] for sample in step])
        for step in steps:
            self._optimizer_step(step, prox, measured)
        self.policy.version += 1 if measured.losses else 0
        return measured.report(_completion_tokens(samples), time.perf_counter() - started)

    def _samples(
        self, groups: Sequence[RolloutGroup], measured: _Measured, origin: str
    ) -> list[TrainingSample]:
        samples: list[TrainingSample] = []
        for group in groups:
            found = to_samples(group, self.render(group.example.prompt))
            measured.groups[origin, found is not None] += 1
            samples.extend(found or ())
        return samples

    def _shuffled_steps(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        """As few steps as the setting allows, of equal size: a last one of few samples would be noise."""
        order = list(samples)
        random.Random(f"{self.seed}:{self.policy.version}").shuffle(order)
        count = -(-len(order) // self.config.sequences_per_step)
        return [order[number::count] for number in range(count)]

    def _prox_logprobs(self, samples: Sequence[TrainingSample]) -> ProxLogprobs:
        """Log-probabilities before the round's first update.

        Samples of the first step need none: the policy has not moved yet, the ratio is 1.
        """

        @torch.no_grad()
        def measure() -> ProxLogprobs:
            prox: ProxLogprobs = {}
            for batch in micro_batches(samples, self.micro_batch_tokens, self.policy.device):
                flat_N = self._logprobs(batch)
                prox.update(zip(map(id, batch.samples), _rows(flat_N, batch), strict=True))
            return prox

        return self._with_memory_to_spare(measure)

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return completion_logprobs(self.policy.model, batch, self.temperature, plain_head=self.plain_head)

    def _optimizer_step(
        self, step: Sequence[TrainingSample], prox: ProxLogprobs, measured: _Measured
    ) -> None:
        sums = self._with_memory_to_spare(lambda: self._accumulate(step, prox))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.trainable().values(), self.config.grad_clip)
        if torch.isfinite(norm):
            self.optimizer.step()
            measured.losses.append(sums.loss)
            measured.norms.append(norm.item())
            measured.clipped += sums.clipped
            measured.own_tokens += sums.own_tokens
        else:
            log.warning("skipped an optimizer step: the gradient norm is %s", norm.item())
        self.optimizer.zero_grad(set_to_none=True)

    def _with_memory_to_spare(self, work: Callable[[], Result]) -> Result:
        """Do the work; out of memory, halve the micro-batch and do it again from its start."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                self.optimizer.zero_grad(set_to_none=True)
                if self.micro_batch_tokens // 2 < SMALLEST_MICRO_BATCH:
                    raise ModelError(
                        "out of memory with the smallest micro-batch",
                        hint="use a smaller --model or --set rollout.max_tokens=...",
                    ) from error
                self.micro_batch_tokens //= 2
                log.warning(
                    "out of memory: micro-batch halved to %d tokens, the step is repeated",
                    self.micro_batch_tokens,
                )
            torch.cuda.empty_cache()

    def _accumulate(self, step: Sequence[TrainingSample], prox: ProxLogprobs) -> _StepSums:
        """Gradient of one optimizer step, summed over its micro-batches."""
        normaliser = float(_completion_tokens(step))
        sums = _StepSums()
        for batch in micro_batches(step, self.micro_batch_tokens, self.policy.device):
            result, own = self._loss(batch, prox, normaliser)
            result.loss.backward()
            sums.loss += result.loss.item()
            sums.clipped += int(result.clipped)
            sums.own_tokens.append(own)
        return sums

    def _loss(
        self, batch: MicroBatch, prox: ProxLogprobs, normaliser: float
    ) -> tuple[LossOutput, MeasuredTokens]:
        logprobs_N = self._logprobs(batch)
        prox_N = _prox_or_current(batch, prox, logprobs_N.detach())
        log_ratio_M = prox_N[batch.own.mask_N] - batch.own.logprobs_M
        weights = token_weights(log_ratio_M, self.config)
        result = clipped_policy_loss(
            logprobs_N,
            prox_N,
            _per_token(batch),
            torch.ones_like(prox_N).masked_scatter(batch.own.mask_N, weights.values_M),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            normaliser=normaliser,
        )
        measured = MeasuredTokens(
            log_ratio_M=log_ratio_M.cpu().double(),
            age_M=self.policy.version - batch.own.versions_M,
            stale_M=batch.own.stale_M,
            corrected_M=weights.corrected_M.cpu(),
        )
        return result, measured


def _completion_tokens(samples: Sequence[TrainingSample]) -> int:
    return sum(len(sample.completion_ids) for sample in samples)


def _rows(flat_N: Tensor, batch: MicroBatch) -> tuple[Tensor, ...]:
    """Cut per-token values of a batch into one tensor per completion."""
    return flat_N.split(batch.completion_lengths)


def _per_token(batch: MicroBatch) -> Tensor:
    counts = torch.tensor(batch.completion_lengths, device=batch.advantages_B.device)
    return batch.advantages_B.repeat_interleave(counts)


def _prox_or_current(batch: MicroBatch, prox: ProxLogprobs, current_N: Tensor) -> Tensor:
    """Log-probabilities before the round; for samples without any, the current ones are those."""
    rows = zip(batch.samples, _rows(current_N, batch), strict=True)
    return torch.cat([prox.get(id(sample), row) for sample, row in rows])
