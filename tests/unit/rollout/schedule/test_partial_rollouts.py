"""Partial rollouts over a scripted engine with long-tailed answers."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Literal, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.errors import CheckpointError, ConfigError, EngineError
from swarmnode.rollout.engine import InFlight, Output, PolicyUpdate, Request, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.concurrency_control import REFILL_SHARE, ConcurrencyControl
from swarmnode.rollout.schedule.departure_order import DepartureOrder
from swarmnode.rollout.schedule.open_group import Answered, completion_seed
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.rollout.schedule.partial_stats import PartialStats
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.types import Example, ExampleKey

EOS = 0
LONGEST = 60
SAMPLING = SamplingParams(max_tokens=LONGEST)


class Letters:
    """A renderer of one token per character."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


RENDERER = cast(Renderer, Letters())


def example(index: int, prompt: str = "") -> Example:
    return Example(ExampleKey("sums", "1", 5, index), prompt or f"question {index}")


def stream() -> Iterator[Example]:
    return map(example, count())


def redraw(key: ExampleKey) -> Example:
    return example(key.index)


def long_tailed(request: Request) -> tuple[int, ...]:
    """Lognormal lengths, decided by the seed of the completion."""
    rng = random.Random(request.sampling.seed)
    tokens = min(LONGEST, max(1, round(rng.lognormvariate(2.0, 0.9))))
    return (*(rng.randrange(1, 99) for _ in range(tokens - 1)), EOS)


def as_long_as(lengths: Callable[[int], int]) -> Callable[[Request], tuple[int, ...]]:
    """Answers to `example(i)` have `lengths(i)` tokens."""

    def answer(request: Request) -> tuple[int, ...]:
        index = int("".join(map(chr, request.prompt_ids)).split()[-1])
        return (*(1 for _ in range(lengths(index) - 1)), EOS)

    return answer


def step_s(running: int) -> float:
    """A step of the engine, on a clock that only tests have."""
    return 0.035 + 0.001 * running


class WatchedEngine(FakeEngine):
    """Remembers what it was asked, in order, and how many requests it ever had at once."""

    def __init__(self, answer: Callable[[Request], Sequence[int]], max_slots: int = 64) -> None:
        super().__init__(answer, max_slots, step_s=step_s)
        self.asked: list[Request] = []
        self.most_requests = 0

    def submit(self, requests: Iterable[Request]) -> None:
        accepted = list(requests)
        super().submit(accepted)
        self.asked += accepted
        now = self.stats()
        self.most_requests = max(self.most_requests, now.running + now.waiting)

    def clock(self) -> float:
        return self.stepped_s


def rollouts(
    engine: FakeEngine, mode: Literal["refill", "april", "sync"] = "refill", **changes: object
) -> PartialRollouts:
    chosen = replace(PartialSettings(mode, groups=3, group_size=2, max_lag=8), **changes)
    return PartialRollouts(engine, RENDERER, chosen, SAMPLING, seed=0)


def update(version: int) -> PolicyUpdate:
    return PolicyUpdate(version, {}, 1.0)


def indices(answered: Sequence[Answered] | Iterator[Answered]) -> list[int]:
    return [one.example.key.index for one in answered]


# The whole contract at once: anything a node may do between and in the middle of rounds.


@dataclass
class Life:
    """A node's use of the scheduler, with every promise checked on the way."""

    chosen: PartialSettings
    slots: int
    taken: int = 0
    version: int = 0
    handed: list[Answered] = field(default_factory=list[Answered])

    def __post_init__(self) -> None:
        self.examples = self._stream()
        self._start()

    def _stream(self) -> Iterator[Example]:
        for index in count():
            self.taken += 1
            yield example(index)

    def _start(self) -> None:
        self.engine = WatchedEngine(long_tailed, self.slots)
        self.engine.set_policy(update(self.version))
        self.rollouts = PartialRollouts(
            self.engine, RENDERER, self.chosen, SAMPLING, seed=0, clock=self.engine.clock
        )

    def full_round(self, _: int) -> None:
        found = list(self.rollouts.round(self.examples))
        assert len(found) == self.chosen.groups
        self._check(found)
        self.version += 1
        self.rollouts.set_policy(update(self.version))

    def stopped_round(self, steps: int) -> None:
        left = iter(range(steps))
        self._check(list(self.rollouts.round(self.examples, should_stop=lambda: next(left, None) is None)))

    def deserted_round(self, groups: int) -> None:
        found = self.rollouts.round(self.examples)
        self._check(list(islice(found, min(groups, self.chosen.groups))))
        found.close()

    def evaluation(self, _: int) -> None:
        self.rollouts.park()
        assert self.engine.snapshot() == ()

    def restart(self, _: int) -> None:
        state = self.rollouts.state()
        assert self.rollouts.state() == state
        self._start()
        self.rollouts.restore(state, redraw)

    def _check(self, found: list[Answered]) -> None:
        for one in found:
            assert len(one.completions) == self.chosen.group_size
            for place, completion in enumerate(one.completions):
                seed = completion_seed(0, one.example.key, place)
                asked = Request("", (1,), replace(SAMPLING, seed=seed))
                assert completion.token_ids == long_tailed(asked)
                assert completion.finish == "stop"
                assert completion.oldest_version is not None
                assert self.version - completion.oldest_version <= self.chosen.max_lag
        self.handed += found
        assert len({one.example.key for one in self.handed}) == len(self.handed)
        now = self.rollouts.stats()
        kept = now.groups_in_flight + len(self.rollouts._pool.drawn) + now.surplus_groups
        assert len(self.handed) + kept == self.taken
        assert now.dropped_stale == now.refused == now.dropped_not_redrawable == 0
        assert self.engine.most_requests <= min(self.slots, self.chosen.concurrency or self.slots)


MOVES = (
    Life.full_round,
    Life.full_round,
    Life.stopped_round,
    Life.deserted_round,
    Life.evaluation,
    Life.restart,
)

modes = st.one_of(
    st.builds(PartialSettings, st.just("sync"), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)),
    st.builds(
        PartialSettings,
        st.just("refill"),
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(0, 6),
        concurrency=st.none() | st.integers(1, 40),
    ),
    # APRIL bounds nothing: with a bound that it may reach it would drop groups.
    st.builds(
        PartialSettings,
        st.just("april"),
        st.integers(1, 5),
        st.integers(1, 4),
        st.just(1000),
        over_provision=st.floats(1, 3),
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chosen=modes,
    slots=st.integers(1, 40),
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 25)), max_size=14),
)
def test_every_group_comes_out_once_whole_and_in_time_whatever_happens(
    chosen: PartialSettings, slots: int, moves: list[tuple[Callable[[Life, int], None], int]]
) -> None:
    life = Life(chosen, slots)
    for move, number in moves:
        move(life, number)


# What a round is


@pytest.mark.parametrize("mode", ["sync", "april", "refill"])
def test_each_mode_hands_out_the_same_number_of_groups(mode: Literal["refill", "april", "sync"]) -> None:
    one = rollouts(FakeEngine(long_tailed), mode)
    examples = stream()
    for version in range(1, 6):
        assert len(list(one.round(examples))) == 3
        one.set_policy(update(version))


def test_a_synchronous_round_takes_exactly_its_examples_and_leaves_nothing() -> None:
    engine = FakeEngine(long_tailed)
    examples = stream()
    assert sorted(indices(rollouts(engine, "sync").round(examples))) == [0, 1, 2]
    assert next(examples).key.index == 3
    assert engine.snapshot() == ()


def test_a_lag_of_nothing_is_synchronous() -> None:
    engine = FakeEngine(long_tailed)
    one, examples = rollouts(engine, max_lag=0), stream()
    for version in range(1, 4):
        assert sorted(indices(one.round(examples))) == [3 * version - 3, 3 * version - 2, 3 * version - 1]
        assert engine.snapshot() == ()
        one.set_policy(update(version))


def test_a_round_waits_for_a_group_that_would_be_too_old_after_it() -> None:
    engine = FakeEngine(as_long_as(lambda index: 50 if index == 0 else 3))
    one, examples = rollouts(engine, in_turn=False, max_lag=2, concurrency=6), stream()
    found: list[list[int]] = []
    for version in range(1, 5):
        found.append(indices(one.round(examples)))
        one.set_policy(update(version))
    assert [0 in group for group in found] == [False, False, True, False]
    assert all(len(group) == 3 for group in found)
    assert one.stats().dropped_stale == 0


def test_a_round_ends_early_when_there_are_no_more_examples() -> None:
    one = rollouts(FakeEngine(long_tailed))
    examples = iter([example(0), example(1)])
    assert sorted(indices(one.round(examples))) == [0, 1]
    assert indices(one.round(examples)) == []


def test_a_group_comes_out_as_soon_as_it_is_complete() -> None:
    engine = FakeEngine(as_long_as(lambda index: 40 if index == 0 else 4))
    found = rollouts(engine, in_turn=False, concurrency=6).round(stream())
    assert next(found).example.key.index == 1
    assert engine.stats().running > 0


@pytest.mark.parametrize(("max_lag", "first"), [(0, 1), (1, 0)])
def test_what_is_due_in_this_round_goes_before_its_turn_and_nothing_else_does(
    max_lag: int, first: int
) -> None:
    engine = FakeEngine(as_long_as(lambda index: 40 if index == 0 else 4))
    found = rollouts(engine, max_lag=max_lag, concurrency=6).round(stream())
    assert next(found).example.key.index == first


def test_if_the_group_in_turn_must_let_older_tokens_leave_first_these_go_out_of_turn() -> None:
    """A younger group that stands first in a state: one of the two others would be too old after it."""
    before = rollouts(FakeEngine(long_tailed), "sync", groups=1)
    examples = stream()
    old = [*before.round(examples), *before.round(examples)]
    before.set_policy(update(1))
    state = before.state([*before.round(examples), *old])
    engine = FakeEngine(long_tailed)
    engine.set_policy(update(1))
    one, found = rollouts(engine, groups=1, max_lag=2), list[int]()
    one.restore(state, redraw)
    for version in (2, 3, 4):
        found += indices(one.round(examples))
        one.set_policy(update(version))
    assert (found, one.stats().dropped_stale) == ([0, 1, 2], 0)


def test_no_more_examples_are_drawn_at_once_than_a_round_hands_out() -> None:
    examples = stream()
    assert next(rollouts(FakeEngine(long_tailed)).in_steps(examples)) is None
    assert next(examples).key.index == 3
    short = stream()
    assert indices(rollouts(FakeEngine(long_tailed), "sync").round(short, groups=1)) == [0]
    assert next(short).key.index == 1


def test_surplus_groups_are_kept_and_go_first() -> None:
    engine = FakeEngine(lambda request: (1, EOS))
    one, examples = rollouts(engine, concurrency=10), stream()
    assert indices(one.round(examples)) == [0, 1, 2]
    assert one.stats().surplus_groups == 2
    generated = engine.stats().generated_tokens
    again = one.round(examples)
    assert [next(again).example.key.index, next(again).example.key.index] == [3, 4]
    assert engine.stats().generated_tokens == generated


def test_requests_in_flight_live_through_a_new_policy_without_being_computed_again() -> None:
    engine = FakeEngine(as_long_as(lambda index: 9 if index == 0 else 3))
    one, examples = rollouts(engine, in_turn=False, concurrency=6), stream()
    assert 0 not in indices(one.round(examples))
    one.set_policy(update(1))
    late = next(group for group in one.round(examples) if group.example.key.index == 0)
    assert {(span.version, span.kv) for span in late.completions[0].spans} == {(0, "fresh"), (1, "stale")}
    assert engine.stats().reprefilled_tokens == 0


def test_what_was_parked_resumes_before_anything_new_starts() -> None:
    engine = WatchedEngine(as_long_as(lambda index: 30 if index < 2 else 3))
    one, examples = rollouts(engine, in_turn=False, concurrency=6), stream()
    list(one.round(examples))
    one.park()
    engine.asked.clear()
    next(one.round(examples))
    resumed = [bool(request.sampled) for request in engine.asked]
    assert resumed[:4] == [True] * 4
    assert resumed == sorted(resumed, reverse=True)
    assert one.stats().resumed_requests == 4
    priorities = [request.priority for request in engine.asked]
    assert priorities == sorted(priorities)
    assert max(priorities[:4]) < 0 <= min(priorities[4:])


def test_long_prompts_start_first_once_their_length_is_known() -> None:
    names = ["short 2", "long 40", "short 3", "long 50"]
    engine = WatchedEngine(as_long_as(lambda length: length))
    one = rollouts(engine, "sync", groups=4)
    again = [Example(ExampleKey("sums", "1", 5, i), name) for i, name in enumerate(names)]
    list(one.round(iter(again)))
    engine.asked.clear()
    list(one.round(iter(again)))
    started = ["".join(map(chr, request.prompt_ids)) for request in engine.asked]
    assert started[::2] == ["long 50", "long 40", "short 3", "short 2"]


# april


def test_april_is_the_published_one() -> None:
    """Against the pseudo-code of the reference (section 1.2), written down apart: drain, abort, resume."""
    groups, size, pool_size, rounds = 4, 2, 8, 30
    engine = FakeEngine(long_tailed)
    one, examples = rollouts(engine, "april", groups=groups, max_lag=1000), stream()

    def left(index: int) -> int:
        asked = [replace(SAMPLING, seed=completion_seed(0, example(index).key, p)) for p in range(size)]
        return max(len(long_tailed(Request("", (1,), sampling))) for sampling in asked)

    buffer: dict[int, int] = {}  # steps that a group still needs
    fresh = count()
    for version in range(1, rounds + 1):
        pool = dict(buffer)
        while len(pool) < pool_size:
            index = next(fresh)
            pool[index] = left(index)
        steps = sorted(pool.values())[groups - 1]
        done = sorted(index for index, needed in pool.items() if needed <= steps)
        found = indices(one.round(examples))
        assert set(found) <= set(done)
        assert len(found) == groups
        assert engine.snapshot() == ()
        buffer = {index: max(0, needed - steps) for index, needed in pool.items() if index not in found}
        one.set_policy(update(version))
    assert one.stats().resumed_requests > 0
    assert engine.stats().reprefilled_tokens > 0


def test_april_starts_only_what_it_may_and_fills_nothing_up() -> None:
    engine = WatchedEngine(long_tailed)
    one = rollouts(engine, "april", over_provision=1.5, groups=4)
    list(one.round(stream()))
    assert len({request.request_id.split("/")[0] for request in engine.asked}) == 6


# How old a token may be


def test_groups_that_a_jump_of_the_version_made_too_old_start_over() -> None:
    engine = FakeEngine(as_long_as(lambda index: 30 if index == 0 else 3))
    one, examples = rollouts(engine, in_turn=False, max_lag=3, concurrency=6), stream()
    list(one.round(examples))
    one.set_policy(update(10))
    found = [group for version in range(10, 16) for group in _round_and_update(one, examples, version)]
    assert one.stats().dropped_stale > 0
    assert 0 in indices(found)
    assert len(set(indices(found))) == len(found) == 18


def _round_and_update(one: PartialRollouts, examples: Iterator[Example], version: int) -> list[Answered]:
    found = list(one.round(examples))
    oldest = [completion.oldest_version for group in found for completion in group.completions]
    assert all(old is not None and version - old <= 3 for old in oldest)
    one.set_policy(update(version + 1))
    return found


def test_a_policy_that_comes_in_the_middle_of_a_round_makes_nothing_too_old() -> None:
    engine = FakeEngine(as_long_as(lambda index: 3 + index % 7))
    one, examples = rollouts(engine, max_lag=0), stream()
    found = one.round(examples)
    first = next(found)
    one.set_policy(update(1))
    rest = list(found)
    assert len(rest) == 2
    assert {c.oldest_version for group in rest for c in group.completions} == {1}
    assert first.completions[0].oldest_version == 0


def test_what_was_parked_before_its_first_token_is_as_young_as_what_never_started() -> None:
    one, examples = rollouts(FakeEngine(long_tailed), max_lag=0), stream()
    assert next(one.in_steps(examples)) is None
    one.park()
    one.set_policy(update(1))
    assert len(list(one.round(examples))) == 3
    assert one.stats().dropped_stale == 0


# Updates


@pytest.mark.parametrize(
    ("can", "used"),
    [
        ({"keep", "recompute"}, "keep"),
        ({"recompute"}, "recompute"),
    ],
)
def test_an_update_uses_the_cheapest_mode_that_the_engine_has(can: set[InFlight], used: InFlight) -> None:
    modes: list[InFlight] = []

    class Asked(FakeEngine):
        def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
            modes.append(inflight)
            super().set_policy(update, inflight)

    engine = Asked(long_tailed)
    engine.capabilities = replace(engine.capabilities, inflight=frozenset(can))
    one, examples = rollouts(engine), stream()
    for version in range(1, 4):
        assert len(list(one.round(examples))) == 3
        one.set_policy(update(version))
    assert set(modes) == {used}


def test_an_engine_that_changes_its_policy_only_when_empty_is_emptied_and_filled_again() -> None:
    engine = FakeEngine(as_long_as(lambda index: 9 if index == 0 else 3))
    engine.capabilities = replace(engine.capabilities, inflight=frozenset())
    one, examples = rollouts(engine, in_turn=False, concurrency=6), stream()
    list(one.round(examples))
    one.set_policy(update(1))
    assert engine.snapshot() == ()
    late = next(group for group in one.round(examples) if group.example.key.index == 0)
    assert [span.kv for span in late.completions[0].spans] == ["fresh", "fresh"]


# Restarts


def test_another_engine_goes_on_with_the_very_tokens() -> None:
    one, examples = rollouts(FakeEngine(long_tailed)), stream()
    list(one.round(examples))
    state = one.state()
    other = rollouts(FakeEngine(long_tailed, max_slots=3))
    other.restore(state, redraw)
    now = other.stats()
    assert now.groups_in_flight + now.surplus_groups > 0
    assert other.state() == state
    assert len(list(other.round(examples))) == 3
    assert other.stats().resumed_requests > 0


def test_what_is_in_the_engine_leaves_it_when_a_state_takes_its_place() -> None:
    engine = FakeEngine(long_tailed)
    one, examples = rollouts(engine), stream()
    list(one.round(examples))
    assert engine.snapshot()
    one.restore(one.state(), redraw)
    assert engine.snapshot() == ()
    assert len(list(one.round(examples))) == 3


def test_a_group_that_cannot_be_drawn_again_is_dropped_and_counted() -> None:
    one, examples = rollouts(FakeEngine(long_tailed), "april"), stream()
    list(one.round(examples))
    kept = one.stats()
    one.restore(one.state(), lambda key: None)
    assert one.stats().dropped_not_redrawable == kept.groups_in_flight + kept.surplus_groups == 3
    assert len(list(one.round(examples))) == 3


def test_a_restart_with_a_tighter_bound_on_age_starts_the_too_old_over() -> None:
    engine = FakeEngine(as_long_as(lambda index: 30 if index == 0 else 3))
    one, examples = rollouts(engine, in_turn=False, concurrency=6), stream()
    for version in range(1, 4):
        list(one.round(examples))
        one.set_policy(update(version))
    strict = rollouts(engine, in_turn=False, max_lag=1)
    state = one.state()
    one.park()
    strict.restore(state, redraw)
    assert strict.stats().dropped_stale == 1
    ages = [c.oldest_version for group in strict.round(examples) for c in group.completions]
    assert min(age for age in ages if age is not None) >= 2


def test_a_restart_with_a_smaller_budget_ends_what_has_its_tokens_already() -> None:
    engine = FakeEngine(as_long_as(lambda index: 50))
    one = rollouts(engine, "april")
    steps = iter(range(10))
    assert list(one.round(stream(), should_stop=lambda: next(steps, None) is None)) == []
    tight = PartialSettings("sync", groups=3, group_size=2, max_lag=0)
    other = PartialRollouts(FakeEngine(long_tailed), RENDERER, tight, SamplingParams(max_tokens=7), seed=0)
    other.restore(one.state(), redraw)
    found = list(other.round(iter([])))
    assert {c.finish for group in found for c in group.completions} == {"length"}


def some_state() -> tuple[PartialRollouts, bytes]:
    one = rollouts(FakeEngine(long_tailed), concurrency=6)
    list(one.round(stream()))
    return one, one.state()


@pytest.mark.parametrize("foreign", [b"", b"\x80", b"not a state", b"\xc1" * 40])
def test_a_foreign_state_is_refused_and_changes_nothing(foreign: bytes) -> None:
    one, state = some_state()
    with pytest.raises(CheckpointError, match="cannot read"):
        one.restore(foreign, redraw)
    assert one.state() == state
    assert len(list(one.round(map(example, count(100))))) == 3


def test_a_state_of_another_format_is_refused() -> None:
    one, state = some_state()
    with pytest.raises(CheckpointError):
        one.restore(state.replace(b"format\x01", b"format\x02"), redraw)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_state_is_refused_or_harmless(place: int, byte: int, cut: bool) -> None:
    one, state = some_state()
    place %= len(state)
    damaged = state[:place] if cut else state[:place] + bytes([byte]) + state[place + 1 :]
    try:
        one.restore(damaged, redraw)
    except CheckpointError:
        assert one.state() == state
    else:
        assert not cut
        now = one.stats()
        assert now.groups_in_flight + now.surplus_groups + len(one._pool.drawn) + now.dropped_stale > 0


# Engines that refuse, fall silent, or are not ours alone


def test_a_refused_example_is_left_out_and_the_next_takes_its_place(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(long_tailed, max_length=LONGEST + 20)
    examples = (example(i, "much too long a question for this engine" if i == 1 else "") for i in count())
    assert sorted(indices(rollouts(engine, "sync").round(examples))) == [0, 2, 3]
    assert "skipping example 1 of sums" in caplog.text


def test_many_refusals_are_no_error_as_long_as_some_are_taken() -> None:
    engine = FakeEngine(long_tailed, max_length=LONGEST + 20)
    examples = (example(i, "" if i % 3 == 0 else "much too long a question for this engine") for i in count())
    one = rollouts(engine, "sync")
    assert sorted(indices(one.round(examples))) == [0, 3, 6]
    assert sorted(indices(one.round(examples))) == [9, 12, 15]
    assert one.stats().refused == 10


def test_an_engine_that_refuses_everything_is_an_error_and_not_an_endless_loop() -> None:
    one = rollouts(FakeEngine(long_tailed, max_length=LONGEST))
    with pytest.raises(EngineError, match="refused all examples of a round") as refused:
        list(one.round(stream()))
    assert "rollout.max_prompt_tokens" in refused.value.hint


def test_as_many_refusals_in_a_row_as_a_round_has_groups_are_no_error_yet() -> None:
    engine = FakeEngine(long_tailed, max_length=LONGEST + 20)
    examples = (example(i, "much too long a question for this engine" if i < 3 else "") for i in count())
    assert sorted(indices(rollouts(engine, "sync").round(examples))) == [3, 4, 5]


def test_a_group_of_which_the_engine_refuses_a_later_member_leaves_it_whole() -> None:
    """Three requests at once: the second member of the second group comes when the first is under way."""
    engine = FakeEngine(as_long_as(lambda index: 3 + 20 * index), max_slots=3, max_length=100)
    one = PartialRollouts(
        engine,
        RENDERER,
        PartialSettings("refill", groups=3, group_size=2, max_lag=8, concurrency=3),
        SAMPLING,
        seed=0,
        sampling_of=lambda example, place: SamplingParams(95 if (example.key.index, place) == (1, 1) else 60),
    )
    of_second = {True: set[int](), False: set[int]()}
    for _ in one.in_steps(islice(stream(), 3)):
        names = [request.request_id for request in engine.snapshot()]
        of_second[one.stats().refused > 0].add(sum(name.startswith("1/") for name in names))
    assert 1 in of_second[False] and of_second[True] == {0}


def test_an_engine_that_serves_many_others_before_us_may_be_silent_for_long() -> None:
    class Shared(FakeEngine):
        turn = 0

        def step(self) -> Sequence[Output]:
            self.turn += 1
            return super().step() if self.turn % 10 == 0 else ()

    one = rollouts(Shared(lambda request: (1,) * LONGEST), "sync", groups=1, group_size=1)
    assert indices(one.round(stream())) == [0]


@pytest.mark.parametrize("mode", ["sync", "april", "refill"])
def test_an_engine_that_never_answers_is_an_error(mode: Literal["refill", "april", "sync"]) -> None:
    class Silent(FakeEngine):
        def step(self) -> Sequence[Output]:
            return ()

    with pytest.raises(EngineError, match="never finished"):
        list(rollouts(Silent(long_tailed), mode).round(stream()))


def test_somebody_elses_request_in_the_engine_is_an_error() -> None:
    engine = FakeEngine(long_tailed)
    engine.submit([Request("stranger", (1,), replace(SAMPLING, seed=0))])
    with pytest.raises(EngineError, match="not ours"):
        list(rollouts(engine).round(stream()))


@pytest.mark.parametrize(
    "change", [{"groups": 0}, {"max_lag": -1}, {"over_provision": 0.5}, {"concurrency": 0}]
)
def test_impossible_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rollouts(FakeEngine(long_tailed), **change)


# Sampling


PLAIN = PartialSettings("sync", groups=2, group_size=3, max_lag=0)


def test_without_a_seed_nothing_is_seeded() -> None:
    engine = WatchedEngine(lambda request: (1, EOS))
    list(PartialRollouts(engine, RENDERER, PLAIN, SAMPLING, seed=None).round(stream()))
    assert {request.sampling.seed for request in engine.asked} == {None}


def test_the_sampling_of_a_single_completion_can_be_set() -> None:
    engine = FakeEngine(lambda request: (1,) * LONGEST)
    one = PartialRollouts(
        engine,
        RENDERER,
        PLAIN,
        SAMPLING,
        seed=0,
        sampling_of=lambda example, place: SamplingParams(5 + 10 * example.key.index + place),
    )
    found = sorted(one.round(stream()), key=lambda group: group.example.key.index)
    assert [[len(c.token_ids) for c in group.completions] for group in found] == [[5, 6, 7], [15, 16, 17]]


# Speed, on a clock that counts steps and not the machine


def responses_per_s(mode: Literal["refill", "april", "sync"], rounds: int = 24, warmup: int = 8) -> float:
    engine = WatchedEngine(long_tailed, max_slots=512)
    chosen = PartialSettings(mode, groups=8, group_size=8, max_lag=8, concurrency=64)
    one = PartialRollouts(engine, RENDERER, chosen, SAMPLING, seed=0, clock=engine.clock)
    examples = stream()
    started = 0.0
    for version in range(rounds):
        if version == warmup:
            started = engine.clock()
        assert len(list(one.round(examples))) == 8
        one.set_policy(update(version + 1))
    return (rounds - warmup) * 64 / (engine.clock() - started)


def test_refilling_beats_draining_beats_waiting() -> None:
    sync, april, refill = (responses_per_s(mode) for mode in ("sync", "april", "refill"))
    assert april > 1.2 * sync
    assert refill > 1.15 * april


def test_next_to_no_slot_is_idle_while_refilling() -> None:
    engine = WatchedEngine(long_tailed, max_slots=512)
    chosen = PartialSettings("refill", groups=8, group_size=8, max_lag=8, concurrency=64)
    one, examples = PartialRollouts(engine, RENDERER, chosen, SAMPLING, seed=0), stream()
    for version in range(1, 12):
        list(one.round(examples))
        one.set_policy(update(version))
    idle = one.stats().idle_share
    assert idle is not None
    assert idle < REFILL_SHARE


def timed_steps(engine: WatchedEngine, *, rounds: int) -> PartialStats:
    """The scheduler's figures after so many rounds that refill, each with a new policy."""
    chosen = PartialSettings("refill", groups=8, group_size=8, max_lag=24)
    one = PartialRollouts(engine, RENDERER, chosen, SAMPLING, seed=0, clock=engine.clock)
    examples = stream()
    for version in range(1, rounds + 1):
        list(one.round(examples))
        one.set_policy(update(version))
    return one.stats()


def test_more_requests_run_once_a_step_is_known_to_have_a_large_base() -> None:
    engine = WatchedEngine(long_tailed, max_slots=512)
    now = timed_steps(engine, rounds=3)
    assert now.step_base_s == pytest.approx(0.035, rel=0.05)
    assert now.step_per_request_s == pytest.approx(0.001, rel=0.05)
    assert 64 < now.concurrency <= engine.most_requests <= 350


class Prefilling(WatchedEngine):
    """Takes a second more for each step that starts requests or has another policy."""

    more_work = False

    def submit(self, requests: Iterable[Request]) -> None:
        super().submit(requests)
        self.more_work = True

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        super().set_policy(update, inflight)
        self.more_work = True

    def step(self) -> Sequence[Output]:
        self.stepped_s += 1.0 if self.more_work else 0.0
        self.more_work = False
        return super().step()


def test_a_step_that_starts_something_or_has_a_new_policy_does_not_count_as_one_that_decodes() -> None:
    now = timed_steps(Prefilling(long_tailed, max_slots=512), rounds=5)
    assert now.step_base_s == pytest.approx(0.035, rel=0.05)
    assert now.step_per_request_s == pytest.approx(0.001, rel=0.05)


class Noting(ConcurrencyControl):
    """Remembers of each step its requests, their tokens, and whether it only decoded."""

    def __init__(self) -> None:
        super().__init__(round_requests=2, max_running=2, max_lag=8, fixed=2)
        self.steps: list[tuple[int, int, bool]] = []

    def observe_step(self, running: int, seconds: float | None, context: int = 0) -> None:
        self.steps.append((running, context, seconds is not None))


def test_the_cost_of_a_step_is_learnt_by_what_its_requests_attend_to_unless_it_did_more_than_decode() -> None:
    one = rollouts(FakeEngine(as_long_as(lambda index: 4)), "sync", groups=1)
    one._control = noted = Noting()
    for version, _ in enumerate(one.in_steps(stream())):
        if version == 2:
            one.set_policy(update(1))
    prompts = 2 * len("question 0")
    decoded = (False, True, False, True)  # The first step starts the requests, the third has a new policy.
    assert noted.steps == [(2, prompts + 2 * step, only) for step, only in enumerate(decoded)]


class LateEngine(FakeEngine):
    """Goes on by itself, as one in another process: it has sampled more by the time it hears of an abort."""

    def __init__(self, answer: Callable[[Request], Sequence[int]]) -> None:
        super().__init__(answer)
        self._unheard: list[Output] = []

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        asked = None if request_ids is None else set(request_ids)
        finished = list(super().step())
        heard = [output for output in finished if asked is None or output.request_id in asked]
        self._unheard += [output for output in finished if output not in heard]
        return [*heard, *super().abort(asked)]

    def step(self) -> Sequence[Output]:
        unheard, self._unheard = self._unheard, []
        return [*unheard, *super().step()]


def test_what_ended_before_its_abort_arrived_is_complete_and_not_lost() -> None:
    engine = LateEngine(long_tailed)
    rollouts = PartialRollouts(
        engine, RENDERER, PartialSettings("refill", groups=4, group_size=2, max_lag=4), SAMPLING, seed=0
    )
    examples, seen = stream(), list[int]()
    for number in range(30):
        seen += [answered.example.key.index for answered in rollouts.round(examples)]
        rollouts.park()
        rollouts.set_policy(PolicyUpdate(number + 1, {}, 1.0))
    assert len(seen) == len(set(seen)) == 120
    assert rollouts.stats().dropped_stale == 0


def test_groups_that_nobody_has_trained_on_yet_come_out_first_after_a_restart() -> None:
    kind = PartialSettings("refill", groups=3, group_size=2, max_lag=4)
    before = PartialRollouts(FakeEngine(long_tailed), RENDERER, kind, SAMPLING, seed=0)
    examples = stream()
    trained, waiting = list(before.round(examples)), list(before.round(examples))
    after = PartialRollouts(FakeEngine(long_tailed), RENDERER, kind, SAMPLING, seed=0)
    after.restore(before.state(waiting), redraw)
    first = list(after.round(examples))
    assert {one.example.key for one in first} == {one.example.key for one in waiting}
    assert first[0].completions in [one.completions for one in waiting]
    assert not {one.example.key for one in trained} & {one.example.key for one in first}


@pytest.mark.parametrize(("older", "dropped"), [(0, 3), (1, 0)])
def test_at_a_start_a_complete_round_may_be_as_old_as_the_trainer_allows(older: int, dropped: int) -> None:
    kind = PartialSettings("sync", groups=3, group_size=2, max_lag=0)
    before = PartialRollouts(FakeEngine(long_tailed), RENDERER, kind, SAMPLING, seed=0)
    waiting = list(before.round(stream()))
    engine = FakeEngine(long_tailed)
    engine.set_policy(PolicyUpdate(1, {}, 1.0))
    after = PartialRollouts(engine, RENDERER, kind, SAMPLING, seed=0)
    after.restore(before.state(waiting), redraw, older=older)
    assert after.stats().dropped_stale == dropped
    assert len(list(after.round(stream()))) == 3


def test_at_a_start_no_more_than_one_round_may_be_older_and_nothing_that_is_incomplete() -> None:
    kind = PartialSettings("sync", groups=3, group_size=2, max_lag=0)
    before = PartialRollouts(FakeEngine(long_tailed), RENDERER, kind, SAMPLING, seed=0)
    examples = stream()
    waiting = [*before.round(examples), *before.round(examples)]
    steps = iter(range(3))
    assert not list(before.round(examples, should_stop=lambda: next(steps, None) is None))
    begun = before.stats().groups_in_flight
    engine = FakeEngine(long_tailed)
    engine.set_policy(PolicyUpdate(1, {}, 1.0))
    after = PartialRollouts(engine, RENDERER, kind, SAMPLING, seed=0)
    after.restore(before.state(waiting), redraw, older=1)
    assert (after.stats().surplus_groups, after.stats().dropped_stale) == (3, 3 + begun)


def test_at_a_start_what_is_incomplete_may_not_be_older_even_if_nothing_is_complete() -> None:
    before = rollouts(FakeEngine(as_long_as(lambda index: 9)), "sync", max_lag=0)
    steps = iter(range(3))
    assert not list(before.round(stream(), should_stop=lambda: next(steps, None) is None))
    engine = FakeEngine(long_tailed)
    after = rollouts(engine, "sync", max_lag=0)
    engine.set_policy(update(1))
    after.restore(before.state(), redraw, older=1)
    assert after.stats().dropped_stale == 3


def test_at_a_start_what_is_young_takes_no_place_from_the_one_round_that_may_be_older() -> None:
    before, examples = rollouts(FakeEngine(long_tailed), "sync", max_lag=0), stream()
    old = list(before.round(examples))
    before.set_policy(update(1))
    state = before.state([*before.round(examples), *old])
    engine = FakeEngine(long_tailed)
    after = rollouts(engine, "sync", max_lag=0)
    engine.set_policy(update(1))
    after.restore(state, redraw, older=1)
    assert (after.stats().surplus_groups, after.stats().dropped_stale) == (6, 0)


# The first rounds


def mean_tokens(answered: Sequence[Answered]) -> float:
    lengths = [len(completion.token_ids) for group in answered for completion in group.completions]
    return sum(lengths) / len(lengths)


def first_rounds(seed: int, count: int, **changes: object) -> float:
    """Mean length trained in the first rounds over that of the examples that were drawn for them."""
    engine = FakeEngine(long_tailed, 64, step_s=step_s)
    chosen = replace(PartialSettings("refill", groups=6, group_size=4, max_lag=8, concurrency=24), **changes)
    one = PartialRollouts(engine, RENDERER, chosen, SAMPLING, seed=seed)
    sync = PartialRollouts(
        FakeEngine(long_tailed), RENDERER, replace(chosen, mode="sync"), SAMPLING, seed=seed
    )
    trained: list[Answered] = []
    asked: list[Answered] = []
    mine, others = stream(), stream()
    for version in range(1, count + 1):
        trained += one.round(mine)
        asked += sync.round(others)
        one.set_policy(update(version))
    return mean_tokens(trained) / mean_tokens(asked)


def test_the_first_rounds_train_answers_of_all_lengths() -> None:
    ratios = [first_rounds(seed, 5) for seed in range(6)]
    assert sum(ratios) / len(ratios) > 0.97
    free = [first_rounds(seed, 5, in_turn=False) for seed in range(6)]
    assert sum(free) / len(free) < 0.92


def test_what_may_stay_behind_survives_a_restart() -> None:
    """Or the rounds after it would wait for all that is long, and train on nothing else."""
    engine = FakeEngine(long_tailed)
    one, examples = rollouts(engine), stream()
    one._turns = DepartureOrder(allowed=3.25)
    list(one.round(examples))
    kept = one._turns.allowed
    other = rollouts(FakeEngine(long_tailed))
    other.restore(one.state(), redraw)
    assert other._turns.allowed == kept > 3


def test_a_state_of_before_turns_goes_on_as_it_was() -> None:
    one, examples = rollouts(FakeEngine(long_tailed)), stream()
    list(one.round(examples))
    written = msgspec.msgpack.decode(one.state())
    del written["may_stay_behind"]
    other = rollouts(FakeEngine(long_tailed))
    other.restore(msgspec.msgpack.encode(written), redraw)
    assert other._turns.allowed == len(written["groups"])
