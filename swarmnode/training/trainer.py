"""Trains one policy, from groups to a new policy version: the whole process is on this page.

exchange, rollout -> [Trainer] (rules.py, round.py) -> RoundOfPolicy
        -> [take_step], again and again: forward.py (log-probabilities), objective.py (loss), backward, update
        -> policy.version + 1 -> engine, checkpoint

Group-normalised advantages on LoRA parameters, an asymmetric clip, and no KL unless asked for: as SAPO trains
(section 4). The ratio's denominator is our policy at the start of the round (prox). Own tokens that another
policy sampled are corrected by weight; external groups are treated as if prox had sampled them. The rule
(rules.py) decides what is learned from a round, and what is replayed beside it.

If several policies learn on one base (cohort.py), a step covers all of them, and their samples share the
micro-batches. Everything that decides is still each policy's own: the size that its loss is divided by, its
gradient norm, its optimizer, its version.
"""

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from swarmnode.chat import Prompt
from swarmnode.model.head import TokenLogprobs
from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.adam import adam, learning_rate_at
from swarmnode.training.forward import Forward
from swarmnode.training.objective import ScoredTokens, objective, shares_of
from swarmnode.training.packing import MicroBatch, TrainingSample
from swarmnode.training.records import TrainReport
from swarmnode.training.round import (
    MeasuredRound,
    RoundOfPolicy,
    SampleRules,
    StepSums,
    lesson_samples,
    replayed_samples,
)
from swarmnode.training.rules.rules import GroupLesson, Rule, Sapo
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

PROMPTS_RENDERED = 4096
"""The most prompts whose tokens are cached."""

Logprobs = dict[int, Tensor]
"""id(sample) -> log-probabilities of its completion tokens."""


class Trainer:
    """Owns the optimizer of one policy's adapter. Calls block; the node runs them in a worker thread."""

    def __init__(
        self,
        policy: Policy,
        config: TrainingConfig,
        *,
        temperature: float,
        top_p: float = 1.0,
        max_tokens: int,
        seed: int,
        render: Callable[[Prompt], tuple[int, ...]],
        forward: Forward | None = None,
        rule: Rule | None = None,
        rounds: int | None = None,
    ) -> None:
        """`temperature`, `top_p` and `max_tokens`: the sampler's. `forward`: shared by the trainers of all
        policies on one base; None if this policy is alone. `rule`: how to learn from others; None: as SAPO
        does. `rounds`: the total number of rounds, for a learning rate that decays until then."""
        self.policy = policy
        self.config = config
        self.seed = seed
        self.rounds = rounds
        self.max_tokens = max_tokens
        self.rule = rule or Sapo()
        self.rate_share = 1.0
        """Factor on the learning rate of the next rounds."""
        self.kept_share = 1.0
        """Share of each next round's change of the weights that is kept (round.py)."""
        self._sample_rules = SampleRules(
            # The book's answers come again and again.
            lru_cache(PROMPTS_RENDERED)(render),
            config,
            max_tokens,
            end=lambda: policy.base.eos_token_ids[0],
            policy=policy.number,
        )
        self.optimizer = adam(policy.parameters, config.learning_rate)
        self.forward = forward or Forward(policy, config, temperature=temperature, top_p=top_p)
        self.forward.add(policy)

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        """Trains on the groups that have a gradient, and raises the policy version by one.

        If no group has a gradient, or no gradient was finite, no step is taken and the version stays.
        """
        (report,) = train_together([self.prepare(own, external)])
        return report

    def prepare(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> RoundOfPolicy:
        """Prepares the round that `train` runs. Rounds of several policies go to `train_together`."""
        lessons = self.rule.lessons(own, external, version=self.policy.version)
        # The version counts the completed rounds of learning, and every checkpoint has it.
        learning_rate = self.rate_share * learning_rate_at(self.config, self.policy.version, self.rounds)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        shaped = lessons.shaped
        replayed = list(replayed_samples(lessons.replayed, self._sample_rules, shaped=shaped))
        measured = MeasuredRound(learning_rate=learning_rate, replayed=len(replayed), of_rule=lessons.report)
        measured.groups.update(("own", lesson.group.has_gradient) for lesson in lessons.own)
        measured.groups.update(("external", group.has_gradient) for group in external)
        return RoundOfPolicy(
            self.policy,
            self.optimizer,
            self.config,
            self.forward,
            self.max_tokens,
            self._shuffled_steps(
                self._samples(lessons.own, shaped) + self._samples(lessons.external, shaped),
                replayed,
                lessons.replay_steps,
            ),
            measured,
            self.kept_share,
        )

    def _samples(self, lessons: Sequence[GroupLesson], shaped: bool) -> list[TrainingSample]:
        rules = self._sample_rules
        return [sample for one in lessons for sample in lesson_samples(one, rules, shaped=shaped) or ()]

    def _shuffled_steps(
        self,
        samples: Sequence[TrainingSample],
        replayed: Sequence[TrainingSample] = (),
        replay_steps: int = 1,
    ) -> list[list[TrainingSample]]:
        """Returns the samples of each optimizer step: as few steps as the setting allows, of equal size,
        because a small last step would be noise. Replayed samples are spread over these steps, or over
        `replay_steps` if that is more. Each inner epoch repeats all samples in another order."""
        order, more = list(samples), list(replayed)
        chance = random.Random(f"{self.seed}:{self.policy.version}")
        count = max(-(-len(order) // self.config.sequences_per_step), min(replay_steps, len(more)))
        steps: list[list[TrainingSample]] = []
        for _ in range(self.config.inner_epochs):
            chance.shuffle(order)
            chance.shuffle(more)
            steps += [[*order[number::count], *more[number::count]] for number in range(count)]
        return steps


def train_together(rounds: Sequence[RoundOfPolicy]) -> list[TrainReport]:
    """Trains each policy on its samples and raises its version by one. Returns reports in the order of
    `rounds`.

    All policies stand on one base and share its `Forward`: their tokens share the micro-batches, and each
    one's gradient is the one it would have alone, up to the rounding of sums of another shape. A policy with
    fewer steps than another finishes earlier. Without a sample it takes no step (Adam would move on momentum
    alone) and keeps its version; the same holds if its gradients are not finite.
    """
    with rounds[0].forward.alone:
        known = known_before(rounds)
        for number in range(max(len(one.steps) for one in rounds)):
            take_step([OptimizerStep(one, number) for one in rounds if number < len(one.steps)], known)
    return [one.finish() for one in rounds]


def rehearse(forward: Forward, policy: Policy, longest: int) -> None:
    """Passes the largest possible micro-batch, of sequences of `longest` tokens, forward and backward, and
    discards the result: a lack of memory shows now and not after an hour. Raises ModelError."""
    ids, count = (0,) * (longest - 1), max(1, forward.micro_batch_tokens // longest)
    samples = [TrainingSample((0,), ids, 0.0, None, (), policy.number) for _ in range(count)]
    try:
        for guard in forward.until_it_fits(longest):
            with guard:
                for batch in forward.batches(samples):
                    with forward.policies_of(batch):
                        forward.logprobs(batch).logprobs_N.sum().backward()
    finally:
        for parameter in policy.parameters:
            parameter.grad = None


@dataclass(frozen=True, slots=True)
class KnownLogprobs:
    """Log-probabilities that stay constant during a round."""

    prox: Logprobs
    """Log-probabilities under the policy before the round's first update, which the ratio is clipped against.
    Samples that only the first step uses are missing: the policy has not moved by then, so theirs are the
    current ones. So are replayed answers: no ratio bounds them, as in supervised learning."""
    reference: Logprobs
    """Log-probabilities under the base model; empty unless the loss includes a KL divergence to it."""

    def beside(self, current: TokenLogprobs, batch: MicroBatch) -> ScoredTokens:
        """Returns a micro-batch's current log-probabilities together with the known ones of its samples."""
        now = zip(batch.samples, current.logprobs_N.detach().split(batch.completion_lengths), strict=True)
        prox_N = torch.cat([self.prox.get(id(sample), row) for sample, row in now])
        if not self.reference:
            return ScoredTokens(current, prox_N, None)
        return ScoredTokens(
            current, prox_N, torch.cat([self.reference[id(sample)] for sample in batch.samples])
        )


def known_before(rounds: Sequence[RoundOfPolicy]) -> KnownLogprobs:
    """Returns the log-probabilities that must be known before the first update of these rounds, which share a
    base."""
    forward, config = rounds[0].forward, rounds[0].config
    later = _each_once(
        sample for one in rounds for step in one.steps[1:] for sample in step if not sample.replayed
    )
    every = _each_once(sample for one in rounds for step in one.steps for sample in step)
    return KnownLogprobs(
        prox=_logprobs(forward, later, reference=False),
        reference=_logprobs(forward, every, reference=True) if config.kl_coef else {},
    )


def _each_once(samples: Iterable[TrainingSample]) -> list[TrainingSample]:
    """Returns each sample once; inner epochs repeat them."""
    return list({id(sample): sample for sample in samples}.values())


def _logprobs(forward: Forward, samples: Sequence[TrainingSample], *, reference: bool) -> Logprobs:
    """Returns the log-probabilities of all samples under their current policies, or under the base model."""
    found: Logprobs = {}
    for guard in forward.until_it_fits(_longest(samples)):
        with guard:
            found = _logprobs_if_they_fit(forward, samples, reference=reference)
    return found


@torch.no_grad()
def _logprobs_if_they_fit(
    forward: Forward, samples: Sequence[TrainingSample], *, reference: bool
) -> Logprobs:
    found: Logprobs = {}
    for batch in forward.batches(samples):
        with forward.policies_of(batch):
            passed = forward.reference_logprobs(batch) if reference else forward.logprobs(batch)
        rows = passed.logprobs_N.split(batch.completion_lengths)
        found.update(zip(map(id, batch.samples), rows, strict=True))
    return found


class OptimizerStep:
    """One optimizer step of one policy, from the first micro-batch to the updated weights."""

    def __init__(self, one: RoundOfPolicy, number: int) -> None:
        self.round = one
        self.samples = one.steps[number]
        self.size = one.size(number)
        self.sums = StepSums()
        """Sums over the step's micro-batches so far."""

    def begin(self) -> None:
        """Resets the gradient and the sums; called again if memory ran out half-way."""
        self.forget_gradient()
        self.sums = StepSums()

    def update(self) -> None:
        """Clips the gradient and takes the optimizer's step, unless the gradient is not finite."""
        one = self.round
        norm = torch.nn.utils.clip_grad_norm_(one.policy.parameters, one.config.grad_clip)
        if not torch.isfinite(norm):
            number = one.policy.number
            logger.warning(
                "skipped an optimizer step of policy %d: the gradient norm is %s", number, norm.item()
            )
            return
        one.optimizer.step()
        one.measured.norms.append(norm.item())
        one.measured.steps.append(self.sums)

    def forget_gradient(self) -> None:
        self.round.optimizer.zero_grad(set_to_none=True)


def take_step(steps: Sequence[OptimizerStep], known: KnownLogprobs) -> None:
    """Takes one optimizer step of one or several policies, whose samples share the micro-batches."""
    forward = steps[0].round.forward
    for guard in forward.until_it_fits(max(_longest(one.samples) for one in steps)):
        with guard:
            for one in steps:
                one.begin()
            for batch in forward.batches([sample for one in steps for sample in one.samples]):
                _add_gradients(batch, steps, known)
    for one in steps:
        one.update()
        one.forget_gradient()


def _add_gradients(batch: MicroBatch, steps: Sequence[OptimizerStep], known: KnownLogprobs) -> None:
    """Passes one micro-batch forward and backward, which adds to each policy's gradient."""
    forward = steps[0].round.forward
    of_policy = {one.round.policy.number: one for one in steps}
    with forward.policies_of(batch):
        scored = known.beside(forward.logprobs(batch), batch)
        losses: list[Tensor] = []
        for share in shares_of(batch):
            one = of_policy[share.policy]
            output, own = objective(
                batch, share, scored, one.size, one.round.config, version=one.round.policy.version
            )
            one.sums.add(output, sum(share.completion_lengths), own)
            losses.append(output.loss)
        torch.stack(losses).sum().backward()


def _longest(samples: Sequence[TrainingSample]) -> int:
    return max((sample.length for sample in samples), default=0)
