"""Which refusals blame the request, and which the moment."""

from typing import Any

import pytest

from swarmnode.errors import EngineError, RequestRefused
from swarmnode.rollout.engine import Request, Sampled, SamplingParams
from swarmnode.rollout.request_queue import RequestQueue
from swarmnode.types import one_span

DONE = Sampled((1, 2), (-0.5, -0.5), one_span(0, 2))


def queue() -> RequestQueue:
    return RequestQueue(max_length=16, vocab=10)


def request(prompt: tuple[int, ...] = (1, 2), max_tokens: int = 4, **more: Any) -> Request:
    return Request("a", prompt, SamplingParams(max_tokens), **more)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(prompt=()), "empty prompt"),
        (request(prompt=(1, 10)), "token ids outside"),
        (request(max_tokens=15), "this engine holds 16"),
        (request(max_tokens=2, sampled=DONE), "already has its 2 tokens"),
        (request(max_tokens=0), "max_tokens is 0"),
    ],
)
def test_a_request_that_no_such_engine_could_run_is_refused_as_such(bad: Request, words: str) -> None:
    line = queue()
    with pytest.raises(RequestRefused, match=words) as refused:
        line.submit([Request("fine", (1,), SamplingParams(4)), bad], live_versions=(0,))
    assert refused.value.hint
    assert line.in_flight == 0


def test_an_id_in_flight_and_a_policy_that_is_gone_are_not_the_fault_of_the_request() -> None:
    line = queue()
    line.submit([request()], live_versions=(0,))
    for again in (request(), Request("b", (1,), SamplingParams(4), version=3)):
        with pytest.raises(EngineError) as refused:
            line.submit([again], live_versions=(0,))
        assert not isinstance(refused.value, RequestRefused)
    assert line.in_flight == 1
