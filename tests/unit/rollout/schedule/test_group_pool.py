"""The line of members before the engine."""

from swarmnode.rollout.engine import Sampled
from swarmnode.rollout.schedule.group_pool import GroupPool
from swarmnode.rollout.schedule.open_group import OpenCompletion, OpenGroup
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
