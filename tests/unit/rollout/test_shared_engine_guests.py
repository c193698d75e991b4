"""Guests of an engine that somebody trains on: what they get, and what nobody notices of them."""

from collections.abc import Sequence
from contextlib import closing

import pytest

from swarmnode.errors import EngineError
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import (
    BASE_VERSION,
    Engine,
    Output,
    PolicyUpdate,
    Request,
    SamplingParams,
)
from swarmnode.rollout.member_state import RECENT_VERSIONS
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.rollout.schedule.scheduler_state import decode
from swarmnode.rollout.shared_engine import (
    GUEST_ROWS,
    GUEST_VERSIONS,
    SharedEngine,
    SharedGuest,
    SharedMember,
)
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.types import Span
from tests.unit.rollout.schedule.test_partial_rollouts import RENDERER, stream
from tests.unit.rollout.test_shared_engine import ask, lora_update, run, small_model, update


def counting() -> FakeEngine:
    return FakeEngine(lambda request: range(1, 1000), max_slots=64)


def seated(engine: Engine, *, people_first: bool = False) -> tuple[SharedMember, SharedGuest]:
    shared = SharedEngine(engine, members=1, people_first=people_first)
    return shared.member("policy-0"), shared.guest("people", of="policy-0")


def finish(guest: SharedGuest) -> dict[str, Output]:
    found: dict[str, Output] = {}
    for _ in range(1000):
        outputs, in_flight = guest.advance()
        found |= {output.request_id: output for output in outputs}
        if not in_flight:
            return found
    raise AssertionError("never finished")


def versions(output: Output) -> list[int]:
    return [span.version for span in output.spans]


def test_a_guest_is_answered_by_the_newest_policy_by_an_older_one_and_by_the_base() -> None:
    policy, guest = seated(counting())
    policy.set_policy(update(1))
    policy.set_policy(update(2))
    assert (guest.policy_version, guest.versions) == (2, (0, 1, 2))
    guest.submit([ask("new"), ask("old", version=1), ask("base", version=BASE_VERSION)])
    found = finish(guest)
    assert {name: versions(output) for name, output in found.items()} == {
        "new": [2],
        "old": [1],
        "base": [BASE_VERSION],
    }


def test_a_step_of_the_policy_is_sent_to_guests_who_take_none_of_their_own() -> None:
    policy, guest = seated(counting())
    policy.submit([ask("own", 9)])
    guest.submit([ask("short", 1), ask("long", 9)])
    policy.step()
    policy.step()
    ended, [under_way] = guest.advance()
    assert [output.request_id for output in ended] == ["short"]
    assert under_way.sampled.token_ids == (1, 2)
    assert policy._shared.steps == 2
    assert len(finish(guest)["long"].sampled) == 9


def test_answers_that_ended_in_a_step_of_a_guest_are_part_of_a_checkpoint() -> None:
    policy, guest = seated(FakeEngine(lambda request: range(1, 6), max_slots=64))
    settings = PartialSettings("refill", groups=1, group_size=2, max_lag=1, concurrency=2)
    rollouts = PartialRollouts(policy, RENDERER, settings, SamplingParams(max_tokens=9), seed=0)
    with closing(rollouts.in_steps(stream())) as steps:
        next(steps)
        guest.submit([ask("asked", 9)])
        finish(guest)
        ((_, members),) = decode(rollouts.state()).groups
    assert [(len(member.sampled), member.finish) for member in members] == [(5, "stop")] * 2


def test_an_update_moves_the_policys_own_requests_and_leaves_a_guests_on_its_version() -> None:
    policy, guest = seated(counting())
    policy.submit([ask("own", 6)])
    guest.submit([ask("asked", 6)])
    guest.advance()
    policy.set_policy(update(1), "keep")
    found = run(policy) | finish(guest)
    assert versions(found["own"]) == [0, 1]
    assert found["asked"].spans == (Span(0, 0, 6),)


def test_answers_on_more_versions_than_there_is_room_for_wait_and_none_is_lost() -> None:
    engine = counting()
    policy, guest = seated(engine)
    for version in range(1, 7):
        guest.submit([ask(f"of {version - 1}", 30)])
        guest.advance()
        policy.set_policy(update(version), "keep")
        assert len(engine.stats().live_versions) <= GUEST_VERSIONS + 1
    found = finish(guest)
    assert {name: output.spans for name, output in found.items()} == {
        f"of {version}": (Span(version, 0, 30),) for version in range(6)
    }


def test_guests_share_few_rows_and_each_gets_as_many() -> None:
    shared = SharedEngine(counting(), members=1)
    shared.member("policy-0")
    first, second = (shared.guest(name, of="policy-0") for name in ("a", "b"))
    for guest in (first, second):
        guest.submit([ask(str(number), 20) for number in range(20)])
    first.advance()
    assert [len(one.rows) for one in shared._guests] == [GUEST_ROWS // 2, GUEST_ROWS // 2]
    assert len(finish(first)) == len(finish(second)) == 20


@pytest.mark.parametrize(("people_first", "ended"), [(True, ["asked", "own 1"]), (False, ["own 1", "asked"])])
def test_people_start_before_what_waits_where_they_come_first(people_first: bool, ended: list[str]) -> None:
    policy, guest = seated(FakeEngine(lambda request: range(1, 1000), max_slots=1), people_first=people_first)
    policy.submit([ask("own 0", 2), ask("own 1", 2)])
    policy.step()
    guest.submit([ask("asked", 2)])
    found: list[str] = []
    for _ in range(8):
        found += [output.request_id for output in guest.advance()[0]]
        found += [output.request_id for output in policy.step()]
    assert [name for name in found if name != "own 0"] == ended


def test_while_the_engine_sleeps_a_guest_waits_and_then_goes_on_where_he_was() -> None:
    engine = counting()
    policy, guest = seated(engine)
    guest.submit([ask("asked", 5)])
    guest.advance()
    policy.sleep()
    assert engine.stats().running == 0
    outputs, [under_way] = guest.advance()
    assert outputs == () and len(under_way.sampled) == 1
    policy.submit(())
    assert len(finish(guest)["asked"].sampled) == 5


def test_a_version_that_no_longer_fits_in_is_the_guests_error_alone() -> None:
    class Full(FakeEngine):
        def load(self, update: PolicyUpdate) -> None:
            raise MemoryError("no room")

    policy, guest = seated(Full(lambda request: range(1, 1000)))
    policy.set_policy(update(1))
    policy.submit([ask("own", 3)])
    guest.submit([ask("old", 3, version=0)])
    with pytest.raises(MemoryError):
        while True:
            guest.advance()
    assert len(run(policy)["own"].sampled) == 3
    guest.submit([ask("new", 3)])
    assert versions(finish(guest)["new"]) == [1]


def test_an_engine_of_one_version_sends_guests_away_when_the_policy_moves_on() -> None:
    policy, guest = seated(FakeEngine(lambda request: range(1, 1000), max_versions=1))
    guest.submit([ask("asked", 9)])
    guest.advance()
    policy.set_policy(update(1))
    with pytest.raises(EngineError, match="moved on"):
        guest.advance()
    guest.submit([ask("asked", 2)])
    assert versions(finish(guest)["asked"]) == [1]


def test_only_the_last_versions_can_be_asked_for() -> None:
    policy, guest = seated(counting())
    for version in range(1, 9):
        policy.set_policy(update(version))
    assert len(guest.versions) == RECENT_VERSIONS
    with pytest.raises(EngineError, match="policy 2 is not available"):
        guest.submit([ask("gone", version=2)])
    with pytest.raises(EngineError):
        guest.set_policy(update(9))


def test_who_leaves_takes_what_he_asked_along_and_a_closed_engine_says_so() -> None:
    engine = counting()
    policy, guest = seated(engine)
    guest.submit([ask("asked", 9)])
    guest.advance()
    guest.close()
    assert engine.stats().running == 0
    shared = policy._shared
    late = shared.guest("late", of="policy-0")
    late.submit([ask("asked", 9)])
    policy.close()
    assert engine.closed
    with pytest.raises(EngineError, match="this node is stopping"):
        late.advance()
    with pytest.raises(EngineError, match="closed"):
        late.submit([ask("asked")])


def test_training_rests_for_people_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.rollout.shared_engine.REST_S", 0.05)
    policy, guest = seated(counting(), people_first=True)
    shared = policy._shared
    shared.give_way()
    guest.submit([ask("asked", 9)])
    shared.give_way()
    assert len(finish(guest)) == 1


def test_guests_who_had_their_share_neither_begin_nor_step_until_nobody_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarmnode.rollout.shared_engine.GUESTS_AT_ONCE_S", -1.0)
    policy, guest = seated(counting())
    guest.submit([ask("before", 9)])
    assert len(guest.advance()[1]) == 1, "nobody trains: all of the time is the guests'"
    policy._shared.give_way()
    assert guest.advance() == ((), ())
    guest.submit([ask("asked", 2)])
    policy.submit([ask("own", 9)])
    policy.step()
    ended, in_flight = guest.advance()
    under_way = {request.request_id: len(request.sampled) for request in in_flight}
    assert (ended, under_way) == ((), {"before": 2, "asked": 0}), "what began is carried along"
    monkeypatch.setattr("swarmnode.rollout.shared_engine.STILL_TRAINS_S", 0.0)
    assert sorted(finish(guest)) == ["asked", "before"]


def test_where_people_come_first_they_have_all_the_time_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.rollout.shared_engine.GUESTS_AT_ONCE_S", -1.0)
    policy, guest = seated(counting(), people_first=True)
    policy._shared.give_way()
    guest.submit([ask("asked", 9)])
    assert len(finish(guest)) == 1


def test_what_guests_have_is_their_part_of_each_step() -> None:
    policy, guest = seated(counting())
    shared = policy._shared
    owed: list[float] = []
    shared._time_of_guests.owe = owed.append
    policy.submit([ask(f"own {number}", 9) for number in range(3)])
    policy.step()
    guest.submit([ask("asked", 9)])
    policy.step()
    assert owed[0] == 0.0 < owed[1]


def test_what_a_policy_samples_is_bit_for_bit_what_it_samples_without_the_front() -> None:
    model = small_model()
    requests = [ask(str(i), 3 + 5 * (i % 4), seed=i) for i in range(12)]

    def rounds(engine: Engine) -> list[Sequence[Output]]:
        found: list[Sequence[Output]] = []
        engine.submit(requests)
        for version in range(3):
            found += [engine.step() for _ in range(4)]
            engine.set_policy(lora_update(model, version), "keep")
        while engine.stats().running + engine.stats().waiting:
            found.append(engine.step())
        return found

    plain = rounds(EmbeddedEngine(model, (0,), max_slots=5))
    shared = SharedEngine(EmbeddedEngine(model, (0,), max_slots=5), members=1)
    fronted = rounds(shared.member("policy-0"))
    assert [list(outputs) for outputs in fronted] == [list(outputs) for outputs in plain]


def test_a_guest_gets_the_probabilities_of_the_version_that_he_named() -> None:
    model = small_model()
    policy, guest = seated(EmbeddedEngine(model, (0,), max_slots=6))
    updates = [lora_update(model, seed) for seed in range(3)]
    for one in updates:
        policy.set_policy(one)
        policy.submit([ask(f"own {one.version}", 20, seed=one.version)])
        guest.submit([ask(f"of {one.version}", 12, temperature=0.0, version=one.version)])
        guest.submit([ask(f"again {one.version}", 12, temperature=0.0, version=updates[0].version)])
        policy.step()
    found = finish(guest)
    for name, output in found.items():
        engine = EmbeddedEngine(model, (0,))
        [version] = versions(output)
        engine.set_policy(next(one for one in updates if one.version == version))
        engine.submit([ask(name, 12, temperature=0.0)])
        while not (outputs := engine.step()):
            pass
        [alone] = outputs
        assert output.token_ids == alone.token_ids
        assert output.logprobs == pytest.approx(alone.logprobs, abs=1e-4), name
    assert len(found) == 6


def test_requests_that_the_engine_would_refuse_are_refused_at_once() -> None:
    _, guest = seated(FakeEngine(lambda request: (1,), max_length=16))
    with pytest.raises(EngineError):
        guest.submit([Request("long", (1,) * 15, ask("a").sampling)])
