"""Several policies on one base that train in one batch: each must learn as if it were alone."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.errors import ModelError
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training.trainer import Trainer, train_together
from swarmnode.types import RolloutGroup

GroupMaker = Callable[..., RolloutGroup]
PROMPT = (5, 6)
ANSWERS = [[[7, 1], [8, 9, 1], [10, 11, 12, 1], [13, 1]], [[14, 1], [15, 16, 17, 18, 1], [19, 1], [20, 1]]]
REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.25, 0.0]]


def trainer_for(policy: Policy, *, beside: Trainer | None = None, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"learning_rate": 1e-2, **settings})
    return Trainer(
        policy,
        config,
        temperature=1.0,
        max_tokens=16,
        seed=0,
        render=lambda prompt: PROMPT,
        forward=None if beside is None else beside.forward,
    )


def base_like(base: LoadedModel) -> LoadedModel:
    return replace(base, model=copy.deepcopy(base.model))


def two_policies(base: LoadedModel) -> tuple[Policy, Policy]:
    """Different adapters on one base, neither of them the identity."""
    config = PolicyConfig(lora_rank=4)
    first = Policy(base_like(base), config, seed=0)
    second = Policy(first.base, config, seed=1, beside=first)
    nudge(first, seed=2)
    nudge(second, seed=3)
    return first, second


def alone(base: LoadedModel, number: int) -> Policy:
    """The same policy as the one of `two_policies`, on a base of its own."""
    policy = Policy(base_like(base), PolicyConfig(lora_rank=4), seed=number)
    nudge(policy, seed=2 + number)
    return policy


def nudge(policy: Policy, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.trainable().values()])


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1}, {"micro_batch_tokens": 16}])
def test_two_policies_in_one_batch_learn_what_each_learns_alone(
    base: LoadedModel, group: GroupMaker, settings: dict[str, Any]
) -> None:
    settings = {"sequences_per_step": 2, **settings}
    policies = two_policies(base)
    first = trainer_for(policies[0], **settings)
    trainers = (first, trainer_for(policies[1], beside=first, **settings))
    for _ in range(3):
        train_together(
            [
                trainer.prepare([group(answers, rewards)], [])
                for trainer, answers, rewards in zip(trainers, ANSWERS, REWARDS, strict=True)
            ]
        )
    for number, policy in enumerate(policies):
        single = alone(base, number)
        lonely = trainer_for(single, **settings)
        for _ in range(3):
            lonely.train([group(ANSWERS[number], REWARDS[number])], [])
        assert policy.version == single.version == 3
        torch.testing.assert_close(weights(policy), weights(single), atol=2e-5, rtol=0)


def test_a_policy_without_a_gradient_stays_where_it_is_while_the_other_learns(
    base: LoadedModel, group: GroupMaker
) -> None:
    policies = two_policies(base)
    first = trainer_for(policies[0])
    second = trainer_for(policies[1], beside=first)
    before = [weights(policy) for policy in policies]
    reports = train_together(
        [
            first.prepare([group(ANSWERS[0], [1.0] * 4)], []),
            second.prepare([group(ANSWERS[1], REWARDS[1])], []),
        ]
    )
    assert [report.optimizer_steps for report in reports] == [0, 1]
    assert [policy.version for policy in policies] == [0, 1]
    assert torch.equal(weights(policies[0]), before[0])
    assert not torch.equal(weights(policies[1]), before[1])


def test_a_policy_with_more_steps_goes_on_alone(base: LoadedModel, group: GroupMaker) -> None:
    policies = two_policies(base)
    first = trainer_for(policies[0], sequences_per_step=2)
    second = trainer_for(policies[1], beside=first, sequences_per_step=2)
    more = [group(ANSWERS[1], REWARDS[1])] * 2
    reports = train_together([first.prepare([group(ANSWERS[0], REWARDS[0])], []), second.prepare(more, [])])
    assert [report.optimizer_steps for report in reports] == [2, 4]
    assert [report.tokens for report in reports] == [11, 22]


def test_each_policy_reports_its_own_tokens(base: LoadedModel, group: GroupMaker) -> None:
    """The versions that sampled are compared with those of the policy that learns."""
    policies = two_policies(base)
    policies[0].version, policies[1].version = 3, 7
    first = trainer_for(policies[0])
    second = trainer_for(policies[1], beside=first)
    recorded = [[[-1.0] * len(answer) for answer in answers] for answers in ANSWERS]
    reports = train_together(
        [
            first.prepare([group(ANSWERS[0], REWARDS[0], logprobs=recorded[0])], []),
            second.prepare([group(ANSWERS[1], REWARDS[1], logprobs=recorded[1])], []),
        ]
    )
    assert [report.max_age for report in reports] == [3, 7]
    assert reports[0].behaviour_kl != reports[1].behaviour_kl


def test_policies_on_different_bases_cannot_train_together(base: LoadedModel) -> None:
    first = trainer_for(alone(base, 0))
    with pytest.raises(ModelError, match="one loaded base"):
        trainer_for(alone(base, 1), beside=first)


def test_the_divergence_to_the_base_is_reported_only_when_it_is_asked_for(
    base: LoadedModel, group: GroupMaker
) -> None:
    mine = group(ANSWERS[0], REWARDS[0])
    without = trainer_for(alone(base, 0)).train([mine], [])
    with_it = trainer_for(alone(base, 0), kl_coef=0.1).train([mine], [])
    assert without.reference_kl is None
    assert with_it.reference_kl is not None and with_it.reference_kl > 0
    assert without.entropy == pytest.approx(with_it.entropy)
    fresh = Policy(base_like(base), PolicyConfig(lora_rank=4), seed=0)
    at_the_start = trainer_for(fresh, kl_coef=0.1).train([mine], [])
    assert at_the_start.reference_kl == pytest.approx(0.0, abs=1e-6)
