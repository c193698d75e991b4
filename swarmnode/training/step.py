"""A policy's round of learning, optimizer step by optimizer step: all of it is on this page.

trainer.py -> RoundOfPolicy -> [train_round] -> TrainReport, policy.version + 1
                                    |
               forward.py (log-probabilities), objective.py (loss), backward, clip, optimizer

First the log-probabilities that stay as they are while the round trains (`KnownLogprobs`). Then, for every
step, the gradient is summed over micro-batches (`take_step`), clipped, and followed (`OptimizerStep.update`).

Where several policies learn on one base (together.py), a step is that of each of them, and their samples
share the micro-batches. All that decides is still each policy's own: the size that its loss is divided by,
its gradient norm, its optimizer, its version.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarmnode.model.head import TokenLogprobs
from swarmnode.training.foreign.agreement import SOURCES, Source
from swarmnode.training.forward import Forward
from swarmnode.training.objective import ScoredTokens, Share, objective, shares_of
from swarmnode.training.packing import MicroBatch, TrainingSample
from swarmnode.training.records import TrainReport
from swarmnode.training.round import RoundOfPolicy, StepSums

logger = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6
"""What torch adds to the norm by which it clips."""

Logprobs = dict[int, Tensor]
"""id(sample) -> log-probabilities of its completion tokens."""


def train_round(one: RoundOfPolicy) -> TrainReport:
    """Train a policy on its samples and raise its version by one.

    Without a sample it takes no optimizer step (Adam would move on momentum alone) and keeps its version; so
    it does where its gradients were not finite.
    """
    with one.forward.alone():
        known = known_before([one])
        for number in range(len(one.steps)):
            take_step([OptimizerStep(one, number)], known)
    return one.finish()


@dataclass(frozen=True, slots=True)
class KnownLogprobs:
    """Log-probabilities that do not change while the round trains."""

    prox: Logprobs
    """Those under the policy before the round's first update. Samples of the first step are not among them:
    the policy has not moved yet, so theirs are the current ones."""
    reference: Logprobs
    """Those under the base model; empty when no KL divergence to it is asked for."""

    def beside(self, current: TokenLogprobs, batch: MicroBatch) -> ScoredTokens:
        """What the loss of a micro-batch needs, with what is known of its samples."""
        now = zip(batch.samples, current.logprobs_N.detach().split(batch.completion_lengths), strict=True)
        prox_N = torch.cat([self.prox.get(id(sample), row) for sample, row in now])
        if not self.reference:
            return ScoredTokens(current, prox_N, None)
        return ScoredTokens(
            current, prox_N, torch.cat([self.reference[id(sample)] for sample in batch.samples])
        )


def known_before(rounds: Sequence[RoundOfPolicy]) -> KnownLogprobs:
    """What is known before the first update of these rounds; all stand on one base."""
    forward, config = rounds[0].forward, rounds[0].config
    later = [sample for one in rounds for step in one.steps[1:] for sample in step]
    every = [sample for one in rounds for step in one.steps for sample in step]
    return KnownLogprobs(
        prox=_logprobs(forward, later, reference=False),
        reference=_logprobs(forward, every, reference=True) if config.kl_coef else {},
    )


class OptimizerStep:
    """One optimizer step of one policy, from the first micro-batch to the moved weights."""

    def __init__(self, one: RoundOfPolicy, number: int) -> None:
        self.round = one
        self.samples = one.steps[number]
        self._size = one.size(number)
        self._compared = one.agreement if one.compares(number) else None
        self._sums = StepSums()

    @property
    def compares_sources(self) -> bool:
        """Whether samples of each source must be in micro-batches of their own, source after source."""
        return self._compared is not None

    def begin(self) -> None:
        """Sum up from nothing; again where memory ran out half-way."""
        self._sums = StepSums()
        if self._compared is not None:
            self._compared.forget()

    def loss(self, batch: MicroBatch, share: Share, scored: ScoredTokens) -> Tensor:
        """The policy's part of the loss of one micro-batch more."""
        one = self.round
        output, own = objective(batch, share, scored, self._size, one.config, version=one.policy.version)
        self._sums.add(output, sum(share.completion_lengths), own)
        return output.loss

    def part_ends(self, source: Source) -> None:
        """The gradients hold the sum of everything up to the samples of `source`, these included."""
        if self._compared is not None:
            self._compared.part_ends(source)

    def update(self) -> None:
        """Clip the gradient and take the optimizer's step, unless the gradient is not finite."""
        one = self.round
        norm = torch.nn.utils.clip_grad_norm_(one.policy.parameters, one.config.grad_clip)
        if not torch.isfinite(norm):
            if one.agreement is not None:
                one.agreement.forget()
            number = one.policy.number
            logger.warning(
                "skipped an optimizer step of policy %d: the gradient norm is %s", number, norm.item()
            )
            return
        if one.agreement is not None:
            one.agreement.taken(min(1.0, one.config.grad_clip / (norm.item() + CLIP_EPSILON)))
        one.optimizer.step()
        one.measured.norms.append(norm.item())
        one.measured.steps.append(self._sums)

    def forget_gradient(self) -> None:
        self.round.optimizer.zero_grad(set_to_none=True)


def take_step(steps: Sequence[OptimizerStep], known: KnownLogprobs) -> None:
    """Take one optimizer step: a policy's, or that of several, whose samples share the micro-batches."""
    forward = steps[0].round.forward
    longest = max(_longest(one.samples) for one in steps)
    forward.with_memory_to_spare(partial(_add_gradients, steps, known), partial(_forget, steps), longest)
    for one in steps:
        one.update()
    _forget(steps)


def _add_gradients(steps: Sequence[OptimizerStep], known: KnownLogprobs) -> None:
    """Sum up the gradients of one optimizer step over its micro-batches."""
    forward, config = steps[0].round.forward, steps[0].round.config
    of_policy = {one.round.policy.number: one for one in steps}
    for one in steps:
        one.begin()
    for source, samples in _parts(steps):
        for batch in forward.batches(samples):
            with forward.policies_of(batch):
                current = forward.logprobs(batch, entropy_gradient=config.entropy_coef > 0)
                scored = known.beside(current, batch)
                losses = [of_policy[share.policy].loss(batch, share, scored) for share in shares_of(batch)]
                torch.stack(losses).sum().backward()
        for one in steps:
            one.part_ends(source)


def _parts(steps: Sequence[OptimizerStep]) -> Iterator[tuple[Source, Sequence[TrainingSample]]]:
    """Samples that may share micro-batches, with the source up to which the gradients then go: all samples,
    unless somebody wants to see the gradients grow source by source."""
    samples = [sample for one in steps for sample in one.samples]
    if not any(one.compares_sources for one in steps):
        yield SOURCES[-1], samples
        return
    for source in SOURCES:
        yield source, [sample for sample in samples if sample.source == source]


@torch.no_grad()
def _logprobs(forward: Forward, samples: Sequence[TrainingSample], *, reference: bool) -> Logprobs:
    """Log-probabilities of all samples under the policies as they are, or under the base model."""

    def measure() -> Logprobs:
        found: Logprobs = {}
        for batch in forward.batches(samples):
            with forward.policies_of(batch):
                passed = forward.reference_logprobs(batch) if reference else forward.logprobs(batch)
            rows = passed.logprobs_N.split(batch.completion_lengths)
            found.update(zip(map(id, batch.samples), rows, strict=True))
        return found

    return forward.with_memory_to_spare(measure, lambda: None, _longest(samples))


def _forget(steps: Iterable[OptimizerStep]) -> None:
    for one in steps:
        one.forget_gradient()


def _longest(samples: Sequence[TrainingSample]) -> int:
    return max((sample.length for sample in samples), default=0)
