"""What the engine has, and how far it looks back."""

import pytest

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import Output, Request, Sampled, SamplingParams
from swarmnode.rollout.schedule.open_group import OpenCompletion, OpenGroup
from swarmnode.rollout.schedule.requests_in_flight import RequestsInFlight
from swarmnode.types import Example, ExampleKey, Span

SAMPLING = SamplingParams(max_tokens=9)


def group(serial: int, prompt_tokens: int, done: int = 0) -> OpenGroup:
    sampled = Sampled((1,) * done, (0.0,) * done, (Span(0, 0, done),) if done else ())
    example = Example(ExampleKey("letters", "1", 0, serial), "why")
    return OpenGroup(
        serial, example, (1,) * prompt_tokens, [OpenCompletion(sampled), OpenCompletion(sampled)]
    )


def asked(of: OpenGroup) -> list[Request]:
    return [of.request(place, SAMPLING) for place in (0, 1)]


def ended(request: Request) -> Output:
    return Output(request.request_id, Sampled((1,), (0.0,), (Span(0, 0, 1),)), "stop")


def test_each_step_everything_looks_back_on_one_token_more() -> None:
    under_way, first, second = (
        RequestsInFlight(),
        group(1, prompt_tokens=5),
        group(2, prompt_tokens=3, done=2),
    )
    under_way.add(first, (0, 1), asked(first))
    assert (len(under_way), under_way.context) == (2, 10)
    under_way.step_done()
    under_way.add(second, (0, 1), asked(second))
    assert under_way.context == 6 + 6 + 5 + 5
    under_way.step_done()
    assert under_way.context == 7 + 7 + 6 + 6
    for request in asked(first):
        assert under_way.take(ended(request))[0] is first
    assert under_way.context == 6 + 6
    assert list(under_way) == ["2/0", "2/1"]


def test_what_comes_back_is_its_groups_again_and_strangers_are_refused() -> None:
    under_way, ours = RequestsInFlight(), group(1, prompt_tokens=5)
    under_way.add(ours, (0, 1), asked(ours))
    under_way.take(ended(asked(ours)[1]))
    assert ours.members[1].finish == "stop" and ours.members[0].finish is None
    assert "1/0" in under_way and "1/1" not in under_way
    with pytest.raises(EngineError, match="not ours"):
        under_way.take(ended(asked(ours)[1]))
