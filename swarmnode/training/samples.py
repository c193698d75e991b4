"""What of a rollout group is learned from: completions with the advantage that their reward gives them.

RolloutGroup, or a rule's Lessons -> [group_samples, lesson_samples, replayed_samples]
        -> trainer.py, pipeline/stages/rollout_feed.py
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from swarmnode.config import TrainingConfig
from swarmnode.training.foreign.lessons import GroupLesson, Replay
from swarmnode.training.losses import loss_of
from swarmnode.training.packing import TrainingSample, credited_samples, to_samples
from swarmnode.types import FinishReason, RolloutGroup, one_span


@dataclass(frozen=True, slots=True)
class SampleRules:
    """What makes samples of lessons, for one policy."""

    render: Callable[[str], tuple[int, ...]]
    """Token ids of a prompt."""
    config: TrainingConfig
    max_tokens: int
    """Longest completion that the sampler allows."""
    end: Callable[[], int]
    """Our end of text."""
    policy: int = 0


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
    rewards = group.rewards
    if config.overlong_tokens:
        from swarmnode.training.shaping import shaped_rewards

        lengths = [len(completion.token_ids) for completion in group.completions]
        finishes: list[FinishReason] = [completion.finish for completion in group.completions]
        rewards = shaped_rewards(rewards, lengths, finishes, max_tokens, config)
    advantage = loss_of(config.loss).advantage
    return to_samples(group, prompt_ids, rewards=rewards, advantage=advantage, policy=policy)


def lesson_samples(
    lesson: GroupLesson, rules: SampleRules, *, shaped: bool = False
) -> list[TrainingSample] | None:
    """Samples of a group as a rule wants it learned from, or None where there is nothing to learn. `shaped`:
    tokens without a recorded log-probability are weighed by `corrections.shaped_weights`."""
    group = lesson.group
    if not group.has_gradient and lesson.advantages is None:
        return None
    if lesson.end_foreign:
        group = with_ends(group, rules)
    prompt_ids = rules.render(group.example.prompt)
    if lesson.advantages is not None:
        samples = credited_samples(group, prompt_ids, lesson.advantages, policy=rules.policy)
    else:
        found = group_samples(
            group, prompt_ids, rules.config, max_tokens=rules.max_tokens, policy=rules.policy
        )
        samples = found or []
    if lesson.gains_only:
        samples = [sample for sample in samples if sample.advantage > 0]
    return [_shaped(sample) for sample in samples] if shaped else samples


def replayed_samples(
    replayed: Sequence[Replay], rules: SampleRules, *, shaped: bool = False
) -> Iterator[TrainingSample]:
    """Samples of a book's answers. Those that this policy's sampler would not have finished are left out: the
    setting may have changed since they were found."""
    for replay in replayed:
        if len(replay.token_ids) > rules.max_tokens:
            continue
        ids = replay.token_ids
        if replay.ends and len(ids) < rules.max_tokens:
            ids = (*ids, rules.end())
        prompt_ids = rules.render(replay.prompt)
        yield TrainingSample(
            prompt_ids, ids, replay.advantage, None, (), rules.policy, shaped=shaped, recalled=replay.own
        )


def with_ends(group: RolloutGroup, rules: SampleRules) -> RolloutGroup:
    """The group with our end of text behind the answers of strangers, where there is room for it."""
    completions = tuple(
        replace(
            completion,
            token_ids=(*completion.token_ids, rules.end()),
            spans=one_span(group.policy_version, len(completion.token_ids) + 1),
            finish="stop",
        )
        if completion.logprobs is None
        and completion.finish == "length"
        and 0 < len(completion.token_ids) < rules.max_tokens
        else completion
        for completion in group.completions
    )
    return replace(group, completions=completions)


def _shaped(sample: TrainingSample) -> TrainingSample:
    return sample if sample.behaviour_logprobs is not None else replace(sample, shaped=True)
