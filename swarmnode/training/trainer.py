"""One policy's learning: groups in, a new policy version out.

exchange, rollout -> [trainer] (Rule.lessons) -> RoundOfPolicy -> step.py -> policy.version + 1
        -> engine, checkpoint

Group-normalised advantages on LoRA parameters, an asymmetric clip, no KL unless asked for: as SAPO trains
(section 4). The ratio's denominator is our policy at the start of the round (prox). Own tokens that another
policy sampled are corrected by weight; external groups are treated as if prox had sampled them. What is
learned of a round, and what is replayed beside it, is the rule's (rules.py).
"""

import random
from collections.abc import Callable, Sequence

from swarmnode.config import TrainingConfig
from swarmnode.model.policy import Policy
from swarmnode.training.adam import adam
from swarmnode.training.foreign.agreement import Agreement
from swarmnode.training.foreign.rules import GroupLesson, Lessons, Rule, Sapo
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample
from swarmnode.training.records import TrainReport
from swarmnode.training.round import MeasuredRound, RoundOfPolicy
from swarmnode.training.samples import SampleRules, lesson_samples, replayed_samples
from swarmnode.training.step import train_round
from swarmnode.types import RolloutGroup


class Trainer:
    """Owns the optimizer of one policy's adapter. Calls block; the node has a worker thread for them."""

    def __init__(
        self,
        policy: Policy,
        config: TrainingConfig,
        *,
        temperature: float,
        top_p: float = 1.0,
        max_tokens: int,
        seed: int,
        render: Callable[[str], tuple[int, ...]],
        forward: Forward | None = None,
        rule: Rule | None = None,
        compares: bool = True,
    ) -> None:
        """`temperature`, `top_p` and `max_tokens` are those of the sampler. `forward`: that of the base,
        shared with the trainers of other policies on it; without one this policy is alone. `rule`: how it
        learns from others; None: as SAPO does. `compares`: reports tell whether others' answers pull the
        policy where its own reward does (agreement.py)."""
        self.policy = policy
        self.config = config
        self.seed = seed
        self.max_tokens = max_tokens
        self.rule = rule or Sapo()
        self._sample_rules = SampleRules(
            render, config, max_tokens, end=lambda: policy.base.eos_token_ids[0], policy=policy.number
        )
        self.optimizer = adam(policy.parameters, config.learning_rate)
        self._agreement = Agreement(self.optimizer) if compares else None
        self.forward = forward or Forward(policy, config, temperature=temperature, top_p=top_p)
        self.forward.add(policy)

    def train(
        self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup], foreign_share: float = 1.0
    ) -> TrainReport:
        """Train on the groups that have a gradient, and raise the policy version by one. `foreign_share`: how
        much of what the rule replays may be from others.

        Without a single such group, or when no gradient was finite, no step is taken and the version stays.
        """
        return train_round(self.prepare(own, external, foreign_share))

    def prepare(
        self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup], foreign_share: float = 1.0
    ) -> RoundOfPolicy:
        """The round that `train` runs; with rounds of policies beside this one it is for `train_together`."""
        lessons = self.rule.lessons(own, external, version=self.policy.version, foreign_share=foreign_share)
        if self._agreement is not None:
            self._agreement.begin_round()
        shaped = lessons.shaped
        replayed = list(replayed_samples(lessons.replayed, self._sample_rules, shaped=shaped))
        return RoundOfPolicy(
            self.policy,
            self.optimizer,
            self.config,
            self.forward,
            self.max_tokens,
            self._shuffled_steps(
                self._samples(lessons.own, shaped) + self._samples(lessons.external, shaped), replayed
            ),
            _measured(external, lessons, len(replayed)),
            self._agreement,
        )

    def _samples(self, lessons: Sequence[GroupLesson], shaped: bool) -> list[TrainingSample]:
        rules = self._sample_rules
        return [sample for one in lessons for sample in lesson_samples(one, rules, shaped=shaped) or ()]

    def _shuffled_steps(
        self, samples: Sequence[TrainingSample], replayed: Sequence[TrainingSample] = ()
    ) -> list[list[TrainingSample]]:
        """The samples of each optimizer step: as few steps as the setting allows, of equal size, because a
        last one of few samples would be noise. What is replayed is spread over the steps that there are
        anyway, or is a step of its own."""
        order, more = list(samples), list(replayed)
        chance = random.Random(f"{self.seed}:{self.policy.version}")
        chance.shuffle(order)
        chance.shuffle(more)
        count = max(-(-len(order) // self.config.sequences_per_step), 1 if more else 0)
        return [[*order[number::count], *more[number::count]] for number in range(count)]


def _measured(external: Sequence[RolloutGroup], lessons: Lessons, replayed: int) -> MeasuredRound:
    measured = MeasuredRound(
        replayed=replayed,
        book=lessons.book,
        book_foreign=lessons.book_foreign,
        mended=lessons.mended,
        refused=lessons.refused,
        pass_rates=dict(lessons.pass_rates),
    )
    measured.groups.update(("own", lesson.group.has_gradient) for lesson in lessons.own)
    measured.groups.update(("external", group.has_gradient) for group in external)
    return measured
