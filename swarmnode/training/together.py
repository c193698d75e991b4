"""One round of learning for one policy, or for several on one base whose tokens share the batches.

trainer.py -> RoundOfPolicy -> [train_together] -> reports, policy.version + 1
                                   |
                   forward.py, corrections.py, losses.py

What the policies share is work: the tokens of a micro-batch. All that decides is each policy's own: the
normaliser of its step, its gradient norm, its optimizer, its version. So its gradient is the one it would
have alone, up to the rounding of sums of another shape.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from swarmnode.training.corrections import TokenWeights, batch_weights, token_weights
from swarmnode.training.foreign.agreement import SOURCES, Agreement
from swarmnode.training.forward import Forward
from swarmnode.training.losses import StepSize, TokenBatch, policy_loss
from swarmnode.training.off_policy import MeasuredTokens
from swarmnode.training.packing import MicroBatch, TrainingSample
from swarmnode.training.records import TrainReport
from swarmnode.training.round import RoundOfPolicy, StepSums, completion_tokens

logger = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6
"""What torch adds to the norm by which it clips."""

Logprobs = dict[int, Tensor]
"""id(sample) -> log-probabilities of its completion tokens."""


@dataclass(frozen=True, slots=True)
class Known:
    """Log-probabilities that do not change while the round trains."""

    prox: Logprobs
    """Under the policy before the round's first update. Samples of the first step are not among them: the
    policy has not moved yet, so theirs are the current ones."""
    reference: Logprobs
    """Under the base model; empty when no KL divergence to it is asked for."""

    def prox_N(self, batch: MicroBatch, current_N: Tensor) -> Tensor:
        rows = zip(batch.samples, current_N.split(batch.completion_lengths), strict=True)
        return torch.cat([self.prox.get(id(sample), row) for sample, row in rows])

    def reference_N(self, batch: MicroBatch) -> Tensor | None:
        if not self.reference:
            return None
        return torch.cat([self.reference[id(sample)] for sample in batch.samples])


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a micro-batch that belongs to one policy."""

    policy: int
    completion_lengths: Sequence[int]
    tokens: slice
    """Of the N completion tokens."""
    own: slice
    """Of the M own ones among them."""


def train_together(rounds: Sequence[RoundOfPolicy]) -> list[TrainReport]:
    """Train each policy on its samples and raise its version by one; reports in the order of `rounds`.

    All policies stand on one base and share its `Forward`. One without a sample takes no optimizer step (Adam
    would move on momentum alone) and keeps its version; so does one whose gradients were not finite.
    """
    with rounds[0].forward.alone():
        _Together(rounds).train()
    for one in rounds:
        one.policy.version += 1 if one.measured.steps else 0
    return [one.report() for one in rounds]


class _Together:
    """The rounds that run now, by policy."""

    def __init__(self, rounds: Sequence[RoundOfPolicy]) -> None:
        self._rounds: Mapping[int, RoundOfPolicy] = {one.policy.number: one for one in rounds}
        self._forward: Forward = rounds[0].forward
        self._config = rounds[0].config

    def train(self) -> None:
        later = [s for one in self._rounds.values() for step in one.steps[1:] for s in step]
        every = [s for one in self._rounds.values() for step in one.steps for s in step]
        known = Known(
            prox=self._measure(later, reference=False),
            reference=self._measure(every, reference=True) if self._config.kl_coef else {},
        )
        for number in range(max((len(one.steps) for one in self._rounds.values()), default=0)):
            self._step(number, known)

    @torch.no_grad()
    def _measure(self, samples: Sequence[TrainingSample], *, reference: bool) -> Logprobs:
        def measure() -> Logprobs:
            found: Logprobs = {}
            for batch in self._forward.batches(samples):
                with self._forward.policies_of(batch):
                    forward = self._forward.reference_logprobs if reference else self._forward.logprobs
                    rows = forward(batch).logprobs_N.split(batch.completion_lengths)
                found.update(zip(map(id, batch.samples), rows, strict=True))
            return found

        return self._forward.with_memory_to_spare(measure, lambda: None, _longest(samples))

    def _step(self, number: int, known: Known) -> None:
        """The optimizer step `number` of every policy that has one."""
        taking = [one for one in self._rounds.values() if number < len(one.steps)]
        samples = [sample for one in taking for sample in one.steps[number]]
        sizes = {one.policy.number: one.size(number) for one in taking}
        compared = [one.agreement for one in taking if one.agreement is not None and one.compares(number)]
        sums = self._forward.with_memory_to_spare(
            lambda: self._accumulate(samples, known, sizes, compared),
            self._forget_gradients,
            _longest(samples),
        )
        for one in taking:
            _update(one, sums[one.policy.number])
        self._forget_gradients()

    def _accumulate(
        self,
        samples: Sequence[TrainingSample],
        known: Known,
        sizes: Mapping[int, StepSize],
        compared: Sequence[Agreement],
    ) -> Mapping[int, StepSums]:
        """Gradients of one optimizer step, summed over its micro-batches. `compared` see them grow, source by
        source; without any, samples of all sources share the micro-batches."""
        sums = {policy: StepSums() for policy in sizes}
        if not compared:
            self._add_gradients(samples, known, sizes, sums)
            return sums
        for one in compared:
            one.forget()
        for source in SOURCES:
            part = [sample for sample in samples if sample.source == source]
            self._add_gradients(part, known, sizes, sums)
            for one in compared:
                one.part_ends(source)
        return sums

    def _add_gradients(
        self,
        samples: Sequence[TrainingSample],
        known: Known,
        sizes: Mapping[int, StepSize],
        sums: Mapping[int, StepSums],
    ) -> None:
        for batch in self._forward.batches(samples):
            with self._forward.policies_of(batch):
                self._loss(batch, known, sizes, sums).backward()

    def _loss(
        self,
        batch: MicroBatch,
        known: Known,
        sizes: Mapping[int, StepSize],
        sums: Mapping[int, StepSums],
    ) -> Tensor:
        found = self._forward.logprobs(batch, entropy_gradient=self._config.entropy_coef > 0)
        prox_N = known.prox_N(batch, found.logprobs_N.detach())
        reference_N = known.reference_N(batch)
        shares = list(_shares(batch))
        log_ratio_M = prox_N[batch.own.mask_N] - batch.own.logprobs_M
        age_M = self._versions(shares) - batch.own.versions_M
        weights = token_weights(log_ratio_M, self._config, age_M)
        weights_N = batch_weights(prox_N, batch.own.mask_N, weights.values_M, batch.shaped_N)
        losses: list[Tensor] = []
        for share in shares:
            part = share.tokens
            tokens = TokenBatch(
                logprobs_N=found.logprobs_N[part],
                prox_N=prox_N[part],
                advantages_N=batch.advantages_N[part],
                weights_N=weights_N[part],
                entropy_N=found.entropy_N[part],
                reference_N=None if reference_N is None else reference_N[part],
                lengths=share.completion_lengths,
            )
            result = policy_loss(tokens, sizes[share.policy], self._config)
            own = _measured(log_ratio_M, age_M, batch, weights, share.own)
            sums[share.policy].add(result, sum(share.completion_lengths), own)
            losses.append(result.loss)
        return torch.stack(losses).sum()

    def _versions(self, shares: Sequence[Share]) -> Tensor:
        """The newest version of the policy of every own token. [M], on the CPU."""
        newest = torch.tensor([self._rounds[share.policy].policy.version for share in shares])
        return newest.repeat_interleave(
            torch.tensor([share.own.stop - share.own.start for share in shares], dtype=torch.long)
        )

    def _forget_gradients(self) -> None:
        for one in self._rounds.values():
            one.optimizer.zero_grad(set_to_none=True)


def _update(one: RoundOfPolicy, sums: StepSums) -> None:
    """Clip the gradient and take the optimizer's step, unless it is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(one.policy.parameters, one.config.grad_clip)
    if not torch.isfinite(norm):
        if one.agreement is not None:
            one.agreement.forget()
        logger.warning(
            "skipped an optimizer step of policy %d: the gradient norm is %s", one.policy.number, norm.item()
        )
        return
    if one.agreement is not None:
        one.agreement.taken(min(1.0, one.config.grad_clip / (norm.item() + CLIP_EPSILON)))
    one.optimizer.step()
    one.measured.norms.append(norm.item())
    one.measured.steps.append(sums)


def _longest(samples: Sequence[TrainingSample]) -> int:
    return max((sample.length for sample in samples), default=0)


def _shares(batch: MicroBatch) -> Iterator[Share]:
    """Samples of one policy are neighbours in a batch, so its tokens are too."""
    tokens = own = 0
    for policy, members in groupby(batch.samples, key=lambda sample: sample.policy):
        samples = list(members)
        more = completion_tokens(samples)
        more_own = completion_tokens([s for s in samples if s.behaviour_logprobs is not None])
        lengths = [len(sample.completion_ids) for sample in samples]
        yield Share(policy, lengths, slice(tokens, tokens + more), slice(own, own + more_own))
        tokens, own = tokens + more, own + more_own


def _measured(
    log_ratio_M: Tensor, age_M: Tensor, batch: MicroBatch, weights: TokenWeights, part: slice
) -> MeasuredTokens:
    return MeasuredTokens(
        log_ratio_M=log_ratio_M[part].cpu().double(),
        age_M=age_M[part],
        stale_M=batch.own.stale_M[part],
        corrected_M=weights.corrected_M[part].cpu(),
        too_old_M=weights.too_old_M[part].cpu(),
    )
