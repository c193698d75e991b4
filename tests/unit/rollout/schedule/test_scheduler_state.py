"""Unfinished groups over a restart."""

import math

import pytest

from swarmnode.errors import CheckpointError
from swarmnode.rollout.engine import Sampled
from swarmnode.rollout.schedule.length_estimates import LengthEstimates
from swarmnode.rollout.schedule.open_group import OpenCompletion, OpenGroup
from swarmnode.rollout.schedule.scheduler_state import decode, encode
from swarmnode.types import Example, ExampleKey, one_span


def member(tokens: int, version: int = 0, logprob: float = -0.5) -> OpenCompletion:
    return OpenCompletion(Sampled((1,) * tokens, (logprob,) * tokens, one_span(version, tokens)))


def group(serial: int, *members: OpenCompletion) -> OpenGroup:
    return OpenGroup(serial, Example(ExampleKey("sums", "1", 0, serial), "?"), (1, 2), list(members))


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
