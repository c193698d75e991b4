"""The age of a group on its way."""

from swarmnode.rollout.engine import Sampled
from swarmnode.rollout.schedule.open_group import OpenCompletion, OpenGroup
from swarmnode.types import Example, ExampleKey, one_span


def member(tokens: int, version: int = 0, logprob: float = -0.5) -> OpenCompletion:
    return OpenCompletion(Sampled((1,) * tokens, (logprob,) * tokens, one_span(version, tokens)))


def group(serial: int, *members: OpenCompletion) -> OpenGroup:
    return OpenGroup(serial, Example(ExampleKey("sums", "1", 0, serial), "?"), (1, 2), list(members))


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
