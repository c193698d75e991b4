"""Rollouts in the gaps of a pipeline: an engine and a clock that only tests have."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import ConfigError, EngineError
from swarmnode.extensions.pipeline.idle.idle_budget import (
    BEGIN,
    HANDOVER_S,
    RECENT_STEPS,
    UNKNOWN_S,
    DelayGuard,
    IdlePiece,
    IdleSettings,
    StepForecast,
)
from swarmnode.extensions.pipeline.idle.idle_rollouts import MISFITS, IdleRollouts
from swarmnode.rollout.engine import Output, PolicyUpdate, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.types import Example, ExampleKey

TOKENS = 12
STEP_S = 0.004
SETTINGS = IdleSettings(step_s=2 * STEP_S, most_rows=8)


class Letters:
    """A renderer of one token per character."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def stream() -> Iterator[Example]:
    return (Example(ExampleKey("sums", "1", 5, index), f"question {index}") for index in count())


class Member:
    """A thread with a stage: its clock, its work, and the engine it has for itself."""

    def __init__(
        self,
        examples: Iterator[Example] | None = None,
        step_s: Callable[[int], float] = lambda rows: STEP_S,
        careful: IdleSettings = SETTINGS,
        groups: int = 3,
        tokens: int = TOKENS,
    ) -> None:
        self.now_s = 100.0
        self.busy_s = 0.0
        self.work_at_s = float("inf")
        self.steps = 0
        self.got: list[Answered] = []
        self.engine = Stepping(self, step_s, tokens)
        self.rollouts = PartialRollouts(
            self.engine,
            cast(Renderer, Letters()),
            PartialSettings("refill", groups=groups, group_size=2, max_lag=4),
            SamplingParams(max_tokens=tokens),
            seed=0,
        )
        self.idle = IdleRollouts(
            self.engine,
            self.rollouts,
            examples or stream(),
            self.got.append,
            careful,
            lambda: self.busy_s,
            clock=lambda: self.now_s,
        )

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy_s += seconds

    def be_idle(self, gap_s: float, *, work_after_s: float = float("inf")) -> int:
        """Steps that ran in a gap."""
        self.work_at_s = self.now_s + work_after_s
        before = self.steps
        self.idle.run(self.now_s + gap_s, lambda: self.now_s >= self.work_at_s)
        return self.steps - before


class Stepping(FakeEngine):
    """Its steps take time, and some do not end well."""

    def __init__(self, member: Member, step_s: Callable[[int], float], tokens: int) -> None:
        super().__init__(lambda request: (*[65] * (tokens - 1), 0))
        self._member = member
        self._takes_s = step_s
        self.broken = False

    def step(self) -> Sequence[Output]:
        if self.broken:
            raise EngineError("the card fell off the bus")
        outputs = super().step()
        self._member.now_s += self._takes_s(self.stats().running)
        self._member.steps += 1
        return outputs


def member_at_work(**kwargs: object) -> Member:
    """One that knows its steps, and has worked for long."""
    member = Member(**kwargs)  # pyright: ignore[reportArgumentType]
    member.idle.rehearse(100)
    member.work(60.0)
    member.got.clear()
    return member


def test_a_gap_is_filled_with_steps_that_end_within_it() -> None:
    member = member_at_work()
    began_s = member.now_s
    assert member.be_idle(1.0) > 100
    assert 0.98 < member.now_s - began_s <= 1.0 - HANDOVER_S
    stats = member.idle.stats()
    assert (stats.slices, stats.overruns, stats.too_short) == (1, 0, 1)


def test_a_gap_shorter_than_a_step_is_left_alone() -> None:
    member = member_at_work()
    assert member.be_idle(STEP_S + HANDOVER_S / 2) == 0
    assert member.idle.stats().slices == 0


def test_what_a_slice_leaves_unfinished_the_next_one_goes_on_with() -> None:
    member = member_at_work()
    alone = Member()
    alone.idle.rehearse(600)
    while len(member.got) < 12:
        assert member.be_idle(3 * STEP_S) <= 3
        member.work(1.0)
    texts = {one.example.key: [c.token_ids for c in one.completions] for one in alone.got}
    assert all(texts[one.example.key] == [c.token_ids for c in one.completions] for one in member.got)
    assert len({one.example.key for one in member.got}) == len(member.got)
    assert member.idle.stats().groups >= 12


def test_it_stops_with_the_step_in_which_stage_work_comes_and_counts_it() -> None:
    member = member_at_work()
    began_s = member.now_s
    member.be_idle(1.0, work_after_s=0.1)
    assert 0.1 <= member.now_s - began_s <= 0.1 + STEP_S
    stats = member.idle.stats()
    assert stats.overruns == 1
    assert stats.overrun_s == pytest.approx(STEP_S)


def test_nothing_begins_while_stage_work_waits() -> None:
    member = member_at_work()
    assert member.be_idle(1.0, work_after_s=0.0) == 0


def test_whoever_has_not_worked_has_nothing_to_delay() -> None:
    member = Member()
    member.idle.rehearse(100)
    assert member.be_idle(1.0) == 0
    assert member.idle.stats().paused == 1
    member.work(1.0)
    assert member.be_idle(1.0) > 0


def test_after_delays_it_pauses_until_enough_was_worked() -> None:
    member = member_at_work()
    while member.be_idle(1.0, work_after_s=0.001):
        member.work(0.0)
    stats = member.idle.stats()
    assert stats.overrun_s <= 0.02 * 60.0
    assert stats.overruns > 100
    member.work(2 * STEP_S / 0.02)
    assert member.be_idle(1.0, work_after_s=0.001) == 1


def test_rows_grow_until_a_step_takes_as_long_as_it_may() -> None:
    member = member_at_work(
        step_s=lambda rows: 0.002 + 0.001 * rows, careful=IdleSettings(0.008, most_rows=64)
    )
    assert 4 <= member.idle.stats().rows <= 6
    slow = member_at_work(step_s=lambda rows: 0.02)
    assert slow.idle.stats().rows == 1


def test_rows_shrink_when_steps_become_slower() -> None:
    slowness = 1.0
    member = member_at_work(step_s=lambda rows: slowness * 0.001 * rows, careful=IdleSettings(0.008))
    assert member.idle.stats().rows > 4
    slowness = 8.0
    for _ in range(100):
        member.be_idle(0.2)
        member.work(10.0)
    assert member.idle.stats().rows == 1


def test_a_new_policy_is_sampled_from_with_the_next_round() -> None:
    member = member_at_work()
    member.idle.use_policy(PolicyUpdate(1, {}, 1.0))
    member.idle.use_policy(PolicyUpdate(2, {}, 1.0))
    member.be_idle(1.0)
    assert [update.version for update in member.engine.updates] == [2]
    assert {span.version for c in member.got[-1].completions for span in c.spans} == {2}


def test_a_gap_ends_where_there_is_nothing_to_ask() -> None:
    member = member_at_work(examples=iter(()))
    assert member.be_idle(1.0) == 0
    assert member.idle.stats().failure is None


def test_rounds_that_others_left_complete_do_not_end_a_gap() -> None:
    member = member_at_work(groups=1, tokens=2)
    member.rollouts.keep_in_flight(8)  # two groups end with each step, and a round takes one
    assert member.be_idle(1.0) > 200


def test_a_broken_engine_ends_the_rollouts_and_not_the_pipeline() -> None:
    member = member_at_work()
    member.engine.broken = True
    assert member.be_idle(1.0) == 0
    assert "fell off" in (member.idle.stats().failure or "")
    member.engine.broken = False
    assert member.be_idle(1.0) == 0


def test_a_single_hiccup_does_not_keep_it_out_for_ever() -> None:
    hiccup = True
    member = Member(step_s=lambda rows: 0.9 if hiccup else STEP_S, careful=replace(SETTINGS, most_rows=1))
    member.idle.rehearse(30)
    member.work(60.0)
    hiccup = False
    tries = [member.be_idle(0.05) for _ in range(20 * MISFITS)]
    assert tries[0] == 0
    assert tries[-1] == 12


def test_a_forecast_is_of_recent_pieces_of_the_same_kind() -> None:
    forecast = StepForecast()
    forecast.observe(BEGIN, 0.5)
    forecast.observe(IdlePiece(8, 3), 0.3)
    for _ in range(RECENT_STEPS):
        forecast.observe(IdlePiece(8, 0), 0.1)
    for _ in range(RECENT_STEPS):
        forecast.observe(IdlePiece(8, 0), 0.01)
    assert forecast.upper_s(IdlePiece(8, 0)) == 0.01
    assert forecast.upper_s(IdlePiece(8, 3)) == 0.3
    assert forecast.upper_s(BEGIN) == 0.5
    assert StepForecast().upper_s(IdlePiece(8, 0)) == UNKNOWN_S


@settings(deadline=None)
@given(
    share=st.floats(0.0, 0.2),
    window_s=st.floats(0.1, 100.0),
    history=st.lists(
        st.one_of(
            st.tuples(st.just("work"), st.floats(0.0, 20.0)),
            st.tuples(st.just("piece"), st.floats(0.0, 1.0)),
        ),
        max_size=200,
    ),
)
def test_delay_never_exceeds_its_share_of_the_work_whatever_happens(
    share: float, window_s: float, history: list[tuple[str, float]]
) -> None:
    guard = DelayGuard(share, window_s)
    worked_s = delayed_s = 0.0
    for what, seconds in history:
        if what == "work":
            guard = guard.worked(seconds)
            worked_s += seconds
        elif guard.allows(seconds):
            guard = guard.delayed(seconds)
            delayed_s += seconds
        assert delayed_s <= share * worked_s + 1e-9
        # What may still be delayed at once is bounded by the window, however long nothing was.
        assert not guard.allows(share * (window_s + 20.0) * 1.001 + 1e-9)


@settings(deadline=None)
@given(
    gaps=st.lists(st.tuples(st.floats(0.001, 0.1), st.floats(0.001, 0.1), st.floats(0.01, 0.5)), max_size=20)
)
def test_a_pipeline_is_not_delayed_by_more_than_its_share(gaps: list[tuple[float, float, float]]) -> None:
    """Whatever the plan predicts and whenever work really comes."""
    member = Member()
    member.idle.rehearse(100)
    waited_s = 0.0
    for predicted_s, real_s, work_s in gaps:
        member.be_idle(predicted_s, work_after_s=real_s)
        waited_s += max(0.0, member.now_s - member.work_at_s)
        member.now_s = max(member.now_s, member.work_at_s)
        member.work(work_s)
        assert waited_s <= 0.02 * member.busy_s + 1e-9


@pytest.mark.parametrize(
    "change", [{"step_s": 0.0}, {"most_rows": 0}, {"delay_share": 1.0}, {"window_s": 0.0}]
)
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(SETTINGS, **change)  # pyright: ignore[reportArgumentType]
