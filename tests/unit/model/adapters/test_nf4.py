"""Training on a base whose weights are packed: PEFT's own forward, and one policy per micro-batch."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training.packing import TrainingSample
from swarmnode.training.trainer import Trainer, train_together
from swarmnode.types import RolloutGroup
from tests.packed import in_bytes, in_nf4

GroupMaker = Callable[..., RolloutGroup]
ANSWERS = [[[7, 1], [8, 9, 1], [10, 11, 12, 1]], [[14, 1], [15, 16, 17, 18, 1], [19, 1]]]
REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.25]]
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "kl_coef": 0.1, "sequences_per_step": 2}


@pytest.fixture(params=["bytes", "nf4"])
def packed(request: pytest.FixtureRequest, base: LoadedModel, tmp_path: Path) -> Callable[[], LoadedModel]:
    """Makes the same packed base again and again: policies change what they are put on."""
    if request.param == "nf4":
        return lambda: replace(base, model=in_nf4(base.model, tmp_path))
    return lambda: replace(base, model=in_bytes(copy.deepcopy(base.model)))


def policy_on(base: LoadedModel, number: int, beside: Policy | None = None) -> Policy:
    policy = Policy(base, PolicyConfig(lora_rank=4), seed=number, beside=beside)
    torch.manual_seed(20 + number)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def trainer_for(policy: Policy, beside: Trainer | None = None) -> Trainer:
    return Trainer(
        policy,
        TrainingConfig(**SETTINGS),
        temperature=1.0,
        max_tokens=16,
        seed=0,
        render=lambda prompt: (5, 6),
        forward=None if beside is None else beside.forward,
    )


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.trainable().values()])


def test_packed_layers_keep_the_forward_of_peft_and_policies_do_not_mix(
    packed: Callable[[], LoadedModel],
) -> None:
    first = policy_on(packed(), 0)
    second = policy_on(first.base, 1, beside=first)
    trainer = trainer_for(first)
    trainer_for(second, beside=trainer)
    assert not first.fuse().covers_all
    assert not trainer.forward.mixes_policies
    samples = [TrainingSample((5, 6), (7, 8), 1.0, None, (), number % 2) for number in range(6)]
    batches = list(trainer.forward.batches(samples))
    assert [{sample.policy for sample in batch.samples} for batch in batches] == [{0}, {1}]


def test_two_policies_on_packed_weights_learn_what_each_learns_alone(
    packed: Callable[[], LoadedModel], group: GroupMaker
) -> None:
    first = policy_on(packed(), 0)
    second = policy_on(first.base, 1, beside=first)
    trainer = trainer_for(first)
    trainers = (trainer, trainer_for(second, beside=trainer))
    start = weights(first), weights(second)
    for _ in range(2):
        train_together(
            [
                trainer.prepare([group(answers, rewards)], [])
                for trainer, answers, rewards in zip(trainers, ANSWERS, REWARDS, strict=True)
            ]
        )
    for number, policy in enumerate((first, second)):
        single = policy_on(packed(), number)
        lonely = trainer_for(single)
        for _ in range(2):
            lonely.train([group(ANSWERS[number], REWARDS[number])], [])
        assert policy.version == single.version == 2
        assert not torch.equal(weights(policy), start[number])
        torch.testing.assert_close(weights(policy), weights(single), atol=2e-5, rtol=0)
