import random
from dataclasses import replace
from itertools import combinations, count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.exchange.gossip.announcing import Composed, ModelLabel, compose
from swarmnode.exchange.limits import MAX_GROUP_SIZE
from swarmnode.exchange.messages import Announcement, Arrival
from swarmnode.exchange.validation.body_check import BodyRules, CheckedBody, check_body, is_false_claim
from swarmnode.exchange.wide_groups import most_telling, narrowed, parts
from swarmnode.identity.node_key import NodeKey
from swarmnode.types import RolloutGroup, spread_of

rewards_of_groups = st.lists(st.none() | st.integers(-3, 3).map(float), min_size=2, max_size=9)


def a_rng() -> random.Random:
    return random.Random(0)


# ---- which answers are kept ----


@given(rewards_of_groups, st.integers(2, 9))
def test_no_other_choice_of_as_many_answers_has_rewards_that_differ_more(
    rewards: list[float | None], limit: int
):
    kept = [rewards[place] for place in most_telling(rewards, limit, a_rng())]
    scored = [reward for reward in rewards if reward is not None]
    if len(rewards) <= limit:
        assert kept == rewards
    elif len(scored) <= limit:
        assert sorted(reward for reward in kept if reward is not None) == sorted(scored)
    else:
        widest = max(spread_of(choice) for choice in combinations(scored, limit))
        assert spread_of([reward for reward in kept if reward is not None]) == pytest.approx(widest)
        assert len(kept) == limit


def test_right_and_wrong_answers_are_kept_in_equal_numbers_where_there_are_enough():
    kept = most_telling([1.0] * 40 + [0.0] * 472, 16, a_rng())
    assert sum(place < 40 for place in kept) == 8


def test_one_right_answer_among_hundreds_is_kept():
    rewards = [0.0] * MAX_GROUP_SIZE
    rewards[300] = 1.0
    assert 300 in most_telling(rewards, 16, a_rng())


def test_an_author_cannot_choose_by_order_which_of_its_equal_answers_are_kept():
    rewards = [1.0] * 50 + [0.0] * 50
    kept = [most_telling(rewards, 4, random.Random(seed)) for seed in range(200)]
    assert {place for places in kept for place in places} == set(range(100))


def test_large_rewards_with_small_differences_are_told_apart():
    rewards = [1e6, 1e6 + 0.001, 1e6, 1e6 + 0.002, 1e6]
    assert 3 in most_telling(rewards, 2, a_rng())


def test_a_group_is_narrowed_with_its_scores(groups_of, key: NodeKey):
    group = narrowed(groups_of(key.peer_id, right=3, wrong=9), 4, a_rng())
    assert sorted(group.rewards) == [0.0, 0.0, 1.0, 1.0]
    right = group.example.columns["answer"]
    assert [one.text == right for one in group.completions] == [reward == 1.0 for reward in group.rewards]


@given(st.integers(1, MAX_GROUP_SIZE), st.integers(1, MAX_GROUP_SIZE), st.integers(0, 9))
def test_the_parts_are_all_of_a_group_and_none_is_too_large(answers: int, size: int, seed: int):
    found = parts(answers, size, random.Random(seed))
    assert sorted(place for part in found for place in part) == list(range(answers))
    assert all(0 < len(part) <= size for part in found)


# ---- how much of a group is looked at ----


class Watch:
    """A second passes each time somebody looks."""

    def __init__(self) -> None:
        self._ticks = count()

    def __call__(self) -> float:
        return float(next(self._ticks))


@pytest.fixture
def wide(groups_of, key: NodeKey):
    def make(right: int, wrong: int) -> tuple[RolloutGroup, Composed, Announcement]:
        group = groups_of(key.peer_id, right=right, wrong=wrong)
        composed = compose(group, key, swarm="test", model=ModelLabel("tiny", None), now=1.0)
        announcement = Announcement(key.peer_id, composed.header, composed.sealed, Arrival(1.0, 0))
        return group, composed, announcement

    return make


def looked_at(
    rules: BodyRules, composed: Composed, announcement: Announcement
) -> tuple[CheckedBody, list[int]]:
    """What becomes of a body, and how many answers each judgement had."""
    judged: list[int] = []
    (task,) = rules.tasks.values()

    class Watched(type(task)):
        def score(self, example, completions):
            judged.append(len(completions))
            return super().score(example, completions)

    watching = replace(rules, tasks={task.name: Watched()}, rng=a_rng())
    return check_body(composed.body, announcement, watching), judged


def test_a_group_of_hundreds_is_judged_whole_where_that_is_quick(wide, rules: BodyRules):
    _, composed, announcement = wide(right=1, wrong=MAX_GROUP_SIZE - 1)
    checked, judged = looked_at(replace(rules, answers_per_group=16), composed, announcement)
    assert sum(judged) == MAX_GROUP_SIZE and max(judged) == 16
    assert sorted(checked.group.rewards) == [0.0] * 15 + [1.0]
    assert not checked.false_claim


def test_no_part_is_begun_once_the_time_is_up(wide, rules: BodyRules):
    _, composed, announcement = wide(right=1, wrong=199)
    slow = replace(rules, answers_per_group=16, look_s=1.5, clock=Watch())
    checked, judged = looked_at(slow, composed, announcement)
    assert judged == [16, 16]
    assert len(checked.group.completions) == 16
    assert not checked.false_claim


def test_a_narrow_group_is_judged_at_once_however_long_it_takes(wide, rules: BodyRules, as_learnt):
    group, composed, announcement = wide(right=1, wrong=15)
    slow = replace(rules, answers_per_group=16, look_s=0.0, clock=Watch())
    checked, judged = looked_at(slow, composed, announcement)
    assert judged == [16]
    assert checked.group == as_learnt(group)


def test_only_answers_that_are_looked_at_are_tokenized(wide, rules: BodyRules):
    tokenized: list[str] = []

    def encode(text: str, finish: str) -> tuple[int, ...]:
        tokenized.append(text)
        return rules.encode(text, finish)

    _, composed, announcement = wide(right=1, wrong=499)
    slow = replace(rules, answers_per_group=8, look_s=0.5, clock=Watch(), encode=encode)
    looked_at(slow, composed, announcement)
    assert len(tokenized) == 8


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
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=None), group)
    assert is_false_claim(msgspec.structs.replace(header, reward_mean=1.0, reward_std=0.001), group)


@pytest.fixture(scope="module")
def honest_claim():
    from swarmnode.exchange.gossip.announcing import ModelLabel, compose
    from tests.unit.exchange.conftest import make_group

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
