"""What of a rollout group is learned from: completions with the advantage that their reward gives them.

RolloutGroup -> [group_samples] -> trainer.py, pipeline/stages/rollout_feed.py
"""

from swarmnode.config import TrainingConfig
from swarmnode.training.packing import TrainingSample, to_samples
from swarmnode.training.shaping import shaped_rewards
from swarmnode.types import FinishReason, RolloutGroup


def group_samples(
    group: RolloutGroup,
    prompt_ids: tuple[int, ...],
    config: TrainingConfig,
    *,
    max_tokens: int,
    policy: int = 0,
) -> list[TrainingSample] | None:
    """Samples of a group, or None where all its completions are equally good. `max_tokens`: longest
    completion that the sampler allows."""
    # By the task's rewards, as DAPO filters: how long answers are is no lesson where all are as good.
    if not group.has_gradient:
        return None
    lengths = [len(completion.token_ids) for completion in group.completions]
    finishes: list[FinishReason] = [completion.finish for completion in group.completions]
    rewards = shaped_rewards(group.rewards, lengths, finishes, max_tokens, config)
    return to_samples(group, prompt_ids, rewards=rewards, loss=config.loss, policy=policy)
