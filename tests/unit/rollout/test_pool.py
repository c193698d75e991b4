"""Groups that wait, and what of them is kept over a restart."""

import math

import pytest

from swarmnode.errors import CheckpointError
from swarmnode.rollout.engine import Sampled
from swarmnode.rollout.schedule.group import OpenCompletion, OpenGroup
from swarmnode.rollout.schedule.state import LengthEstimates, decode, encode
from swarmnode.rollout.schedule.under_way import GroupPool
from swarmnode.types import Example, ExampleKey, one_span


def member(tokens: int, version: int = 0, logprob: float = -0.5) -> OpenCompletion:
    return OpenCompletion(Sampled((1,) * tokens, (logprob,) * tokens, one_span(version, tokens)))


def group(serial: int, *members: OpenCompletion) -> OpenGroup:
    return OpenGroup(serial, Example(ExampleKey("sums", "1", 0, serial), "?"), (1, 2), list(members))


def test_what_has_tokens_goes_before_what_has_none_even_of_an_older_group() -> None:
    pool = GroupPool([group(0, member(0), member(3)), group(1, member(2), member(0))])
    order = [pool.next_members(1) for _ in range(4)]
    assert [(found.serial, places) for found, places in order] == [(0, [1]), (1, [0]), (0, [0]), (1, [1])]


def test_members_are_taken_of_one_group_at_a_time() -> None:
    pool = GroupPool([group(0, member(0), member(0), member(0)), group(1, member(0))])
    taken = [pool.next_members(limit) for limit in (2, 5, 5)]
    assert [(found.serial, places) for found, places in taken] == [(0, [0, 1]), (0, [2]), (1, [0])]
    assert not pool.has_line


def test_what_is_in_the_engine_is_not_in_line() -> None:
    pool = GroupPool([group(0, member(4), member(4))])
    pool.line_up(in_engine={"0/0"})
    assert pool.next_members(9)[1] == [1]


def test_a_group_is_as_old_as_the_first_policy_that_any_member_was_asked_of() -> None:
    one = group(0, member(0), member(0))
    for version in (7, 5, 6):
        one.asked_of(version)
    assert one.oldest_version == 5


def test_out_of_the_engine_a_group_is_as_old_as_its_oldest_token() -> None:
    one = group(0, member(2, version=6), member(3, version=4), member(0))
    one.asked_of(1)
    one.settle_age()
    assert one.oldest_version == 4


@pytest.mark.parametrize(
    "damage", [member(2, logprob=math.nan), member(2, logprob=-math.inf), OpenCompletion(finish="stop")]
)
def test_numbers_that_no_engine_gives_are_not_taken_from_a_checkpoint(damage: OpenCompletion) -> None:
    with pytest.raises(CheckpointError):
        decode(encode([group(0, member(1), damage)], {}, LengthEstimates(), may_stay_behind=0.0))


def test_what_is_being_sampled_is_kept_as_far_as_it_is() -> None:
    running = member(5).sampled
    kept = decode(
        encode([group(0, member(2), member(1))], {"0/1": running}, LengthEstimates(), may_stay_behind=0.0)
    )
    assert [len(one.sampled) for one in kept.groups[0][1]] == [2, 5]
