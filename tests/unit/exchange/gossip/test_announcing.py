from dataclasses import replace

import pytest

from swarmnode.errors import Rejected
from swarmnode.exchange.gossip.announcing import ModelLabel, as_given, compose, require_readable
from swarmnode.exchange.limits import MAX_GROUP_SIZE, MAX_HEADER_BYTES, MAX_NAME_CHARS
from swarmnode.exchange.messages import decode_body, fingerprint, hash_body
from swarmnode.identity.node_key import NodeKey
from swarmnode.types import RolloutGroup

MODEL = ModelLabel("tiny", 1000)


def reason_of(group: RolloutGroup, key: NodeKey) -> str:
    with pytest.raises(Rejected) as caught:
        compose(group, key, swarm="test", model=MODEL, now=1.0)
    return caught.value.reason


def test_a_header_names_its_body_and_claims_its_rewards(group: RolloutGroup, key: NodeKey):
    composed = compose(group, key, swarm="test", model=MODEL, now=1234.5)
    header = composed.header
    assert header.body_hash == hash_body(composed.body)
    assert header.body_bytes == len(composed.body)
    assert header.key == group.example.key
    assert (header.reward_mean, header.reward_std, header.group_size) == (0.5, 0.5, 4)
    assert (header.model_family, header.model_size, header.policy_version) == ("tiny", 1000, 3)
    assert header.created_s == 1234.5


def test_a_body_names_its_author_and_example(group: RolloutGroup, key: NodeKey):
    body = decode_body(compose(group, key, swarm="test", model=MODEL, now=1.0).body)
    assert (body.author, body.key) == (key.peer_id, group.example.key)
    assert [answer.text for answer in body.answers] == [completion.text for completion in group.completions]


def test_the_longest_names_still_fit_into_a_header(group: RolloutGroup, key: NodeKey):
    long = "x" * MAX_NAME_CHARS
    example = replace(group.example, key=replace(group.example.key, task=long, version=long, seed=2**63 - 1))
    named = replace(group, example=example, policy_version=2**53)
    composed = compose(named, key, swarm=long, model=ModelLabel(long, 2**53), now=1e12)
    assert len(composed.sealed) <= MAX_HEADER_BYTES


def test_a_typical_header_is_small(group: RolloutGroup, key: NodeKey):
    assert len(compose(group, key, swarm="commons", model=MODEL, now=1e9).sealed) < 300


def test_groups_that_teach_nothing_are_not_announced(groups_of, key: NodeKey):
    assert reason_of(groups_of(key.peer_id, right=4, wrong=0), key) == "zero_advantage"
    assert reason_of(groups_of(key.peer_id, right=0, wrong=4), key) == "zero_advantage"


def test_groups_that_were_not_scored_are_not_announced(group: RolloutGroup, key: NodeKey):
    assert reason_of(replace(group, scores=({"correct": None},) * 4), key) == "zero_advantage"


def test_answers_that_our_judge_could_not_score_stay_here(group: RolloutGroup, key: NodeKey):
    partly = replace(group, scores=({"correct": None}, *group.scores[1:]))
    composed = compose(partly, key, swarm="test", model=MODEL, now=1.0)
    body = decode_body(composed.body)
    assert [answer.text for answer in body.answers] == [each.text for each in group.completions[1:]]
    assert composed.header.group_size == 3 and composed.header.reward_mean == pytest.approx(1 / 3)
    given = as_given(partly, composed)
    assert len(given.group.completions) == 4 and given.fingerprint == fingerprint(body)


def test_groups_of_others_are_not_announced_as_ours(group: RolloutGroup, other_key: NodeKey):
    assert reason_of(group, other_key) == "not_ours"


def test_groups_of_the_wrong_size_are_not_announced(groups_of, key: NodeKey):
    assert reason_of(groups_of(key.peer_id, right=1, wrong=0), key) == "group_size"
    assert reason_of(groups_of(key.peer_id, right=1, wrong=MAX_GROUP_SIZE), key) == "group_size"


def test_the_widest_group_travels_whole(groups_of, key: NodeKey):
    widest = groups_of(key.peer_id, right=1, wrong=MAX_GROUP_SIZE - 1)
    composed = compose(widest, key, swarm="test", model=MODEL, now=1.0)
    assert composed.header.group_size == len(decode_body(composed.body).answers) == MAX_GROUP_SIZE
    assert len(composed.sealed) <= MAX_HEADER_BYTES


def test_unfinished_completions_are_not_announced(group: RolloutGroup, key: NodeKey):
    first, *rest = group.completions
    assert reason_of(replace(group, completions=(replace(first, finish="abort"), *rest)), key) == "unfinished"


def test_answers_that_are_too_long_once_read_again_are_not_announced_where_they_are_half(
    groups_of, key: NodeKey
):
    def cut(count: int) -> RolloutGroup:
        group = groups_of(key.peer_id, right=2, wrong=2)
        answers = group.completions
        return replace(
            group,
            completions=tuple(
                replace(one, finish="length" if place < count else "stop")
                for place, one in enumerate(answers)
            ),
        )

    def half_characters(text: str, _: str) -> tuple[int, ...]:
        return (1,) * 9

    require_readable(cut(4), half_characters, 9)
    require_readable(cut(1), half_characters, 8)
    with pytest.raises(Rejected) as caught:
        require_readable(cut(2), half_characters, 8)
    assert caught.value.reason == "too_long"


def test_completions_that_no_peer_would_take_are_not_announced(group: RolloutGroup, key: NodeKey):
    first, *rest = group.completions
    for text, reason in (("x" * 200_000, "too_long"), ("\ud800", "malformed_body")):
        assert reason_of(replace(group, completions=(replace(first, said=text), *rest)), key) == reason


def test_rewards_beyond_the_bound_are_not_announced(group: RolloutGroup, key: NodeKey):
    scores = ({"correct": 1e9}, {"correct": 0.0}, {"correct": 0.0}, {"correct": 0.0})
    assert reason_of(replace(group, scores=scores), key) == "too_large"
