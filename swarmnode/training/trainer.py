"""One policy's learning: groups in, a new policy version out.

exchange, rollout -> [trainer] -> RoundOfPolicy -> together.py -> policy.version + 1 -> engine, checkpoint

Group-normalised advantages on LoRA parameters, an asymmetric clip, no KL unless asked for: as SAPO trains
(section 4). The ratio's denominator is our policy at the start of the round (prox). Own tokens that another
policy sampled are corrected by weight; external groups are treated as if prox had sampled them.
"""

import random
from collections.abc import Callable, Sequence

from swarmnode.config import TrainingConfig
from swarmnode.training.adam import adam
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample
from swarmnode.training.policy import Policy
from swarmnode.training.records import TrainReport
from swarmnode.training.round import MeasuredRound, RoundOfPolicy
from swarmnode.training.samples import group_samples
from swarmnode.training.together import train_together
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
    ) -> None:
        """`temperature`, `top_p` and `max_tokens` are those of the sampler. `forward`: that of the base,
        shared with the trainers of other policies on it; without one this policy is alone."""
        self.policy = policy
        self.config = config
        self.seed = seed
        self.render = render
        self.max_tokens = max_tokens
        self.optimizer = adam(policy.parameters, config.learning_rate)
        self.forward = forward or Forward(policy, config, temperature=temperature, top_p=top_p)
        self.forward.add(policy)

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        """Train on the groups that have a gradient, and raise the policy version by one.

        Without a single such group, or when no gradient was finite, no step is taken and the version stays.
        """
        return train_together([self.prepare(own, external)])[0]

    def prepare(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> RoundOfPolicy:
        """The round that `train` runs, for `train_together` with rounds of policies beside this one."""
        measured = MeasuredRound()
        samples = self._samples(own, measured, "own") + self._samples(external, measured, "external")
        return RoundOfPolicy(
            self.policy,
            self.optimizer,
            self.config,
            self.forward,
            self.max_tokens,
            self._shuffled_steps(samples),
            measured,
        )

    def _samples(
        self, groups: Sequence[RolloutGroup], measured: MeasuredRound, origin: str
    ) -> list[TrainingSample]:
        samples: list[TrainingSample] = []
        for group in groups:
            found = self._samples_of(group)
            measured.groups[origin, found is not None] += 1
            samples.extend(found or ())
        return samples

    def _samples_of(self, group: RolloutGroup) -> list[TrainingSample] | None:
        return group_samples(
            group,
            self.render(group.example.prompt),
            self.config,
            max_tokens=self.max_tokens,
            policy=self.policy.number,
        )

    def _shuffled_steps(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        """As few steps as the setting allows, of equal size: a last one of few samples would be noise."""
        order = list(samples)
        random.Random(f"{self.seed}:{self.policy.version}").shuffle(order)
        count = -(-len(order) // self.config.sequences_per_step)
        return [order[number::count] for number in range(count)]
