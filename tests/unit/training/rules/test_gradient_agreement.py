"""What strangers teach against what our own reward asks for: measured in passing, and it changes nothing."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training import objective as objective_module
from swarmnode.training.rules.book import Entry
from swarmnode.training.rules.lessons import Lessons, Replay, as_they_are
from swarmnode.training.rules.rules import Sapo
from swarmnode.training.trainer import Trainer, train_together
from swarmnode.types import RolloutGroup

GroupMaker = Callable[..., RolloutGroup]
PROMPT = (5, 6)
ANSWERS = [[7, 1], [8, 9, 1], [10, 11, 12, 1], [13, 1]]
REWARDS = [1.0, 0.0, 0.0, 1.0]
OPPOSITE = [0.0, 1.0, 1.0, 0.0]
LOGPROBS = [[-20.0] * len(answer) for answer in ANSWERS]
"""So unlikely that all own tokens have one weight, the largest: own gradients point where those of equal
answers of others do."""


def trainer_for(
    policy: Policy, *, compares: bool = True, beside: Trainer | None = None, **settings: Any
) -> Trainer:
    config = TrainingConfig(**{"learning_rate": 1e-2, **settings})
    return Trainer(
        policy,
        config,
        temperature=1.0,
        max_tokens=16,
        seed=0,
        render=lambda prompt: PROMPT,
        forward=None if beside is None else beside.forward,
        compares=compares,
    )


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.trainable().values()])


def nudge(policy: Policy, seed: int) -> Policy:
    """Its adapter is not the identity any more."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def policy_on(base: LoadedModel, seed: int) -> Policy:
    """A policy on a base of its own."""
    apart = replace(base, model=copy.deepcopy(base.model))
    return nudge(Policy(apart, PolicyConfig(lora_rank=4), seed=seed), seed + 10)


class Recalls(Sapo):
    """Trains on own groups, and replays one answer besides: an own one or a stranger's."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self._own = own

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
        foreign_share: float = 1.0,
    ) -> Lessons:
        entry = Entry("sum", "1", 0, 0, "prompt", (7,), 1.0, "somebody", self._own, True)
        return Lessons(as_they_are(own), (), replayed=(Replay(entry, 4.0, True),))


def test_a_stranger_who_judges_as_we_do_agrees_and_the_opposite_does_not(
    nudged: Policy, group: GroupMaker
) -> None:
    own = group(ANSWERS, REWARDS, logprobs=LOGPROBS)
    friend = trainer_for(nudged).train([own], [group(ANSWERS, REWARDS, author="friend")])
    assert friend.agreement == pytest.approx(1.0, abs=1e-4)
    other = trainer_for(nudged).train([own], [group(ANSWERS, OPPOSITE, author="other")])
    assert other.agreement == pytest.approx(-1.0, abs=1e-4)


def test_what_a_stranger_asked_for_lately_counts_as_long_as_the_momentum_holds_it(
    nudged: Policy, group: GroupMaker
) -> None:
    own = group(ANSWERS, REWARDS, logprobs=LOGPROBS)
    against, with_us = group(ANSWERS, OPPOSITE, author="other"), group(ANSWERS, REWARDS, author="friend")
    trainer = trainer_for(nudged, learning_rate=1e-6)
    for _ in range(3):
        trainer.train([own], [against])
    found = [trainer.train([own], [with_us]).agreement or 0.0 for _ in range(5)]
    assert found[0] < 0 < found[-1], "three against, then one, two, ... five for us"

    trainer.train([own], [against])
    for _ in range(60):
        trainer.train([own], [])
    assert (trainer.train([own], [with_us]).agreement or 0.0) > 0.99, "it faded while nothing came"


def test_who_asks_for_something_else_is_in_between(nudged: Policy, group: GroupMaker) -> None:
    own = group(ANSWERS, REWARDS, logprobs=LOGPROBS)
    report = trainer_for(nudged).train([own], [group([[20, 1], [21, 22, 1]], [1.0, 0.0], author="other")])
    assert report.agreement is not None
    assert -0.9 < report.agreement < 0.9


def test_without_one_of_the_two_nothing_is_known(nudged: Policy, group: GroupMaker) -> None:
    own, foreign = group(ANSWERS, REWARDS, logprobs=LOGPROBS), group(ANSWERS, REWARDS, author="other")
    trainer = trainer_for(nudged)
    assert trainer.train([own], []).agreement is None
    assert trainer.train([], [foreign]).agreement is None
    assert trainer.train([], []).agreement is None
    assert trainer_for(nudged, compares=False).train([own], [foreign]).agreement is None


def test_a_strangers_answer_in_the_book_is_compared_and_one_of_our_own_is_not(
    base: LoadedModel, group: GroupMaker
) -> None:
    def found(*, own: bool) -> float | None:
        trainer = trainer_for(policy_on(base, 0))
        trainer.rule = Recalls(own=own)
        return trainer.train([group(ANSWERS, REWARDS, logprobs=LOGPROBS)], []).agreement

    assert found(own=True) is None
    assert (found(own=False) or 0.0) > 0.2, "it is one of the answers that we found right"


@pytest.mark.parametrize("settings", [{}, {"sequences_per_step": 3}])
def test_comparing_leaves_what_is_learnt_as_it_was(
    base: LoadedModel, group: GroupMaker, settings: dict[str, Any]
) -> None:
    own = group(ANSWERS, REWARDS, logprobs=LOGPROBS)
    foreign = group([[7, 9, 1], [20, 21, 1]], [1.0, 0.0], author="other")
    found: list[torch.Tensor] = []
    for compares in (True, False):
        policy = policy_on(base, 0)
        trainer = trainer_for(policy, compares=compares, **settings)
        for _ in range(3):
            trainer.train([own], [foreign])
        found.append(weights(policy))
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)


def test_each_of_two_policies_in_one_batch_is_told_what_it_would_be_told_alone(
    base: LoadedModel, group: GroupMaker
) -> None:
    own = group(ANSWERS, REWARDS, logprobs=LOGPROBS)
    strangers = [
        group([[7, 9, 1], [20, 21, 1]], [1.0, 0.0], author="a"),
        group(ANSWERS, OPPOSITE, author="b"),
    ]
    first = Policy(replace(base, model=copy.deepcopy(base.model)), PolicyConfig(lora_rank=4), seed=0)
    second = Policy(first.base, PolicyConfig(lora_rank=4), seed=1, beside=first)
    trainers = [trainer_for(nudge(first, 10))]
    trainers.append(trainer_for(nudge(second, 11), beside=trainers[0]))
    reports = train_together(
        [trainer.prepare([own], [one]) for trainer, one in zip(trainers, strangers, strict=True)]
    )
    for number, one in enumerate(strangers):
        alone = trainer_for(policy_on(base, number)).train([own], [one])
        assert reports[number].agreement == pytest.approx(alone.agreement, abs=1e-3)


def test_a_step_that_is_computed_again_counts_once(
    base: LoadedModel, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = group(ANSWERS, REWARDS, logprobs=LOGPROBS)
    foreign = group([[7, 9, 1], [20, 21, 1]], [1.0, 0.0], author="other")
    expected = trainer_for(policy_on(base, 0)).train([own], [foreign]).agreement
    calls = 0
    loss = objective_module.policy_loss

    def fails_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(*arguments)

    monkeypatch.setattr(objective_module, "policy_loss", fails_once)
    found = trainer_for(policy_on(base, 0)).train([own], [foreign]).agreement
    assert calls > 3
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_step_that_was_not_taken_tells_nothing(
    nudged: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = group(ANSWERS, REWARDS, logprobs=LOGPROBS)
    foreign = group(ANSWERS, REWARDS, author="other")
    with torch.no_grad():
        nudged.parameters[0][0, 0] = float("inf")
    report = trainer_for(nudged).train([own], [foreign])
    assert (report.optimizer_steps, report.agreement) == (0, None)
