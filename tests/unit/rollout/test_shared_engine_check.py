"""What the engine below a shared one would refuse, it refuses before the request waits for its turn."""

import pytest

from swarmnode.errors import RequestRefused
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.rollout.shared_engine import SharedEngine, versions_needed
from swarmnode.testing.fake_engine import FakeEngine

MEMBERS = 2


def request(name: str, *prompt: int, max_tokens: int = 4, temperature: float = 1.0) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens, temperature=temperature))


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
def test_what_the_engine_refuses_is_refused_at_once_and_never_reaches_it(bad: Request) -> None:
    engine = FakeEngine(lambda request: range(1, 100), max_versions=versions_needed(MEMBERS), max_length=40)
    member = SharedEngine(engine, MEMBERS).member("policy-0")
    member.submit([request("long", *range(1, 37)), request("high", 500)])
    with pytest.raises(RequestRefused, match="bad"):
        member.submit([bad])
    with pytest.raises(RequestRefused, match="bad"):
        member.check(bad)
    assert member.stats().waiting == 2
    assert engine.stats().waiting == 0


def test_requests_of_two_members_with_one_id_are_taken() -> None:
    engine = FakeEngine(lambda request: range(1, 100), max_versions=versions_needed(MEMBERS), max_length=40)
    shared = SharedEngine(engine, MEMBERS)
    members = [shared.member(f"policy-{number}") for number in range(MEMBERS)]
    for member in members:
        member.submit([request("a", 5)])
    members[0].step()
    members[1].check(request("a", 5))
    assert engine.stats().running == MEMBERS
