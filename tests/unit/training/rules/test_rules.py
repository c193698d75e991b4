"""What the rules come to in a step: which samples there are, and what they do to a policy."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training.packing import TrainingSample
from swarmnode.training.records import TrainReport
from swarmnode.training.round import RoundOfPolicy
from swarmnode.training.rules.rules import SharingRule, make_rule
from swarmnode.training.token_weights import SHAPING, shaped_weights
from swarmnode.training.trainer import Trainer, train_together
from swarmnode.types import RolloutGroup
from tests.answered import EOS, foreign, own

PROMPT = (5, 6)
HACPO = "examples.rules.hacpo:Hacpo"
WRONG, RIGHT = ([8, 9], 0.0), ([7, 7], 1.0)
MINE = own(RIGHT, WRONG, WRONG, WRONG, index=0)
THEIRS = foreign(([20, 21], 1.0), ([30, 31], 0.0), ([32, 33], 0.0), index=5)


def trainer_for(
    policy: Policy,
    name: str | None,
    *,
    beside: Trainer | None = None,
    step: int = 128,
    micro_batch_tokens: int = 4096,
    **settings: Any,
) -> Trainer:
    config = TrainingConfig(
        learning_rate=1e-2, sequences_per_step=step, micro_batch_tokens=micro_batch_tokens
    )
    return Trainer(
        policy,
        config,
        temperature=1.0,
        max_tokens=8,
        seed=0,
        render=lambda prompt: PROMPT,
        forward=None if beside is None else beside.forward,
        rule=None if name is None else make_rule(SharingRule(name, **settings), seed=0),
    )


def fresh(base: LoadedModel) -> Policy:
    return Policy(replace(base, model=copy.deepcopy(base.model)), PolicyConfig(lora_rank=4), seed=0)


def samples(taught: RoundOfPolicy) -> list[TrainingSample]:
    return [sample for step in taught.steps for sample in step]


def texts(found: Sequence[TrainingSample]) -> set[tuple[int, ...]]:
    return {sample.completion_ids for sample in found}


@torch.no_grad()
def logprob(policy: Policy, answer: Sequence[int]) -> float:
    ids = torch.tensor([[*PROMPT, *answer]])
    logits = policy.model(input_ids=ids).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    return float(logits[range(len(answer)), list(answer)].sum())


def train(policy: Policy, name: str | None, rounds: int = 1, **settings: Any) -> list[TrainReport]:
    trainer = trainer_for(policy, name, **settings)
    return [trainer.train([MINE], [THEIRS]) for _ in range(rounds)]


def test_without_a_rule_it_is_sapo(base: LoadedModel) -> None:
    plain, sapo = fresh(base), fresh(base)
    train(plain, None, 3)
    train(sapo, "sapo", 3)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters, sapo.parameters, strict=True))


def test_under_sapo_a_strangers_failures_are_pushed_down_and_under_successes_they_are_not_there(
    policy: Policy,
) -> None:
    sapo = trainer_for(policy, "sapo").prepare([MINE], [THEIRS])
    successes = trainer_for(policy, "successes").prepare([MINE], [THEIRS])
    assert {(30, 31), (32, 33), (20, 21)} <= texts(samples(sapo))
    kept = samples(successes)
    assert (20, 21) in texts(kept) and not {(30, 31), (32, 33)} & texts(kept)
    own_samples = [sample for sample in kept if sample.behaviour_logprobs is not None]
    assert len(own_samples) == 4, "our own failures stay"
    credit = {s.completion_ids: s.advantage for s in samples(sapo)}
    assert all(sample.advantage == credit[sample.completion_ids] for sample in kept)


def test_the_book_makes_verified_answers_likelier_and_leaves_strangers_failures_alone(
    base: LoadedModel,
) -> None:
    taught, alone = fresh(base), fresh(base)
    before = logprob(taught, [20, 21, EOS])
    report = train(taught, "book", 10)[-1]
    trainer = trainer_for(alone, "book")
    for _ in range(10):
        trainer.train([MINE], [])
    assert logprob(taught, [20, 21, EOS]) > before + 1
    assert logprob(taught, [20, 21, EOS]) > logprob(alone, [20, 21, EOS]) + 1
    assert (report.replayed, report.book, report.book_foreign) == (2, 2, 1)
    assert (report.own_groups, report.external_groups) == (1, 1)
    assert report.pass_rates == {"sum": pytest.approx(0.25)}


def test_replayed_answers_have_no_behaviour_and_end_where_there_is_room(policy: Policy) -> None:
    full = foreign((range(10, 18), 1.0), WRONG, index=6)
    taught = samples(trainer_for(policy, "book", book_weight=3.0).prepare([MINE], [THEIRS, full]))
    replayed = [sample for sample in taught if sample.behaviour_logprobs is None]
    assert texts(replayed) == {(7, 7, EOS), (20, 21, EOS), tuple(range(10, 18))}
    assert {sample.advantage for sample in replayed} == {3.0}


def test_without_taught_ends_a_strangers_answer_has_none(policy: Policy) -> None:
    taught = samples(trainer_for(policy, "book", teach_ends=False).prepare([MINE], [THEIRS]))
    replayed = [sample for sample in taught if sample.behaviour_logprobs is None]
    assert texts(replayed) == {(7, 7, EOS), (20, 21)}


def test_what_our_sampler_would_not_finish_any_more_is_not_replayed(policy: Policy) -> None:
    long = foreign((range(10, 30), 1.0), WRONG, index=6)
    prepared = trainer_for(policy, "book").prepare([MINE], [long])
    assert prepared.measured.replayed == 1 and prepared.measured.of_rule.book == 2


@pytest.mark.parametrize(("own_groups", "steps"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_replayed_answers_come_on_top_and_make_no_more_steps(
    policy: Policy, own_groups: int, steps: int
) -> None:
    mine = [own(([7, n], 1.0), WRONG, WRONG, WRONG, index=n) for n in range(10, 10 + own_groups)]
    trainer = trainer_for(policy, "book", step=4)
    trainer.prepare([], [foreign(([n], 1.0), ([8], 0.0), index=n) for n in range(20)])
    taught = trainer.prepare(mine, [])
    assert [sum(s.behaviour_logprobs is not None for s in step) for step in taught.steps] == (
        [4] * own_groups if own_groups else [0]
    )
    replayed = [sum(s.behaviour_logprobs is None for s in step) for step in taught.steps]
    assert len(replayed) == steps and max(replayed) - min(replayed) <= 1
    assert sum(replayed) == 20 + own_groups


def test_a_round_with_nothing_to_learn_and_an_empty_book_takes_no_step(policy: Policy) -> None:
    report = trainer_for(policy, "book").train([own(WRONG, WRONG)], [])
    assert (report.optimizer_steps, report.replayed, policy.version) == (0, 0, 0)
    assert report.zero_advantage_own == 1


def test_the_advantages_of_hacpo_are_what_is_trained_with(policy: Policy) -> None:
    trainer = trainer_for(policy, HACPO)
    (lesson,) = trainer.rule.lessons([MINE], [THEIRS], version=0).external
    taught = samples(trainer_for(policy, HACPO).prepare([MINE], [THEIRS]))
    found = [sample.advantage for sample in taught if sample.behaviour_logprobs is None]
    assert lesson.advantages is not None
    assert sorted(found) == pytest.approx(sorted(a for a in lesson.advantages if a is not None))


def test_shaping_weighs_foreign_tokens_by_how_likely_they_are_and_no_own_ones(policy: Policy) -> None:
    taught = samples(trainer_for(policy, "sapo", shaped=True).prepare([MINE], [THEIRS]))
    assert {(s.behaviour_logprobs is None, s.shaped) for s in taught} == {(True, True), (False, False)}
    plain = trainer_for(policy, "sapo").train([], [THEIRS]).grad_norm
    shaped = trainer_for(policy, "sapo", shaped=True).train([], [THEIRS]).grad_norm
    assert plain is not None and shaped is not None and 0 < shaped < plain / 4 + 1e-6


def test_shaped_weights_are_the_gradient_of_luffys_objective() -> None:
    logprobs = torch.tensor([-7.0, -2.3, -0.7, -0.01], dtype=torch.float64, requires_grad=True)
    probability = logprobs.exp()
    (probability / (probability + SHAPING)).sum().backward()
    torch.testing.assert_close(shaped_weights(logprobs), logprobs.grad)
    assert float(shaped_weights(torch.linspace(-12, 0, 999)).max()) <= 0.25


def test_policies_that_train_together_have_each_a_rule_of_its_own(base: LoadedModel) -> None:
    config = PolicyConfig(lora_rank=4)
    shared = replace(base, model=copy.deepcopy(base.model))
    first = Policy(shared, config, seed=0)
    second = Policy(shared, config, seed=0, beside=first)
    one = trainer_for(first, "book", shaped=True)
    two = trainer_for(second, "successes", beside=one)
    reports = train_together([one.prepare([MINE], [THEIRS]), two.prepare([MINE], [THEIRS])])
    assert [report.replayed for report in reports] == [2, 0]
    alone = Policy(replace(base, model=copy.deepcopy(base.model)), config, seed=0)
    trainer_for(alone, "book", shaped=True).train([MINE], [THEIRS])
    for together, apart in zip(first.parameters, alone.parameters, strict=True):
        torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)


def test_the_size_of_micro_batches_does_not_change_what_shaped_answers_teach(base: LoadedModel) -> None:
    updates: list[torch.Tensor] = []
    for tokens in (16, 4096):
        policy = fresh(base)
        trainer_for(policy, "book", shaped=True, micro_batch_tokens=tokens).train([MINE], [THEIRS])
        updates.append(torch.cat([p.detach().flatten() for p in policy.parameters]))
    torch.testing.assert_close(updates[0], updates[1], atol=1e-5, rtol=0)


def hostile_rounds() -> list[tuple[str, list[RolloutGroup]]]:
    spam = [foreign(([20, 21, n], 1.0), ([8], 0.0), index=n, author="spam") for n in range(30)]
    endings = [foreign(([20], 1.0), ([30, 31, 32, 33], 0.0), index=n, author="liar") for n in range(30)]
    hopeless = [foreign(*[([30, n], 0.0)] * 63, ([20], 1.0), index=n, author="odds") for n in range(9)]
    return [("spam", spam), ("endings", endings), ("one success among 64", hopeless)]


@pytest.mark.parametrize(("attack", "groups"), hostile_rounds())
def test_no_foreign_answer_has_more_credit_than_the_rule_gives(
    policy: Policy, attack: str, groups: list[RolloutGroup]
) -> None:
    trainer = trainer_for(policy, "book")
    trainer.prepare([own(RIGHT, WRONG, index=100), own(RIGHT, WRONG, index=101)], groups)
    taught = samples(trainer.prepare([own(*[WRONG] * 8, index=3)], []))
    credit = [sample.advantage for sample in taught if sample.behaviour_logprobs is None]
    assert credit and all(0 < advantage <= 4 for advantage in credit), attack
