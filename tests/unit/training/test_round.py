"""What a round of one policy is made of, and what it comes to in its report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import torch

from swarmnode.chat import Turn
from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.losses import LossOutput, StepSize
from swarmnode.training.off_policy import MeasuredTokens
from swarmnode.training.packing import TrainingSample
from swarmnode.training.records import TrainReport
from swarmnode.training.round import (
    MeasuredRound,
    RoundOfPolicy,
    SampleRules,
    StepSums,
    lesson_samples,
    replayed_samples,
)
from swarmnode.training.rules.book import Entry
from swarmnode.training.rules.lessons import GroupLesson, Replay
from tests.answered import foreign, own

EOS = 1
LONGEST = 4


def found(loss: float, clipped: int, kl: float | None = None, entropy: float | None = None) -> LossOutput:
    return LossOutput(
        torch.tensor(loss, requires_grad=True),
        torch.tensor(clipped),
        None if kl is None else torch.tensor(kl),
        None if entropy is None else torch.tensor(entropy),
    )


def measured(*ages: int) -> MeasuredTokens:
    count = len(ages)
    none = torch.zeros(count, dtype=torch.bool)
    return MeasuredTokens(torch.zeros(count, dtype=torch.float64), torch.tensor(ages), none, none)


def step_of(*parts: tuple[LossOutput, int, MeasuredTokens]) -> StepSums:
    sums = StepSums()
    for result, tokens, own_tokens in parts:
        sums.add(result, tokens, own_tokens)
    return sums


def test_a_step_is_the_sum_of_its_micro_batches() -> None:
    step = step_of(
        (found(1.0, 2, 0.5, 3.0), 5, measured(0)),
        (found(-0.25, 1), 3, measured(1)),
        (found(0.25, 1, 0.25, 1.0), 2, measured(2)),
    )
    assert (float(step.loss), float(step.clipped), step.tokens) == (1.0, 4, 10)
    assert (float(step.entropy), float(step.reference_kl)) == (4.0, 0.75)
    assert [int(part.age_M) for part in step.own_tokens] == [0, 1, 2]
    assert isinstance(step.loss, torch.Tensor) and not step.loss.requires_grad


def test_the_report_is_of_the_steps_that_were_taken_and_of_all_of_their_tokens() -> None:
    one = MeasuredRound(learning_rate=0.5, replayed=7, of_rule=TrainReport(book=3), norms=[1.0, 2.0])
    one.groups = Counter({("own", True): 1, ("own", False): 2, ("external", True): 3, ("external", False): 4})
    one.steps = [
        step_of((found(1.0, 2, 0.5, 3.0), 6, measured(0, 0))),
        step_of((found(3.0, 1, 1.5, 1.0), 2, measured(1, 3))),
    ]
    report = one.report(20, 64, with_reference=True)
    assert (report.own_groups, report.zero_advantage_own) == (1, 2)
    assert (report.external_groups, report.zero_advantage_external) == (3, 4)
    assert (report.tokens, report.micro_batch_tokens, report.optimizer_steps) == (20, 64, 2)
    assert (report.learning_rate, report.replayed, report.book) == (0.5, 7, 3)
    assert (report.loss, report.grad_norm) == (2.0, 1.5)
    assert (report.clipped_share, report.entropy, report.reference_kl) == (3 / 8, 4 / 8, 2 / 8)
    assert (report.off_policy_share, report.max_age) == (0.5, 3)
    assert one.report(20, 64, with_reference=False).reference_kl is None


def test_of_a_round_without_a_step_nothing_was_measured() -> None:
    report = MeasuredRound().report(20, 64, with_reference=True)
    assert (report.tokens, report.optimizer_steps) == (20, 0)
    assert (report.loss, report.grad_norm, report.clipped_share, report.entropy) == (None,) * 4
    assert (report.reference_kl, report.off_policy_share) == (None, None)


@dataclass
class Weights:
    """As much of a policy as a round needs."""

    parameters: list[torch.Tensor] = field(default_factory=lambda: [torch.tensor([1.0, 2.0])])
    version: int = 3


@dataclass(frozen=True)
class Batches:
    """As much of a forward pass as a report needs."""

    micro_batch_tokens: int = 64


def sample(completion: int) -> TrainingSample:
    return TrainingSample((5,), (7,) * completion, 1.0, None, ())


def round_of(
    policy: Weights, steps: Sequence[Sequence[TrainingSample]], *, kl_coef: float = 0.0, kept: float = 1.0
) -> RoundOfPolicy:
    return RoundOfPolicy(
        cast(Policy, policy),
        torch.optim.SGD(policy.parameters),
        TrainingConfig(kl_coef=kl_coef),
        cast(Forward, Batches()),
        LONGEST,
        steps,
        MeasuredRound(),
        kept,
    )


def test_each_step_has_a_size_of_its_own() -> None:
    one = round_of(Weights(), [[sample(1), sample(3)], [sample(2)]])
    assert [one.size(step) for step in (0, 1)] == [StepSize(2, 4, LONGEST), StepSize(1, 2, LONGEST)]


def test_a_round_without_a_step_leaves_the_version_and_tells_of_all_its_tokens() -> None:
    policy = Weights()
    one = round_of(policy, [[sample(1), sample(3)], [sample(2)]])
    assert (one.finish().tokens, policy.version) == (6, 3)
    one.measured.steps.append(step_of((found(0.0, 0, 1.0), 6, measured())))
    report = one.finish()
    assert (policy.version, report.micro_batch_tokens, report.reference_kl) == (4, 64, None)
    penalised = round_of(policy, [[sample(2)]], kl_coef=0.1)
    penalised.measured.steps.append(step_of((found(0.0, 0, 1.0), 2, measured())))
    assert penalised.finish().reference_kl == 0.5


@pytest.mark.parametrize(("kept", "expected"), [(1.0, 9.0), (0.75, 7.0), (0.25, 3.0), (0.0, 1.0)])
def test_of_a_rounds_change_the_share_that_is_kept_is_kept(kept: float, expected: float) -> None:
    policy = Weights()
    one = round_of(policy, [], kept=kept)
    policy.parameters[0].add_(8.0)
    one.finish()
    assert policy.parameters[0].tolist() == [expected, expected + 1]
    assert bool(one._before) == (kept < 1), "weights are copied only where they are needed"


RULES = SampleRules(lambda prompt: (5, 6), TrainingConfig(), LONGEST, end=lambda: EOS, policy=2)
WRONG, RIGHT = ([8, 9], 0.0), ([7, 7], 1.0)


def test_of_gains_alone_what_is_no_better_than_the_mean_is_left_out() -> None:
    lesson = GroupLesson(own(RIGHT, WRONG, ([3], 0.5)), (1.0, -1.0, 0.0))
    assert [one.advantage for one in lesson_samples(lesson, RULES) or ()] == [1.0, -1.0, 0.0]
    gains = lesson_samples(replace(lesson, gains_only=True), RULES)
    assert [one.advantage for one in gains or ()] == [1.0]


def test_only_what_nobody_recorded_is_shaped_and_without_being_asked_in_conversations_alone() -> None:
    def shaped(lesson: GroupLesson, *, asked: bool) -> set[bool]:
        return {one.shaped for one in lesson_samples(lesson, RULES, shaped=asked) or ()}

    mine, theirs = GroupLesson(own(RIGHT, WRONG)), GroupLesson(foreign(RIGHT, WRONG))
    assert (shaped(mine, asked=False), shaped(theirs, asked=False)) == ({False}, {False})
    assert (shaped(mine, asked=True), shaped(theirs, asked=True)) == ({False}, {True})
    first, second = theirs.group.completions
    talk = replace(theirs.group, completions=(replace(first, said=(Turn("7"),)), second))
    assert shaped(GroupLesson(talk), asked=False) == {True}, "one conversation in the group is enough"


def entry(*token_ids: int, own: bool = True, in_turns: bool = False) -> Entry:
    return Entry("sum", "1", 0, 0, "sum 0=", token_ids, 1.0, "me", own, True, in_turns=in_turns)


def test_an_answer_is_replayed_with_its_end_where_there_is_room_for_it() -> None:
    long, full, short, ended = entry(2, 2, 2, 2, 2), entry(2, 2, 2, 2), entry(2, 2, 2), entry(2, EOS)
    replayed = [Replay(one, 4.0, ends=True) for one in (long, full, short, ended)]
    samples = list(replayed_samples([*replayed, Replay(short, 4.0, ends=False)], RULES))
    assert [one.completion_ids for one in samples] == [(2, 2, 2, 2), (2, 2, 2, EOS), (2, EOS), (2, 2, 2)]
    assert {(one.prompt_ids, one.advantage, one.policy, one.replayed) for one in samples} == {
        ((5, 6), 4.0, 2, True)
    }


@pytest.mark.parametrize(("own", "in_turns"), [(True, True), (True, False), (False, True), (False, False)])
def test_of_what_is_replayed_only_a_strangers_conversation_is_shaped_unasked(
    own: bool, in_turns: bool
) -> None:
    replay = Replay(entry(2, own=own, in_turns=in_turns), 4.0, ends=True)
    assert [one.shaped for one in replayed_samples([replay], RULES)] == [in_turns and not own]
    assert [one.shaped for one in replayed_samples([replay], RULES, shaped=True)] == [True]


def test_a_model_without_an_end_of_text_is_not_asked_for_it_as_long_as_nothing_is_replayed() -> None:
    def none() -> int:
        raise AssertionError("there is none")

    assert list(replayed_samples([], replace(RULES, end=none))) == []
