"""Several policies on one engine: what they share, and what none of them notices."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from swarmnode.errors import EngineError
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import (
    BASE_VERSION,
    Engine,
    Output,
    PolicyUpdate,
    Request,
    Sampled,
    SamplingParams,
)
from swarmnode.rollout.member_state import FIRST_SERIAL
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.rollout.shared_engine import SharedEngine, versions_needed
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.types import Span
from tests.unit.rollout.schedule.test_partial_rollouts import LONGEST, RENDERER, stream

MEMBERS = 3
PATIENCE_S = 30.0


class Gated(FakeEngine):
    """Its steps wait at a gate while it is closed, and say so; `breaks` makes the next one fail."""

    def __init__(self, **limits: int) -> None:
        super().__init__(lambda request: range(1, 1000), max_versions=versions_needed(MEMBERS), **limits)
        self.gate = threading.Event()
        self.gate.set()
        self.stepping = threading.Event()
        self.steps = 0
        self.most_at_once = 0
        self.breaks: BaseException | None = None

    def step(self) -> Sequence[Output]:
        self.stepping.set()
        assert self.gate.wait(PATIENCE_S)
        self.steps += 1
        self.most_at_once = max(self.most_at_once, self.stats().running + self.stats().waiting)
        if self.breaks is not None:
            raise self.breaks
        return super().step()


def share(engine: Engine) -> tuple[SharedEngine, list[Engine]]:
    shared = SharedEngine(engine, MEMBERS)
    return shared, [shared.member(f"policy-{number}") for number in range(MEMBERS)]


def ask(name: str, max_tokens: int = 4, version: int | None = None, **sampling: object) -> Request:
    params = SamplingParams(max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(name, (5, 6, 7), params, version=version)


def update(version: int) -> PolicyUpdate:
    return PolicyUpdate(version, {}, 1.0)


def run(engine: Engine, requests: Iterable[Request] = ()) -> dict[str, Output]:
    engine.submit(requests)
    found: dict[str, Output] = {}
    for _ in range(1000):
        stats = engine.stats()
        outputs = engine.step()
        found |= {output.request_id: output for output in outputs}
        if stats.running + stats.waiting == 0 and not outputs:
            break
    return found


def test_a_step_of_one_advances_all_and_each_gets_its_own() -> None:
    engine = Gated()
    _, (first, second, third) = share(engine)
    first.submit([ask("a", 3)])
    second.submit([ask("a", 2)])
    for _ in range(3):
        outputs = first.step()
    assert [(o.request_id, len(o.sampled)) for o in outputs] == [("a", 3)]
    assert engine.steps == 3
    assert [(o.request_id, len(o.sampled)) for o in second.step()] == [("a", 2)]
    assert third.step() == ()
    assert engine.steps == 3, "what has ended needs no step"


def test_who_steps_during_a_step_shares_it() -> None:
    engine = Gated()
    shared, members = share(engine)
    for member in members:
        member.submit([ask("a", 2)])
    engine.gate.clear()
    with ThreadPoolExecutor(MEMBERS) as pool:
        leader = pool.submit(members[0].step)
        assert engine.stepping.wait(PATIENCE_S)
        others = [pool.submit(member.step) for member in members[1:]]
        until(lambda: shared.waiting == MEMBERS - 1)
        engine.gate.set()
        outputs = [future.result(PATIENCE_S) for future in (leader, *others)]
    assert outputs == [()] * MEMBERS
    assert engine.steps == 1


def test_a_member_in_a_loop_does_not_lock_the_others_out() -> None:
    engine = Gated()
    shared, (first, second, _) = share(engine)
    first.submit([ask("long", 900)])
    engine.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        stepping = pool.submit(lambda: [first.step() for _ in range(500)])
        assert engine.stepping.wait(PATIENCE_S)
        submitted = pool.submit(lambda: (second.submit([ask("b", 1)]), engine.steps)[1])
        until(lambda: shared.waiting == 1)
        engine.gate.set()
        assert submitted.result(PATIENCE_S) <= 3
        stepping.result(PATIENCE_S)


def test_free_rows_go_to_who_has_the_fewest() -> None:
    engine = Gated(max_slots=4)
    _, (first, second, third) = share(engine)
    first.submit([ask(str(i), 4) for i in range(20)])
    second.submit([ask(str(i), 4) for i in range(20)])
    third.submit([ask("only", 4)])
    first.step()
    assert [member.stats().running for member in (first, second, third)] == [2, 1, 1]
    assert engine.most_at_once == 4
    assert {len(run(member)) for member in (first, second)} == {20}


def test_with_fewer_rows_than_members_all_get_their_turn() -> None:
    engine = Gated(max_slots=1)
    _, members = share(engine)
    for member in members:
        member.submit([ask(str(i), 2) for i in range(3)])
    ended: list[int] = []
    for _ in range(18):
        ended += [number for number, member in enumerate(members) if member.step()]
    assert sorted(ended[:3]) == [0, 1, 2] and len(ended) == 9


@pytest.mark.parametrize(("slots", "concurrency"), [(8, 1), (8, 2), (8, None), (1, None)])
def test_waiting_for_rows_that_others_hold_is_no_sign_of_a_dead_engine(
    slots: int, concurrency: int | None
) -> None:
    engine = FakeEngine(lambda r: [1] * 99, max_slots=slots, max_versions=versions_needed(MEMBERS))
    _, (ours, *others) = share(engine)
    for other in others:
        other.submit([ask(str(i), LONGEST) for i in range(50)])
    others[0].step()
    settings = PartialSettings("refill", groups=1, group_size=2, max_lag=0, concurrency=concurrency)
    sampling = SamplingParams(LONGEST)
    rollouts = PartialRollouts(ours, RENDERER, settings, sampling, seed=0)
    assert len(list(rollouts.round(stream()))) == 1


def test_versions_are_each_members_own() -> None:
    engine = Gated()
    _, (first, second, _) = share(engine)
    first.set_policy(update(1))
    second.set_policy(update(1))
    second.set_policy(update(2))
    outputs = run(first, [ask("a")]), run(second, [ask("a")])
    assert [o["a"].spans for o in outputs] == [(Span(1, 0, 4),), (Span(2, 0, 4),)]
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert all(one.version >= FIRST_SERIAL for one in engine.updates)


def test_an_update_of_one_moves_nobody_else() -> None:
    _, (first, second, _) = share(Gated())
    first.submit([ask("a", 4)])
    first.step()
    for version, mode in enumerate(("keep", "keep", "keep"), start=1):
        second.set_policy(update(version), mode)
    assert run(first)["a"].spans == (Span(0, 0, 4),)


def test_a_version_that_the_engine_forgot_is_given_back() -> None:
    engine = Gated()
    _, (first, second, _) = share(engine)
    first.set_policy(update(1))
    second.set_policy(update(1))  # nobody samples from the first one's yet
    before = len(engine.updates)
    assert run(first, [ask("a")])["a"].spans == (Span(1, 0, 4),)
    assert len(engine.updates) == before + 1
    run(first, [ask("b")])
    assert len(engine.updates) == before + 1, "it is still there"


def test_tokens_sampled_before_join_those_of_the_same_version() -> None:
    _, (first, _, _) = share(Gated())
    first.set_policy(update(3))
    had = Sampled((1,), (-0.5,), (Span(3, 0, 1),))
    assert run(first, [ask("a").resumed(had)])["a"].spans == (Span(3, 0, 4),)
    older = Sampled((1,), (-0.5,), (Span(2, 0, 1),))
    assert run(first, [ask("a").resumed(older)])["a"].spans == (Span(2, 0, 1), Span(3, 1, 4))


def test_a_failing_step_fails_everybody_who_had_something_in_flight_and_nobody_else() -> None:
    engine = Gated()
    shared, (first, second, third) = share(engine)
    first.submit([ask("a")])
    second.submit([ask("a")])
    engine.breaks = EngineError("the card is gone")
    engine.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(first.step)
        assert engine.stepping.wait(PATIENCE_S)
        other = pool.submit(second.step)
        until(lambda: shared.waiting == 1)
        engine.gate.set()
        assert leader.exception(PATIENCE_S) is other.exception(PATIENCE_S) is engine.breaks
    assert third.step() == ()
    engine.breaks = None
    assert engine.stats().running + engine.stats().waiting == 0, "it would fail again"
    assert set(run(second, [ask("a")])) == {"a"}, "told once; what was in flight is gone"


def test_aborting_takes_what_ended_meanwhile_and_leaves_the_others_alone() -> None:
    _, (first, second, _) = share(Gated())
    first.submit([ask("short", 1), ask("long", 9)])
    second.submit([ask("long", 9)])
    second.step()
    outputs = {output.request_id: output for output in first.abort()}
    assert {name: (o.finish, len(o.sampled)) for name, o in outputs.items()} == {
        "short": ("length", 1),
        "long": ("abort", 1),
    }
    assert len(run(second)["long"].sampled) == 9


def test_a_snapshot_is_a_members_own_and_goes_on_elsewhere() -> None:
    _, (first, second, _) = share(Gated())
    first.set_policy(update(5))
    for member in (first, second):
        member.submit([ask("a", 6), ask("pinned", 6, version=BASE_VERSION)])
    first.step()
    snapshot = first.snapshot()
    assert {r.request_id: (r.version, r.sampled.spans) for r in snapshot} == {
        "a": (None, (Span(5, 0, 1),)),
        "pinned": (BASE_VERSION, (Span(BASE_VERSION, 0, 1),)),
    }
    alone = FakeEngine(lambda request: range(1, 100))
    alone.submit(snapshot)
    assert len(run(alone)) == 2


def test_the_engine_sleeps_and_closes_when_all_do() -> None:
    class Sleepy(Gated):
        naps = 0

        def sleep(self) -> Sequence[Output]:
            self.naps += 1
            return super().sleep()

    engine = Sleepy()
    _, members = share(engine)
    for member in members:
        assert engine.naps == 0
        member.submit([ask("a")])
        assert [output.finish for output in member.sleep()] == ["abort"]
    assert engine.naps == 1
    members[0].submit([ask("a")])
    members[1].sleep()
    assert engine.naps == 1, "one of them is awake again"
    for member in members:
        assert not engine.closed
        member.close()
        member.close()
    assert engine.closed


def test_a_closed_member_leaves_no_rows_behind() -> None:
    engine = Gated()
    _, (first, second, _) = share(engine)
    first.submit([ask("a", 50)])
    first.step()
    first.close()
    assert engine.stats().running == 0
    assert len(run(second, [ask("a")])) == 1


def test_an_engine_that_keeps_too_few_versions_is_refused() -> None:
    with pytest.raises(EngineError, match="need 4 at least"):
        SharedEngine(FakeEngine(lambda request: (1,), max_versions=3), MEMBERS)
    few, _ = share(FakeEngine(lambda request: (1,), max_versions=4))
    assert few.capabilities.max_versions == 1


def test_members_in_threads_get_what_they_would_get_alone() -> None:
    """Policies that differ, rows that come and go, and the sampling of each as if it had the engine."""
    model = small_model()
    updates = [lora_update(model, seed) for seed in range(MEMBERS)]
    requests = [[ask(str(i), 3 + 5 * (i % 4), seed=100 * k + i) for i in range(12)] for k in range(MEMBERS)]

    def alone(number: int) -> dict[str, Output]:
        engine = EmbeddedEngine(model, (0,), max_slots=6)
        engine.set_policy(updates[number])
        return run(engine, requests[number])

    engine = EmbeddedEngine(model, (0,), max_slots=6, max_versions=versions_needed(MEMBERS))
    _, members = share(engine)

    def together(number: int) -> dict[str, Output]:
        members[number].set_policy(updates[number])
        return run(members[number], requests[number])

    with ThreadPoolExecutor(MEMBERS) as pool:
        found = list(pool.map(together, range(MEMBERS)))
    for number in range(MEMBERS):
        expected = alone(number)
        assert {n: o.token_ids for n, o in found[number].items()} == {
            n: o.token_ids for n, o in expected.items()
        }
        for name, output in expected.items():
            assert found[number][name].logprobs == pytest.approx(output.logprobs, abs=1e-4)
            assert found[number][name].spans == output.spans


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    seen = threading.Event()
    for _ in range(int(PATIENCE_S / 0.001)):
        if condition():
            return
        seen.wait(0.001)
    raise AssertionError("waited in vain")


def small_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).eval()


def lora_update(model: PreTrainedModel, seed: int) -> PolicyUpdate:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            out, into = module.weight.shape  # type: ignore[union-attr, misc]
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, int(into), generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(int(out), 4, generator=generator)
    return PolicyUpdate(seed + 1, tensors, 0.3)


@pytest.mark.parametrize("logprob", [0.7, float("nan"), float("-inf")])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_log_probability_that_is_none_is_refused_with_its_engine_place_and_value(
    logprob: float, stopped: bool
) -> None:
    said = (-0.5, -0.5, logprob, -0.5)
    engine = FakeEngine(
        lambda request: (1, 2, 3, 0), logprob=lambda _, place, token: said[place], name="mine"
    )
    member = SharedEngine(engine, 1).member("a")
    member.submit([Request("a", (7,), SamplingParams(max_tokens=9))])
    with pytest.raises(EngineError, match=rf"the mine engine .* token 2 of an answer .* {logprob}"):
        for _ in range(3 if stopped else 4):
            member.step()
        member.abort()


def test_a_certain_token_may_be_rounded_above_one() -> None:
    member = SharedEngine(FakeEngine(lambda request: (1, 0), logprob=1e-4), 1).member("a")
    member.submit([Request("a", (7,), SamplingParams(max_tokens=9))])
    assert [output.logprobs for _ in range(2) for output in member.step()] == [(1e-4, 1e-4)]
