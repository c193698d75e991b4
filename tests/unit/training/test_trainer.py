from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import ModelError
from swarmnode.training import trainer as trainer_module
from swarmnode.training.loss import LossOutput
from swarmnode.training.packing import to_samples
from swarmnode.training.policy import Policy
from swarmnode.training.trainer import Trainer
from swarmnode.types import RolloutGroup

GroupMaker = Callable[..., RolloutGroup]
PROMPT = (5, 6)
ANSWERS = [[7, 1], [8, 9, 1], [10, 11, 12, 1], [13, 1]]


def trainer_for(policy: Policy, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"learning_rate": 1e-2, **settings})
    return Trainer(policy, config, temperature=1.0, seed=0, render=lambda prompt: PROMPT)


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.trainable().values()])


def logprob(policy: Policy, answer: list[int]) -> float:
    logits = policy.model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits.log_softmax(-1)[0, 1:-1]
    return logits[range(len(answer)), answer].sum().item()


def test_a_rewarded_answer_becomes_likelier_and_the_others_less(policy: Policy, group: GroupMaker) -> None:
    before = [logprob(policy, answer) for answer in ANSWERS]
    trainer_for(policy).train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])
    after = [logprob(policy, answer) for answer in ANSWERS]
    assert after[0] > before[0]
    assert sum(after[1:]) < sum(before[1:])
    assert policy.version == 1


def test_the_base_model_never_moves(policy: Policy, group: GroupMaker) -> None:
    frozen = {n: p.detach().clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    trainer_for(policy).train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])
    assert all(torch.equal(p, frozen[n]) for n, p in policy.model.named_parameters() if n in frozen)


def test_a_round_without_gradient_takes_no_optimizer_step(policy: Policy, group: GroupMaker) -> None:
    trainer = trainer_for(policy)
    trainer.train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])
    before = weights(policy)
    report = trainer.train([group(ANSWERS, [1.0] * 4)], [group(ANSWERS, [0.0] * 4, author="other")])
    assert torch.equal(weights(policy), before), "Adam's momentum must not move the weights"
    assert (report.optimizer_steps, report.loss, report.grad_norm) == (0, None, None)
    assert (report.zero_advantage_own, report.zero_advantage_external) == (1, 1)
    assert policy.version == 1


def test_own_and_external_groups_are_counted_apart(policy: Policy, group: GroupMaker) -> None:
    mine, theirs = group(ANSWERS, [1.0, 0, 0, 0]), group(ANSWERS, [0, 1.0, 0, 0], author="other")
    report = trainer_for(policy).train([mine], [theirs, theirs])
    assert (report.own_groups, report.external_groups) == (1, 2)
    assert report.tokens == 3 * sum(map(len, ANSWERS))


def test_the_size_of_micro_batches_does_not_change_the_update(base: Any, group: GroupMaker) -> None:
    from swarmnode.config import PolicyConfig

    updates = []
    for tokens in (16, 64, 4096):
        policy = Policy(base_copy(base), PolicyConfig(lora_rank=4), seed=0)
        trainer_for(policy, micro_batch_tokens=tokens).train([group(ANSWERS, [1.0, 0.0, 0.5, 0.0])], [])
        updates.append(weights(policy))
    torch.testing.assert_close(updates[0], updates[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(updates[1], updates[2], atol=1e-5, rtol=0)


def test_the_same_seed_trains_the_same_policy(base: Any, group: GroupMaker) -> None:
    from swarmnode.config import PolicyConfig

    runs = []
    for _ in range(2):
        policy = Policy(base_copy(base), PolicyConfig(lora_rank=4), seed=0)
        trainer = trainer_for(policy, sequences_per_step=2)
        for _ in range(3):
            trainer.train([group(ANSWERS, [1.0, 0.0, 0.5, 0.0])], [])
        runs.append(weights(policy))
    assert torch.equal(*runs)


def test_the_ratio_is_taken_against_the_policy_before_the_round(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {tuple(answer): logprob(policy, answer) for answer in ANSWERS}
    seen: list[tuple[float, float]] = []
    original = trainer_module.clipped_policy_loss

    def spy(new: torch.Tensor, old: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append((new.detach().sum().item(), old.sum().item()))
        return original(new, old, *args, **options)

    monkeypatch.setattr(trainer_module, "clipped_policy_loss", spy)
    trainer_for(policy, sequences_per_step=1).train([group(ANSWERS, [1.0, 0.0, 0.5, 0.0])], [])
    assert len(seen) == 4
    assert sorted(old for _, old in seen) == pytest.approx(sorted(before.values()), abs=1e-4)
    assert seen[0][0] == pytest.approx(seen[0][1], abs=1e-6), "the first step starts at ratio 1"
    assert any(abs(new - old) > 1e-3 for new, old in seen[1:]), "later steps have moved away from it"


def test_out_of_memory_halves_the_micro_batch_and_finishes_the_round(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(policy, micro_batch_tokens=256)
    original = trainer_module.completion_logprobs

    def small_card(model: Any, batch: Any, temperature: float, **options: Any) -> torch.Tensor:
        if trainer.micro_batch_tokens > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, batch, temperature, **options)

    monkeypatch.setattr(trainer_module, "completion_logprobs", small_card)
    report = trainer.train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])
    assert (report.optimizer_steps, trainer.micro_batch_tokens) == (1, 64)


def test_out_of_memory_for_good_says_what_to_do(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_card(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer_module, "completion_logprobs", no_card)
    with pytest.raises(ModelError, match="smaller --model"):
        trainer_for(policy).train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])


def test_a_gradient_that_is_not_finite_is_not_applied(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = trainer_module.clipped_policy_loss

    def broken(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        return LossOutput(result.loss * float("nan"), result.clipped)

    monkeypatch.setattr(trainer_module, "clipped_policy_loss", broken)
    before = weights(policy)
    report = trainer_for(policy).train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])
    assert torch.equal(weights(policy), before)
    assert report.optimizer_steps == 0


def test_the_gap_between_engine_and_trainer_is_measured_on_own_tokens(
    policy: Policy, group: GroupMaker
) -> None:
    exact = []
    for answer in ANSWERS:
        logits = policy.model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits.log_softmax(-1)[0, 1:-1]
        exact.append(logits[range(len(answer)), answer].tolist())
    off = [[value - 0.25 for value in row] for row in exact]
    report = trainer_for(policy, learning_rate=1e-9).train([group(ANSWERS, [1.0, 0, 0, 0], logprobs=off)], [])
    assert report.engine_gap == pytest.approx(0.25, abs=1e-4)


def base_copy(base: Any) -> Any:
    import copy
    from dataclasses import replace

    return replace(base, model=copy.deepcopy(base.model))


def test_optimizer_steps_are_of_equal_size(policy: Policy, group: GroupMaker) -> None:
    trainer = trainer_for(policy, sequences_per_step=4)
    samples = to_samples(group([[7, 1]] * 9, [1.0] + [0.0] * 8), PROMPT)
    assert samples is not None
    steps = trainer._shuffled_steps(samples)
    assert [len(step) for step in steps] == [3, 3, 3]
    assert sorted(id(s) for step in steps for s in step) == sorted(map(id, samples))
