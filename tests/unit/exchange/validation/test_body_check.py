from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import JudgementOverran, Rejected, TaskError
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.messages import (
    Announcement,
    Answer,
    Arrival,
    Body,
    encode_body,
    hash_body,
)
from swarmnode.exchange.validation.body_check import (
    BodyRules,
    check_body,
    false_claim,
    is_false_claim,
    require_advantage,
)
from swarmnode.exchange.validation.header_check import largest_body
from swarmnode.identity.node_key import NodeKey
from swarmnode.tasks.task import is_held_out
from swarmnode.types import Example, FinishReason, RolloutGroup, spread_of
from tests.unit.exchange.conftest import Addition, make_group
from tests.unit.exchange.validation.conftest import NOW, reason_of, resealed


def announce(composed: SignedGroup, author: NodeKey, **changes: object) -> Announcement:
    header = msgspec.structs.replace(composed.header, **changes)
    return Announcement(author.peer_id, header, composed.sealed, Arrival(NOW, 0))


def body_of(group: RolloutGroup, **changes: object) -> Body:
    key = group.example.key
    answers = tuple(Answer(completion.text, "stop") for completion in group.completions)
    body = Body(
        author=group.author,
        task=key.task,
        version=key.version,
        seed=key.seed,
        index=key.index,
        answers=answers,
    )
    return msgspec.structs.replace(body, **changes)


def test_a_sound_body_becomes_a_group_that_was_scored_here(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup, as_learnt
):
    checked = check_body(composed.body, announce(composed, key), rules)
    assert checked.group == as_learnt(group)
    assert checked.group.completions[0].logprobs is None


def test_a_claim_is_never_trained_on(composed: SignedGroup, key: NodeKey, rules: BodyRules):
    liar = announce(composed, key, reward_mean=1.0, reward_std=0.1)
    checked = check_body(composed.body, liar, rules)
    assert checked.group.rewards == (1.0, 1.0, 0.0, 0.0)
    assert checked.false_claim


def test_an_honest_claim_may_be_off_by_rounding(composed: SignedGroup, group: RolloutGroup):
    header = msgspec.structs.replace(composed.header, reward_mean=0.5009, reward_std=0.4991)
    assert not is_false_claim(header, group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=0.502), group)
    assert is_false_claim(msgspec.structs.replace(header, reward_std=0.45), group)
    unscored = msgspec.structs.replace(header, reward_mean=None)
    assert "a mean reward of none, our judge gives 0.5" in false_claim(unscored, group)


@pytest.mark.parametrize(
    "claims", [("stop", "length"), ("length", "stop"), ("stop", "stop"), ("length", "length")]
)
def test_nobody_elses_end_is_learnt_whatever_they_claim(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup, claims
):
    answers = tuple(Answer("7", claim) for claim in claims)
    data = encode_body(body_of(group, answers=answers))
    for completion in check_body(data, announce(composed, key, group_size=2), rules).group.completions:
        assert (completion.token_ids, completion.finish) == ((ord("7"),), "length")


def test_an_answer_that_is_nothing_but_its_end_counts_without_being_trained_on(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    right = group.completions[0].text
    data = encode_body(body_of(group, answers=(Answer("", "stop"), Answer(right, "stop"))))
    checked = check_body(data, announce(composed, key, group_size=2), rules).group
    assert [len(completion.token_ids) for completion in checked.completions] == [0, len(right)]
    assert checked.rewards == (0.0, 1.0)


@pytest.mark.parametrize(
    "changes",
    [{"author": "somebody else"}, {"seed": 2}, {"index": 99}, {"task": "subtraction"}, {"version": "2"}],
)
def test_a_body_fits_under_its_own_header_only(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup, changes
):
    data = encode_body(body_of(group, **changes))
    assert reason_of(check_body, data, announce(composed, key), rules) == "body_mismatch"


def test_a_body_has_as_many_answers_as_its_header_says(composed: SignedGroup, key: NodeKey, rules: BodyRules):
    assert (
        reason_of(check_body, composed.body, announce(composed, key, group_size=5), rules) == "body_mismatch"
    )


def test_a_held_out_example_is_never_trained_on(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup, task
):
    held_out = next(example for example in task.examples(1) if is_held_out(example.prompt))
    data = encode_body(body_of(group, index=held_out.key.index))
    assert (
        reason_of(check_body, data, announce(composed, key, index=held_out.key.index), rules)
        == "not_drawable"
    )


def test_an_example_beyond_the_end_of_a_task_is_rejected(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup, task
):
    class Short(type(task)):
        def examples(self, seed: int):
            return iter(())

    short = replace(rules, tasks={task.name: Short()})
    assert reason_of(check_body, composed.body, announce(composed, key), short) == "not_drawable"


def test_a_group_has_at_least_one_token(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    data = encode_body(body_of(group, answers=(Answer("", "length"), Answer("", "stop"))))
    assert reason_of(check_body, data, announce(composed, key, group_size=2), rules) == "no_tokens"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_answer_has_at_most_as_many_tokens_as_we_train_on(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup, finish
):
    data = encode_body(body_of(group, answers=(Answer("x" * 64, finish), Answer("7", "stop"))))
    check_body(data, announce(composed, key, group_size=2), rules)
    data = encode_body(body_of(group, answers=(Answer("x" * 65, finish), Answer("7", "stop"))))
    assert reason_of(check_body, data, announce(composed, key, group_size=2), rules) == "too_long"


def test_a_refusal_for_length_says_how_many_were_too_long_and_which_setting_bounds_them(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    data = encode_body(body_of(group, answers=(Answer("x" * 65, "stop"), Answer("7", "stop"))))
    with pytest.raises(Rejected) as caught:
        check_body(data, announce(composed, key, group_size=2), rules)
    assert caught.value.detail == (
        "addition: 1 of 2 answers have more tokens in our tokenizer than we allow (our rollout.max_tokens ="
        " 64); its author may have sampled fewer, or use another tokenizer"
    )


def test_a_rare_answer_that_is_longer_in_our_tokens_is_left_out_of_its_group(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    answers = (Answer("x" * 65, "length"), Answer("7", "stop"), Answer("8", "stop"))
    data = encode_body(body_of(group, answers=answers))
    checked = check_body(data, announce(composed, key, group_size=3), rules)
    assert [completion.text for completion in checked.group.completions] == ["7", "8"]
    assert len(checked.group.scores) == 2


def test_text_of_more_characters_than_we_train_on_tokens_is_read_if_its_tokens_are_few(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    def encode(text: str, finish: FinishReason) -> tuple[int, ...]:
        return (7,) * (len(text) // 4)

    data = encode_body(body_of(group, answers=(Answer("four" * 64, "stop"), Answer("8888", "stop"))))
    checked = check_body(data, announce(composed, key, group_size=2), replace(rules, encode=encode))
    assert [len(completion.token_ids) for completion in checked.group.completions] == [64, 1]


def test_turns_are_no_answer_to_a_task_without_an_environment(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    data = encode_body(body_of(group, answers=(Answer(("7", "8"), "stop"), Answer("8", "stop"))))
    assert reason_of(check_body, data, announce(composed, key, group_size=2), rules) == "malformed_body"


def test_a_judge_that_overran_says_so_itself_if_no_environment_was_played(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, task
):
    class Slow(type(task)):
        def score(self, example: Example, completions: Sequence[str]):
            raise JudgementOverran("no answer in time")

    with pytest.raises(JudgementOverran, match="no answer in time"):
        check_body(composed.body, announce(composed, key), replace(rules, tasks={task.name: Slow()}))


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    def encode(text: str, finish: str) -> tuple[int, ...]:
        raise AssertionError("a megabyte takes seconds")

    data = encode_body(body_of(group, answers=(Answer("x" * 100_000, "stop"), Answer("y" * 100_000, "stop"))))
    careful = replace(rules, encode=encode)
    assert reason_of(check_body, data, announce(composed, key, group_size=2), careful) == "too_long"


def test_a_header_tells_beforehand_that_its_answers_are_too_long_for_us(
    check, composed: SignedGroup, key: NodeKey
):
    megabyte = resealed(composed, key, body_bytes=1024 * 1024)
    assert reason_of(check, megabyte, key, max_tokens=64) == "oversized"
    assert Reason.OVERSIZED.points == 0
    largest = largest_body(composed.header.group_size, 64)
    check(resealed(composed, key, body_bytes=largest), key, max_tokens=64)
    assert (
        reason_of(check, resealed(composed, key, body_bytes=largest + 1), key, max_tokens=64) == "oversized"
    )


def test_a_prompt_has_at_most_as_many_tokens_as_our_policy_takes(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    length = len(rules.prompt_ids(group.example.prompt))
    check_body(composed.body, announce(composed, key), replace(rules, max_prompt_tokens=length))
    shorter = replace(rules, max_prompt_tokens=length - 1)
    assert reason_of(check_body, composed.body, announce(composed, key), shorter) == "long_prompt"


def test_what_the_task_cannot_score_is_rejected(composed: SignedGroup, key: NodeKey, rules: BodyRules, task):
    class Moody(type(task)):
        def score(self, example: Example, completions: Sequence[str]):
            raise TaskError("not today")

    class Broken(type(task)):
        def score(self, example: Example, completions: Sequence[str]):
            return [{"correct": float("nan")} for _ in completions]

    for judge in (Moody(), Broken()):
        moody = replace(rules, tasks={task.name: judge})
        assert reason_of(check_body, composed.body, announce(composed, key), moody) == "unscorable"


@dataclass(frozen=True)
class Busy(Addition):
    """A judge that gives a score to the first so many different answers of a group and to no others."""

    scored: int = 0

    def score(self, example: Example, completions: Sequence[str]) -> list[dict[str, float | None]]:
        known = super().score(example, completions)
        return [*known[: self.scored], *({"correct": None} for _ in known[self.scored :])]


def test_a_judge_of_ours_that_had_no_time_makes_nobody_a_liar(
    composed: SignedGroup, key: NodeKey, rules: BodyRules, task
):
    honest, liar = announce(composed, key), announce(composed, key, reward_mean=1.0, reward_std=0.001)
    for scored, unknown in ((1, 2), (2, 1)):
        busy = replace(rules, tasks={task.name: Busy(scored=scored)})
        checked = check_body(composed.body, honest, busy)
        assert not checked.false_claim and checked.group.rewards.count(None) == unknown
    assert check_body(composed.body, liar, busy).false_claim, "it was caught with a wrong answer"
    silent = replace(rules, tasks={task.name: Busy()})
    assert reason_of(check_body, composed.body, honest, silent) == Reason.JUDGE_BUSY
    assert Reason.JUDGE_BUSY.points == 0


@pytest.mark.parametrize("missed", [{"correct": None}, {"correct": None, "format": 0.5}, {}])
def test_an_author_whose_judge_had_no_time_for_an_answer_claims_nothing_about_it(
    missed: dict[str, float | None], group: RolloutGroup, key: NodeKey, rules: BodyRules
):
    partly = replace(group, scores=(*group.scores[:3], missed))
    composed = compose(partly, key, swarm="test", model=ModelLabel("tiny", None), now=1.0)
    checked = check_body(composed.body, announce(composed, key), rules)
    assert checked.group.rewards == (1.0, 1.0, 0.0) and not checked.false_claim


def test_a_reward_that_our_judge_missed_makes_nobody_a_liar(composed: SignedGroup, group: RolloutGroup):
    scores = ({"correct": 1.0, "format": 0.0}, *({"correct": 1.0, "format": 0.5} for _ in range(3)))
    header = msgspec.structs.replace(composed.header, reward_mean=1.375, reward_std=0.2165)
    assert not is_false_claim(header, replace(group, scores=scores))
    missed = replace(group, scores=(*scores[:3], {"correct": 1.0, "format": None}))
    assert missed.reward_mean != 1.375 and not is_false_claim(header, missed)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=0.5), missed)


@dataclass(frozen=True)
class Counting(Addition):
    """A judge that notes what it is asked about."""

    asked: list[str] = field(default_factory=list)

    def score(self, example: Example, completions: Sequence[str]) -> list[dict[str, float | None]]:
        self.asked.extend(completions)
        return super().score(example, completions)


def test_what_is_said_twice_is_read_and_judged_once(composed: SignedGroup, key: NodeKey, rules: BodyRules):
    judge, read = Counting(), list[str]()

    def encode(text: str, finish: FinishReason) -> tuple[int, ...]:
        read.append(text)
        return rules.encode(text, finish)

    checked = check_body(
        composed.body, announce(composed, key), replace(rules, tasks={judge.name: judge}, encode=encode)
    )
    assert checked.group.rewards == (1.0, 1.0, 0.0, 0.0) and not checked.false_claim
    assert len(judge.asked) == len(set(judge.asked)) == 3 and read == judge.asked


def test_a_group_without_advantage_teaches_nothing(groups_of, key: NodeKey):
    require_advantage(groups_of(key.peer_id, right=1, wrong=3))
    for right, wrong in ((0, 4), (4, 0)):
        assert (
            reason_of(require_advantage, groups_of(key.peer_id, right=right, wrong=wrong)) == "zero_advantage"
        )


def test_a_group_that_was_not_scored_has_no_advantage(group: RolloutGroup):
    unscored = replace(group, scores=({"correct": None},) * 4)
    assert reason_of(require_advantage, unscored) == "zero_advantage"


def test_two_authors_of_the_same_answers_share_a_fingerprint(
    composed: SignedGroup, key: NodeKey, other_key: NodeKey, rules: BodyRules, group: RolloutGroup
):
    copied = encode_body(body_of(group, author=other_key.peer_id))
    copy = announce(composed, other_key, body_hash=hash_body(copied), body_bytes=len(copied))
    ours = check_body(composed.body, announce(composed, key), rules)
    theirs = check_body(copied, copy, rules)
    assert ours.fingerprint == theirs.fingerprint


# ---- what may be claimed of answers that nobody looked at ----


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=40), st.integers(2, 39), st.data())
def test_an_honest_claim_is_never_ruled_out_by_a_part(honest_claim, rewards, looked: int, data):
    part = data.draw(st.permutations(rewards))[: min(looked, len(rewards) - 1)]
    header, group = honest_claim(rewards, part)
    assert not is_false_claim(header, group)


def test_a_claim_that_no_other_rewards_could_make_true_is_false(honest_claim):
    header, group = honest_claim([1.0] * 2 + [0.0] * 38, [0.0] * 20)
    assert not is_false_claim(header, group)
    generous = msgspec.structs.replace(header, reward_mean=0.95, reward_std=0.2179)
    assert is_false_claim(generous, group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=0.6, reward_std=0.4899), group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=None), group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=1.0, reward_std=0.001), group)


@pytest.fixture(scope="module")
def honest_claim():
    key = NodeKey(b"\1" * 32)
    group = make_group(key.peer_id, right=2, wrong=2)
    header = compose(group, key, swarm="test", model=ModelLabel("tiny", None), now=1.0).header

    def claim(rewards: list[float], part: list[float]):
        mean, std = sum(rewards) / len(rewards), spread_of(rewards)
        claimed = msgspec.structs.replace(header, group_size=len(rewards), reward_mean=mean, reward_std=std)
        completions = (group.completions[0],) * len(part)
        scores = tuple({"correct": reward} for reward in part)
        return claimed, replace(group, completions=completions, scores=scores)

    return claim


def test_a_claim_may_be_off_by_rounding_relative_to_large_rewards(honest_claim):
    large = [1000.0, 3000.0]
    header, group = honest_claim(large, large)
    rounded = msgspec.structs.replace(header, reward_mean=2001.9, reward_std=1000.9)
    assert not is_false_claim(rounded, group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=2002.1), group)
    assert is_false_claim(msgspec.structs.replace(header, reward_std=1001.1), group)


def test_a_claim_that_is_off_by_rounding_is_not_ruled_out_by_a_part(honest_claim):
    header, group = honest_claim([1.0] * 4, [1.0] * 3)
    assert not is_false_claim(msgspec.structs.replace(header, reward_mean=1.0009), group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=1.1), group)
    header, group = honest_claim([3000.0] * 4, [3000.0] * 3)
    assert not is_false_claim(msgspec.structs.replace(header, reward_mean=3000.0009), group)


def test_what_nobody_scored_contradicts_no_claim_not_even_that_of_no_reward(honest_claim):
    header, group = honest_claim([1.0, 0.0], [])
    assert not is_false_claim(msgspec.structs.replace(header, reward_mean=None, reward_std=None), group)
    assert not is_false_claim(msgspec.structs.replace(header, reward_mean=1e3), group)


def test_what_one_answer_is_left_to_make_up_for_is_what_one_can(honest_claim):
    header, group = honest_claim([0.0, 0.0, 0.0, 1.0], [0.0] * 3)
    assert not is_false_claim(header, group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=0.5, reward_std=0.6), group)
