"""The samples that one policy is trained on in one round, and the measurements of that round.

a rule's Lessons -> [lesson_samples, replayed_samples] -> TrainingSample
        -> Trainer.prepare -> [RoundOfPolicy] -> take_step -> [MeasuredRound] -> TrainReport

Samples are completions with the advantage that their reward gives them. `prepare` and `take_step` are in
trainer.py; a pipeline uses extensions/pipeline/feeds/rollout_feed.py instead.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import torch
from torch import Tensor

from swarmnode.chat import Prompt, read_prompt
from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.losses import LossOutput, StepSize, group_advantages, loss_of
from swarmnode.training.off_policy import MeasuredTokens, with_off_policy
from swarmnode.training.packing import TrainingSample, completion_tokens, credited_samples
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.lessons import GroupLesson, Replay
from swarmnode.types import RolloutGroup, mean_or_none


@dataclass(slots=True)
class StepSums:
    """Sums over the micro-batches of one optimizer step of one policy. They stay on their device: reading
    one makes the device wait."""

    loss: Tensor | float = 0.0
    clipped: Tensor | float = 0
    entropy: Tensor | float = 0.0
    reference_kl: Tensor | float = 0.0
    tokens: int = 0
    own_tokens: list[MeasuredTokens] = field(default_factory=list[MeasuredTokens])

    def add(self, result: LossOutput, tokens: int, own: MeasuredTokens) -> None:
        """Adds the results of one micro-batch."""
        self.loss = self.loss + result.loss.detach()
        self.clipped = self.clipped + result.clipped
        self.entropy = self.entropy + (0.0 if result.entropy is None else result.entropy)
        self.reference_kl = self.reference_kl + (0.0 if result.kl is None else result.kl)
        self.tokens += tokens
        self.own_tokens.append(own)


@dataclass(slots=True)
class MeasuredRound:
    """The measurements of one round before they become a report."""

    started: float = field(default_factory=time.perf_counter)
    groups: Counter[tuple[str, bool]] = field(default_factory=Counter[tuple[str, bool]])
    """(own or external, has a gradient) -> number of groups."""
    learning_rate: float | None = None
    replayed: int = 0
    of_rule: TrainReport = field(default_factory=TrainReport)
    """The rule's part of the report."""
    norms: list[float] = field(default_factory=list[float])
    steps: list[StepSums] = field(default_factory=list[StepSums])
    """Optimizer steps that were taken."""

    def report(self, tokens: int, micro_batch_tokens: int, *, with_reference: bool) -> TrainReport:
        """Returns the report. `tokens`: the round's tokens; means are over the tokens of the steps that were
        taken."""
        taken = sum(step.tokens for step in self.steps)

        def per_token(name: Literal["clipped", "entropy", "reference_kl"]) -> float | None:
            return sum(float(getattr(step, name)) for step in self.steps) / taken if taken else None

        report = msgspec.structs.replace(
            self.of_rule,
            own_groups=self.groups["own", True],
            external_groups=self.groups["external", True],
            zero_advantage_own=self.groups["own", False],
            zero_advantage_external=self.groups["external", False],
            replayed=self.replayed,
            tokens=tokens,
            optimizer_steps=len(self.steps),
            learning_rate=self.learning_rate,
            loss=mean_or_none([float(step.loss) for step in self.steps]),
            grad_norm=mean_or_none(self.norms),
            clipped_share=per_token("clipped"),
            entropy=per_token("entropy"),
            reference_kl=per_token("reference_kl") if with_reference else None,
            micro_batch_tokens=micro_batch_tokens,
            seconds=time.perf_counter() - self.started,
        )
        return with_off_policy(report, [own for step in self.steps for own in step.own_tokens])


@dataclass(frozen=True, slots=True)
class RoundOfPolicy:
    """One policy, with the samples of each optimizer step to take."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    config: TrainingConfig
    forward: Forward
    max_tokens: int
    """The longest completion that the sampler allows."""
    steps: Sequence[Sequence[TrainingSample]]
    measured: MeasuredRound
    kept_share: float = 1.0
    """Share of the round's change of the weights that is kept. Below 1, the weights after the last step are
    drawn back towards those before the first, as Lookahead does (Zhang et al. 2019, arXiv:1907.08610)."""
    _before: list[Tensor] = field(default_factory=list[Tensor])
    """The weights before the round, if they are needed."""

    def __post_init__(self) -> None:
        if self.kept_share < 1:
            self._before.extend(parameter.detach().clone() for parameter in self.policy.parameters)

    def size(self, step: int) -> StepSize:
        """Returns the size that the loss of one optimizer step is divided by, no matter how the step is split
        into micro-batches."""
        samples = self.steps[step]
        return StepSize(len(samples), completion_tokens(samples), self.max_tokens)

    def finish(self) -> TrainReport:
        """Raises the policy's version by one if it took a step, draws its weights back if only a share of the
        round's change is kept, and returns the round's report."""
        self.policy.version += 1 if self.measured.steps else 0
        with torch.no_grad():
            for before, parameter in zip(self._before, self.policy.parameters, strict=False):
                parameter.lerp_(before, 1 - self.kept_share)
        tokens = sum(completion_tokens(step) for step in self.steps)
        return self.measured.report(
            tokens, self.forward.micro_batch_tokens, with_reference=self.config.kl_coef > 0
        )


@dataclass(frozen=True, slots=True)
class SampleRules:
    """Everything needed to turn lessons into samples of one policy."""

    render: Callable[[Prompt], tuple[int, ...]]
    """Returns the token ids of a prompt."""
    config: TrainingConfig
    max_tokens: int
    """The longest completion that the sampler allows."""
    end: Callable[[], int]
    """Returns our end-of-text token."""
    policy: int = 0


def credit_of(group: RolloutGroup, config: TrainingConfig) -> list[float | None] | None:
    """Returns the advantages of a group's completions, by the loss. None: all of them are equally good."""
    return group_advantages(group.rewards, loss_of(config.loss).advantage)


def lesson_samples(
    lesson: GroupLesson, rules: SampleRules, *, shaped: bool = False
) -> list[TrainingSample] | None:
    """Returns the samples of a group as its lesson credits them, or None if there is nothing to learn.
    `shaped`: weight tokens without a recorded log-probability by `token_weights.shaped_weights`.

    Samples of conversations are always shaped. A sender that plays an environment at home knows what our
    policy has to ask for. Its right answers that ask nothing, and wrong ones that ask well, are all true, and
    teach the policy to guess: held-out reward fell from 0.96 to 0.69 in ten rounds. No policy would say such
    an answer, and shaping gives next to no weight to what is all but impossible: held-out reward went to
    1.00."""
    group = lesson.group
    advantages = credit_of(group, rules.config) if lesson.advantages is None else lesson.advantages
    if advantages is None:
        return None
    samples = credited_samples(group, rules.render(group.example.prompt), advantages, policy=rules.policy)
    if lesson.gains_only:
        samples = [sample for sample in samples if sample.advantage > 0]
    if shaped or not all(isinstance(completion.said, str) for completion in group.completions):
        return [_shaped(sample) for sample in samples]
    return samples


def replayed_samples(
    replayed: Sequence[Replay], rules: SampleRules, *, shaped: bool = False
) -> Iterator[TrainingSample]:
    """Yields samples of a book's answers. Leaves out those that this policy's sampler would not have
    finished: the setting may have changed since they were found."""
    if not replayed:
        return
    end = rules.end()
    for replay in replayed:
        entry, ids = replay.entry, replay.entry.token_ids
        if len(ids) > rules.max_tokens:
            continue
        # An answer that ended for want of room after its last turn already has the end of that turn.
        if replay.ends and len(ids) < rules.max_tokens and ids[-1] != end:
            ids = (*ids, end)
        yield TrainingSample(
            rules.render(read_prompt(entry.prompt)),
            ids,
            replay.advantage,
            None,
            (),
            rules.policy,
            shaped=shaped or (entry.in_turns and not entry.own),
            given=entry.given,
            replayed=True,
        )


def _shaped(sample: TrainingSample) -> TrainingSample:
    return sample if sample.behaviour_logprobs is not None else replace(sample, shaped=True)
