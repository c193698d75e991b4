import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from swarmnode.errors import ModelError
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training import forward as forward_module
from swarmnode.training import objective as objective_module
from swarmnode.training import token_weights
from swarmnode.training.adam import learning_rate_at
from swarmnode.training.losses import TokenBatch
from swarmnode.training.rules.book_rule import BookRule
from swarmnode.training.rules.lessons import GroupLesson, SharingRule
from swarmnode.training.trainer import Trainer, known_before
from swarmnode.types import RolloutGroup, Span, one_span

GroupMaker = Callable[..., RolloutGroup]
PROMPT = (5, 6)
ANSWERS = [[7, 1], [8, 9, 1], [10, 11, 12, 1], [13, 1]]

NEWEST = 3
DRIFTED = [[0.1] * 2, [math.log(4.0)] * 2 + [0.5], [-0.2] * 4, [-math.log(3.0)] * 2]
"""log k of every token of ANSWERS."""
SPANS = [
    one_span(NEWEST, 2),
    (Span(1, 0, 2), Span(NEWEST, 2, 3, "stale")),
    one_span(NEWEST, 4),
    one_span(2, 2),
]


def trainer_for(policy: Policy, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"learning_rate": 1e-2, **settings})
    return Trainer(policy, config, temperature=1.0, max_tokens=16, seed=0, render=lambda prompt: PROMPT)


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.trainable().values()])


def fresh_policy(base: LoadedModel) -> Policy:
    """The same one every time."""
    return Policy(replace(base, model=copy.deepcopy(base.model)), PolicyConfig(lora_rank=4), seed=0)


def token_logprobs(policy: Policy, answer: list[int]) -> list[float]:
    logits = policy.model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits.log_softmax(-1)[0, 1:-1]
    return logits[range(len(answer)), answer].tolist()


def logprob(policy: Policy, answer: list[int]) -> float:
    return sum(token_logprobs(policy, answer))


def recorded(policy: Policy, log_ratios: Sequence[Sequence[float]]) -> list[list[float]]:
    """What was recorded of ANSWERS, if their tokens are now exp(log_ratio) times as likely as then."""
    return [
        [now - log_ratio for now, log_ratio in zip(token_logprobs(policy, answer), row, strict=True)]
        for answer, row in zip(ANSWERS, log_ratios, strict=True)
    ]


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


def test_the_size_of_micro_batches_does_not_change_the_update(base: LoadedModel, group: GroupMaker) -> None:
    updates = []
    for tokens in (16, 64, 4096):
        policy = fresh_policy(base)
        mine = group(ANSWERS, [1.0, 0.0, 0.5, 0.0], logprobs=recorded(policy, DRIFTED))
        theirs = group(ANSWERS, [0.0, 1.0, 0.5, 0.0], author="other")
        trainer = trainer_for(policy, micro_batch_tokens=tokens)
        trainer.train([mine], [theirs])
        updates.append(weights(policy))
    torch.testing.assert_close(updates[0], updates[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(updates[1], updates[2], atol=1e-5, rtol=0)


def test_the_same_seed_trains_the_same_policy(base: LoadedModel, group: GroupMaker) -> None:
    runs = []
    for _ in range(2):
        policy = fresh_policy(base)
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
    original = objective_module.policy_loss

    def spy(batch: TokenBatch, *args: Any) -> Any:
        seen.append((batch.logprobs_N.detach().sum().item(), batch.prox_N.sum().item()))
        return original(batch, *args)

    monkeypatch.setattr(objective_module, "policy_loss", spy)
    trainer_for(policy, sequences_per_step=1).train([group(ANSWERS, [1.0, 0.0, 0.5, 0.0])], [])
    assert len(seen) == 4
    assert sorted(old for _, old in seen) == pytest.approx(sorted(before.values()), abs=1e-4)
    assert seen[0][0] == pytest.approx(seen[0][1], abs=1e-6), "the first step starts at ratio 1"
    assert any(abs(new - old) > 1e-3 for new, old in seen[1:]), "later steps have moved away from it"


@pytest.mark.parametrize("sequences_per_step", [2, 4])
def test_inner_epochs_pass_over_all_answers_again_and_the_ratio_stays_against_the_policy_before(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch, sequences_per_step: int
) -> None:
    before = {len(answer): logprob(policy, answer) for answer in ([7, 1], [8, 9, 1], [10, 11, 12, 1])}
    seen: list[tuple[int, float, float]] = []
    original = objective_module.policy_loss

    def spy(batch: TokenBatch, *args: Any) -> Any:
        now, old = (
            batch.logprobs_N.detach().split(list(batch.lengths)),
            batch.prox_N.split(list(batch.lengths)),
        )
        seen.extend((len(n), n.sum().item(), o.sum().item()) for n, o in zip(now, old, strict=True))
        return original(batch, *args)

    monkeypatch.setattr(objective_module, "policy_loss", spy)
    answers = [[7, 1], [8, 9, 1], [10, 11, 12, 1]]
    trainer = trainer_for(policy, sequences_per_step=sequences_per_step, inner_epochs=3)
    report = trainer.train([group(answers, [1.0, 0.0, 0.5])], [])
    assert sorted(length for length, _, _ in seen) == sorted(3 * [2, 3, 4])
    assert report.optimizer_steps == 3 * (2 if sequences_per_step == 2 else 1)
    for length, _, old in seen:
        assert old == pytest.approx(before[length], abs=1e-4), "the denominator moves with no epoch"
    assert all(abs(now - old) > 1e-3 for _, now, old in seen[-3:]), "the policy has moved by the last epoch"
    assert policy.version == 1, "they are one round"


def test_one_inner_epoch_is_the_round_as_it_always_was(base: LoadedModel, group: GroupMaker) -> None:
    trained: list[torch.Tensor] = []
    for settings in (
        {},
        {"inner_epochs": 1, "schedule": "constant", "warmup_rounds": 0},
    ):
        policy = fresh_policy(base)
        trainer_for(policy, sequences_per_step=2, **settings).train([group(ANSWERS, [1.0, 0, 0.5, 0])], [])
        trained.append(weights(policy))
    assert torch.equal(*trained)


def test_the_learning_rate_follows_its_schedule_and_goes_on_with_the_version(
    base: LoadedModel, group: GroupMaker
) -> None:
    def learnt(policy: Policy, rounds: int) -> list[float | None]:
        config = TrainingConfig(learning_rate=1.0e-2, schedule="linear", warmup_rounds=2)
        trainer = Trainer(
            policy, config, temperature=1.0, max_tokens=16, seed=0, render=lambda prompt: PROMPT, rounds=6
        )
        mine = group(ANSWERS, [1.0, 0.0, 0.5, 0.0])
        return [trainer.train([mine], []).learning_rate for _ in range(rounds)]

    policy = fresh_policy(base)
    whole = [0.5e-2, 1e-2, 1e-2, 0.75e-2, 0.5e-2, 0.25e-2]
    assert learnt(policy, 4) == pytest.approx(whole[:4])
    # A trainer that was started again finds the version in its checkpoint.
    assert learnt(policy, 2) == pytest.approx(whole[4:])


def test_a_smaller_learning_rate_moves_the_policy_less(base: LoadedModel, group: GroupMaker) -> None:
    moved: list[float] = []
    for warmup in (0, 10):
        policy = fresh_policy(base)
        before = weights(policy)
        trainer_for(policy, warmup_rounds=warmup).train([group(ANSWERS, [1.0, 0.0, 0.5, 0.0])], [])
        moved.append((weights(policy) - before).norm().item())
    assert moved[1] == pytest.approx(moved[0] / 10, rel=0.01)


def test_half_a_cosine_falls_slowly_then_fast_then_slowly_and_never_to_zero() -> None:
    config = TrainingConfig(learning_rate=1.0, schedule="cosine")
    rates = [learning_rate_at(config, done, rounds=8) for done in range(9)]
    falls = [before - after for before, after in pairwise(rates)]
    assert rates[0] == 1.0 and rates[4] == pytest.approx(0.5) and 0 < rates[7] == rates[8]
    assert falls[0] < falls[3] > falls[6] > 0


def test_out_of_memory_halves_the_micro_batch_and_finishes_the_round(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(policy, micro_batch_tokens=256)
    original = forward_module.completion_logprobs

    def small_card(model: Any, batch: Any, temperature: float, **options: Any) -> Any:
        if trainer.forward.micro_batch_tokens > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, batch, temperature, **options)

    monkeypatch.setattr(forward_module, "completion_logprobs", small_card)
    report = trainer.train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])
    assert (report.optimizer_steps, report.micro_batch_tokens) == (1, 64)


def test_out_of_memory_for_good_says_what_to_do(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_card(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(forward_module, "completion_logprobs", no_card)
    with pytest.raises(ModelError, match="smaller --model"):
        trainer_for(policy).train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])


def test_a_gradient_that_is_not_finite_is_neither_applied_nor_measured(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = objective_module.policy_loss

    def broken(*args: Any) -> Any:
        result = original(*args)
        return replace(result, loss=result.loss * float("nan"))

    monkeypatch.setattr(objective_module, "policy_loss", broken)
    before = weights(policy)
    mine = group(ANSWERS, [1.0, 0.0, 0.0, 0.0], logprobs=recorded(policy, DRIFTED))
    report = trainer_for(policy).train([mine], [])
    assert torch.equal(weights(policy), before)
    assert (report.optimizer_steps, report.behaviour_kl, report.off_policy_share) == (0, None, None)


def test_no_weight_is_corrected_when_the_policy_sampled_its_own_tokens(
    policy: Policy, group: GroupMaker
) -> None:
    exact = recorded(policy, [[0.0] * len(answer) for answer in ANSWERS])
    report = trainer_for(policy).train([group(ANSWERS, [1.0, 0.0, 0.5, 0.0], logprobs=exact)], [])
    assert report.corrected_share == 0
    assert report.effective_sample_size == pytest.approx(1.0, abs=1e-5)


def test_a_strangers_tokens_are_not_measured(policy: Policy, group: GroupMaker) -> None:
    report = trainer_for(policy).train([], [group(ANSWERS, [1.0, 0.0, 0.5, 0.0], author="other")])
    assert (report.corrected_share, report.off_policy_share, report.effective_sample_size) == (None,) * 3


def test_a_weight_scales_the_gradient_of_its_tokens(
    policy: Policy, group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens were half as likely when they were sampled as now: k = 2."""
    doubled = recorded(policy, [[math.log(2.0)] * len(answer) for answer in ANSWERS])
    norms: dict[float, float] = {}
    for cap in (1.0, 1.5, 9.0):
        monkeypatch.setattr(token_weights, "LARGEST_WEIGHT", cap)
        trainer = trainer_for(policy, learning_rate=1e-12)
        report = trainer.train([group(ANSWERS, [1.0, 0.0, 0.5, 0.0], logprobs=doubled)], [])
        norms[cap] = report.grad_norm or 0.0
    assert norms[1.0] > 0
    assert norms[1.5] == pytest.approx(1.5 * norms[1.0], rel=1e-4)
    assert norms[9.0] == pytest.approx(2.0 * norms[1.0], rel=1e-4)


@pytest.mark.parametrize("sequences_per_step", [1, 2, 128])
def test_the_report_tells_how_far_the_own_tokens_were_from_the_policy_before_the_round(
    policy: Policy, group: GroupMaker, sequences_per_step: int
) -> None:
    """Eleven own tokens: six by the newest version with fresh keys, one with stale ones, four by older ones.
    Strangers count versions of their own, and later steps have moved away: neither shows."""
    policy.version = NEWEST
    mine = group(ANSWERS, [1.0, 0, 0, 0], logprobs=recorded(policy, DRIFTED), spans=SPANS)
    theirs = group(ANSWERS, [0, 1.0, 0, 0], author="other", spans=[one_span(77, len(a)) for a in ANSWERS])
    report = trainer_for(policy, sequences_per_step=sequences_per_step).train([mine], [theirs])

    assert report.off_policy_share == pytest.approx(4 / 11)
    assert report.mean_age == pytest.approx((2 * 2 + 2 * 1) / 11)
    assert report.max_age == 2
    assert report.stale_kv_share == pytest.approx(1 / 11)
    assert report.engine_gap == pytest.approx((2 * 0.1 + 4 * 0.2) / 6, abs=1e-5)
    engine = 2 * (math.exp(0.1) - 1 - 0.1) + 4 * (math.exp(-0.2) - 1 + 0.2)
    assert report.engine_kl == pytest.approx(engine / 6, abs=1e-5)
    older = 2 * (4 - 1 - math.log(4)) + (math.exp(0.5) - 1 - 0.5) + 2 * (1 / 3 - 1 + math.log(3))
    assert report.behaviour_kl == pytest.approx((engine + older) / 11, abs=1e-5)
    ratios = [math.exp(log_ratio) for row in DRIFTED for log_ratio in row]
    share = sum(ratios) ** 2 / (11 * sum(ratio**2 for ratio in ratios))
    assert report.effective_sample_size == pytest.approx(share, abs=1e-5)


def test_the_report_counts_truncated_tokens(policy: Policy, group: GroupMaker) -> None:
    mine = group(ANSWERS, [1.0, 0, 0, 0], logprobs=recorded(policy, DRIFTED))
    assert trainer_for(policy).train([mine], []).corrected_share == pytest.approx(2 / 11)


def test_optimizer_steps_are_of_equal_size(policy: Policy, group: GroupMaker) -> None:
    trainer = trainer_for(policy, sequences_per_step=4)
    samples = trainer._samples([GroupLesson(group([[7, 1]] * 9, [1.0] + [0.0] * 8))], False)
    steps = trainer._shuffled_steps(samples)
    assert [len(step) for step in steps] == [3, 3, 3]
    assert sorted(id(s) for step in steps for s in step) == sorted(map(id, samples))


def test_replayed_answers_may_have_steps_of_their_own_at_a_part_of_the_learning_rate(
    policy: Policy, group: GroupMaker
) -> None:
    trainer = trainer_for(policy)
    rule = BookRule(SharingRule(book_replayed=1))
    rule.replayed, rule.step_answers = 4, 1
    trainer.rule, trainer.rate_share = rule, 0.5
    report = trainer.train([group(ANSWERS, [1.0, 1.0, 1.0, 0.0])], [])
    assert (report.optimizer_steps, report.replayed) == (3, 3)
    assert report.learning_rate == pytest.approx(0.5e-2)
    rule.step_answers, trainer.rate_share = None, 1.0
    usual = trainer.train([group(ANSWERS, [1.0, 0.0, 0.0, 0.0])], [])
    assert (usual.optimizer_steps, usual.learning_rate) == (1, pytest.approx(1e-2))


def test_a_share_of_what_a_round_of_several_steps_changes_can_be_kept(
    base: LoadedModel, group: GroupMaker
) -> None:
    own = [group(ANSWERS, [1.0, 0.0, 0.0, 0.0])]
    before = weights(fresh_policy(base))

    def change(share: float) -> torch.Tensor:
        policy = fresh_policy(base)
        trainer = trainer_for(policy, sequences_per_step=2)
        trainer.kept_share = share
        assert trainer.train(own, []).optimizer_steps == 2
        return weights(policy) - before

    whole = change(1.0)
    assert whole.any()
    torch.testing.assert_close(change(0.25), 0.25 * whole)


def test_the_ratio_bounds_own_samples_of_later_steps_and_no_replayed_ones(
    policy: Policy, group: GroupMaker
) -> None:
    trainer = trainer_for(policy)
    trainer.rule = BookRule(SharingRule(book_replayed=4, step_answers=1))
    recorded_ = recorded(policy, DRIFTED)
    one = trainer.prepare([group(ANSWERS, [1.0, 1.0, 1.0, 0.0], logprobs=recorded_)], [])
    later = [sample for step in one.steps[1:] for sample in step]
    assert {sample.replayed for sample in later} == {True, False}
    bounded = {id(sample) for sample in later if not sample.replayed}
    assert known_before([one]).prox.keys() == bounded
