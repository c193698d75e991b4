"""An engine shared by several policies is asked once about requests that it would all take."""

from collections.abc import Iterable

import pytest

from swarmnode.errors import RequestRefused
from swarmnode.rollout.engine import BASE_VERSION, Request, Sampled, SamplingParams
from swarmnode.rollout.fake import FakeEngine
from swarmnode.rollout.shared import SharedEngine, versions_needed
from swarmnode.rollout.shared_precedents import MOST_KINDS, Precedents
from swarmnode.types import one_span

MEMBERS = 2


class Asked(FakeEngine):
    """Notes how many requests it was asked about."""

    def __init__(self) -> None:
        super().__init__(lambda request: range(1, 100), max_versions=versions_needed(MEMBERS), max_length=40)
        self.asked = 0

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        self.asked += len(requests)
        super().submit(requests)


def request(name: str, *prompt: int, max_tokens: int = 4, temperature: float = 1.0, seed: int = 0) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens, temperature=temperature, seed=seed))


def test_a_request_that_asks_for_no_more_than_one_before_it_is_taken_without_asking() -> None:
    engine = Asked()
    member = SharedEngine(engine, MEMBERS).member("policy-0")
    member.submit([request("a", 5, 9, 6, seed=1)])
    member.submit([request("b", 9, 8, seed=2), request("c", 1, seed=3)])
    assert engine.asked == 1
    member.submit([request("d", 10, seed=4), request("e", 1, 2, 3, 4, seed=5)])
    assert engine.asked == 3
    found = [output.request_id for _ in range(4) for output in member.step()]
    assert sorted(found) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    "bad",
    [
        request("bad", *range(1, 38)),
        request("bad", 1, -1),
        request("bad", 1, 2**40),
        request("bad"),
        request("bad", 1, max_tokens=40),
        request("bad", 1, temperature=-1.0),
    ],
    ids=["too long", "negative token", "unknown token", "empty", "too many tokens", "temperature"],
)
def test_what_the_engine_refuses_is_refused_at_once_whatever_it_took_before(bad: Request) -> None:
    engine = Asked()
    member = SharedEngine(engine, MEMBERS).member("policy-0")
    member.submit([request("long", *range(1, 37)), request("high", 500)])
    with pytest.raises(RequestRefused, match="bad"):
        member.submit([bad])
    assert member.stats().waiting == 2


def test_sampling_the_base_and_going_on_count_as_they_are_asked_for() -> None:
    precedents = Precedents()
    asked = request("a", 3, 4)
    precedents.add(asked)
    assert not precedents.cover(Request("b", (3, 4), asked.sampling, version=BASE_VERSION))
    assert not precedents.cover(request("b", 3, 4, temperature=0.5))
    for token, covered in ((4, True), (5, False)):
        begun = Sampled((token,), (-1.0,), one_span(0, 1))
        assert precedents.cover(Request("b", (3, 4), asked.sampling, begun)) is covered


def test_no_more_kinds_are_remembered_than_anybody_uses() -> None:
    precedents = Precedents()
    for tokens in range(1, 3 * MOST_KINDS):
        precedents.add(request("a", 1, max_tokens=tokens))
    assert len(precedents) <= MOST_KINDS
    assert precedents.cover(request("b", 1, max_tokens=3 * MOST_KINDS - 1))
