"""One policy's learning: groups in, a new policy version out.

exchange, rollout -> [trainer] -> RoundOfPolicy -> together.py -> policy.version + 1 -> engine, checkpoint

Group-normalised advantages on LoRA parameters, an asymmetric clip, no KL unless asked for: as SAPO trains
(section 4). The ratio's denominator is our policy at the start of the round (prox). Own tokens that another
policy sampled are corrected by weight; external groups are treated as if prox had sampled them.
"""

import random
from collections.abc import Callable, Sequence

import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import ModelError
from swarmnode.training.budget import is_out_of_memory
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample, to_samples
from swarmnode.training.policy import Policy
from swarmnode.training.records import TrainReport
from swarmnode.training.round import MeasuredRound, RoundOfPolicy
from swarmnode.training.shaping import shaped_rewards
from swarmnode.training.together import train_together
from swarmnode.types import FinishReason, RolloutGroup

ADAM_BETAS = (0.9, 0.99)


class Trainer:
    """Owns the optimizer of one policy's adapter. Calls block; the node has a worker thread for them."""

    def __init__(
        self,
        policy: Policy,
        config: TrainingConfig,
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        render: Callable[[str], tuple[int, ...]],
        forward: Forward | None = None,
    ) -> None:
        """`temperature` and `max_tokens` are those of the sampler. `forward`: that of the base, shared with
        the trainers of other policies on it; without one this policy is alone."""
        self.policy = policy
        self.config = config
        self.seed = seed
        self.render = render
        self.max_tokens = max_tokens
        self.optimizer = _adam(policy, config.learning_rate)
        self.forward = Forward(policy, config, temperature=temperature) if forward is None else forward
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
        # By the task's rewards, as DAPO filters: how long answers are is no lesson where all are as good.
        if not group.has_gradient:
            return None
        return to_samples(
            group,
            self.render(group.example.prompt),
            rewards=self._shaped(group),
            loss=self.config.loss,
            policy=self.policy.number,
        )

    def _shaped(self, group: RolloutGroup) -> Sequence[float | None]:
        lengths = [len(completion.token_ids) for completion in group.completions]
        finishes: list[FinishReason] = [completion.finish for completion in group.completions]
        return shaped_rewards(group.rewards, lengths, finishes, self.max_tokens, self.config)

    def _shuffled_steps(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        """As few steps as the setting allows, of equal size: a last one of few samples would be noise."""
        order = list(samples)
        random.Random(f"{self.seed}:{self.policy.version}").shuffle(order)
        count = -(-len(order) // self.config.sequences_per_step)
        return [order[number::count] for number in range(count)]


def _adam(policy: Policy, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with its moments in place: a first step that found no memory for them would leave half of them.

    Raises ModelError where there is no memory for them now.
    """
    # Fused: one pass, and no temporaries of the size of the adapter.
    optimizer = torch.optim.AdamW(
        policy.parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
    )
    try:
        for parameter in policy.parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            "no memory for the optimizer of the adapter",
            hint="lower policy.lora_rank or node.policies, or use a smaller --model",
        ) from error
    return optimizer
