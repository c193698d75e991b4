"""Conversations with an environment over a scripted engine."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, cast

import msgspec
import pytest

from swarmnode.chat import Message, Turn, turns_of
from swarmnode.errors import CheckpointError, JudgementLost, ModelError, TaskError
from swarmnode.rollout.engine import PolicyUpdate, Request, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.conversations import ConversationRules
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.tasks.deadlines.work_clock import off_the_clock
from swarmnode.tasks.judging.own_judge import OwnJudge
from swarmnode.tasks.task import is_environment, score_completions
from swarmnode.testing.fake_engine import Answer, FakeEngine, by_turns
from swarmnode.types import Completion, Example, ExampleKey, sampled_places
from tests.two_tools import Letters, TwoTools, last_words, lost, said, skilled, sum_of

RENDERER = cast(Renderer, Letters())
SKILLED = by_turns(skilled)
MODES: tuple[Literal["refill", "april", "sync"], ...] = ("refill", "april", "sync")


def stream(task: TwoTools) -> Iterator[Example]:
    return iter(task.examples(5))


def redraw(task: TwoTools) -> Callable[[ExampleKey], Example]:
    return lambda key: next(islice(task.examples(key.seed), key.index, None))


def rollouts(
    task: TwoTools,
    engine: FakeEngine,
    mode: Literal["refill", "april", "sync"] = "refill",
    *,
    max_tokens: int = 200,
    clock: Callable[[], float] = lambda: 0.0,
    concurrency: int | None = None,
    in_turn: bool = True,
    **rules: Any,
) -> PartialRollouts:
    chosen = PartialSettings(
        mode, groups=2, group_size=3, max_lag=4, concurrency=concurrency, in_turn=in_turn
    )
    bounds = replace(ConversationRules({task.name: task}, turn_timeout_s=10.0), **rules)
    sampling = SamplingParams(max_tokens=max_tokens)
    return PartialRollouts(engine, RENDERER, chosen, sampling, seed=0, conversations=bounds, clock=clock)


def one_round(task: TwoTools, answer: Answer = SKILLED, **changes: Any) -> list[Answered]:
    return list(rollouts(task, FakeEngine(answer), "sync", **changes).round(stream(task)))


def completions(groups: Sequence[Answered]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def learned(completion: Completion) -> str:
    """What was sampled, as text, with a mark for each end of a turn."""
    places = sampled_places(len(completion.token_ids), completion.given)
    return "".join(chr(completion.token_ids[place] or ord("|")) for place in places)


@pytest.mark.parametrize("mode", MODES)
def test_whole_groups_of_conversations_come_out_in_every_mode_while_the_policy_changes(mode: Any) -> None:
    task, engine = TwoTools(), FakeEngine(SKILLED)
    ours, examples = rollouts(task, engine, mode), stream(task)
    for version in (1, 2, 3):
        groups = list(ours.round(examples))
        assert [len(group.completions) for group in groups] == [3, 3]
        for group in groups:
            assert score_completions(task, group.example, group.completions) == ({"right": 1.0},) * 3
            assert all(version - 1 - (one.oldest_version or 0) <= 4 for one in group.completions)
        ours.set_policy(PolicyUpdate(version, {}, 1.0))


def test_what_was_observed_stands_between_the_turns_and_is_not_of_the_policy() -> None:
    group, *_ = one_round(TwoTools())
    first = group.completions[0]
    low, high = group.example.columns["numbers"]
    total = sum_of(group.example)
    assert learned(first) == f"look 0|look 1|add {low} {high}|{total}|"
    assert (
        Letters().decode(first.token_ids)
        == f"look 0\n{low}\nlook 1\n{high}\nadd {low} {high}\n{total}\n{total}"
    )
    assert first.logprobs is not None and first.finish == "stop"
    given = [place for start, end in first.given for place in range(start, end)]
    assert {first.logprobs[place] for place in given} == {0.0}
    assert [place for place, value in enumerate(first.logprobs) if value == 0.0] == given
    assert [turn.observed for turn in turns_of(first.said)] == [
        ({"role": "tool", "content": str(low)},),
        ({"role": "tool", "content": str(high)},),
        ({"role": "tool", "content": str(total)},),
        (),
    ]


def test_a_turn_after_an_observation_is_not_counted_as_resumed() -> None:
    task = TwoTools()
    ours = rollouts(task, FakeEngine(SKILLED), "sync")
    assert len(list(ours.round(stream(task)))) == 2
    assert ours.stats().resumed_requests == 0


def test_requests_say_whether_they_may_go_on() -> None:
    asked: list[Request] = []

    def remembered(request: Request) -> Sequence[int]:
        asked.append(request)
        return SKILLED(request)

    task = TwoTools()
    task.most_turns = 4
    one_round(task, remembered)
    mine = [request for request in asked if request.request_id == asked[0].request_id]
    assert [request.goes_on for request in mine] == [True, True, True, False]


def test_the_last_turn_that_a_policy_has_is_not_answered() -> None:
    task = TwoTools()
    task.most_turns = 2
    found = completions(one_round(task))
    assert {learned(one) for one in found} == {"look 0|look 1|"}
    assert {(one.finish, last_words(one.said)) for one in found} == {("stop", "look 1")}
    assert set(task.played) == {1}


def test_a_turn_that_is_cut_ends_its_conversation() -> None:
    found = completions(one_round(TwoTools(), max_tokens=5))
    assert {(one.finish, learned(one), one.given) for one in found} == {("length", "look ", ())}


def test_an_observation_that_does_not_fit_ends_a_conversation_by_length() -> None:
    found = completions(one_round(TwoTools(), max_tokens=20))
    assert {(one.finish, len(one.token_ids), len(one.given)) for one in found} == {("length", 17, 1)}


def test_a_slow_environment_keeps_nobody_else_waiting() -> None:
    answered = threading.Event()
    first_asked = threading.Event()

    def slow(example: Example, turn: int) -> None:
        if example.key.index == 0:
            first_asked.set()
            assert answered.wait(60)

    task = TwoTools(slow)
    engine = FakeEngine(SKILLED)
    ours = rollouts(task, engine, concurrency=12, in_turn=False)
    out = ours.round(stream(task))
    assert next(out).example.key.index != 0
    assert first_asked.is_set() and not answered.is_set()
    answered.set()
    assert len(list(out)) == 1


def test_what_waits_for_its_environment_counts_as_in_flight() -> None:
    heard_of: set[int] = set()
    all_six = threading.Barrier(6, action=lambda: begun.append(set(heard_of)))
    begun: list[set[int]] = []

    def together(example: Example, turn: int) -> None:
        heard_of.add(example.key.index)
        if turn == 3 and not begun:
            all_six.wait(60)

    assert (
        len(
            list(rollouts(task := TwoTools(together), FakeEngine(SKILLED), concurrency=6).round(stream(task)))
        )
        == 2
    )
    assert begun == [{0, 1}]


def test_an_environment_that_overruns_costs_its_completion_the_reward_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, late = [0.0], threading.Event()

    def stuck(example: Example, turn: int) -> None:
        if example.key.index == 0 and turn == 2:
            assert late.wait(60)

    task, groups = TwoTools(stuck), list[Answered]()
    for group in rollouts(task, FakeEngine(SKILLED), "sync", clock=lambda: now[0]).round(stream(task)):
        groups.append(group)
        now[0] = 100.0
    late.set()
    rewards = {
        group.example.key.index: score_completions(task, group.example, group.completions) for group in groups
    }
    assert rewards == {0: ({},) * 3, 1: ({"right": 1.0},) * 3}
    assert [one.broken_off for one in completions(groups)].count(True) == 3
    assert "did not answer within 10 s" in caplog.text


def test_an_environment_that_answers_one_by_one_has_the_whole_time_for_each() -> None:
    """Six turns of 6 s each at one lock, with 10 s for each: the last is answered after 36 s.

    Nobody is asked a second time: that question's clock would run while the others answer their first."""
    now, all_six, lock = [0.0], threading.Barrier(6), threading.Lock()
    queue, answered = list[int](), list[threading.Thread]()

    def in_turn(example: Example, turn: int) -> None:
        all_six.wait(60)
        with off_the_clock():
            queue.append(turn)
            lock.acquire()
        with releasing(lock):
            queue.pop()
            for before in answered:
                before.join(60)
            while len(queue) + len(answered) < 5:
                time.sleep(0.001)
            now[0] += 6.0
            answered.append(threading.current_thread())

    task = TwoTools(in_turn)
    task.most_turns = 2
    ours = rollouts(task, FakeEngine(SKILLED), "sync", concurrency=6, clock=lambda: now[0])
    assert not any(one.broken_off for one in completions(list(ours.round(stream(task)))))
    assert now[0] == 36.0


@contextmanager
def releasing(lock: threading.Lock) -> Iterator[None]:
    try:
        yield
    finally:
        lock.release()


def test_an_environment_that_dies_costs_no_round_and_one_that_is_broken_ends_it() -> None:
    dying = TwoTools(lost)
    assert all(one.broken_off for one in completions(one_round(dying)))
    assert dying.played == []

    def broken(example: Example, turn: int) -> None:
        raise TaskError("two tools is broken")

    with pytest.raises(TaskError, match="is broken"):
        one_round(TwoTools(broken))


class Speechless(Letters):
    """A renderer whose chat template has no way to say what an environment said."""

    def observation_ids(self, observed: Sequence[Message]) -> tuple[int, ...]:
        raise ModelError("it leaves out what the assistant said")


def test_a_policy_that_can_hold_no_conversation_is_found_out_before_it_is_asked() -> None:
    rules = ConversationRules({"two tools": TwoTools()}, turn_timeout_s=1.0)
    mute = cast(Renderer, Speechless())
    settings = PartialSettings("sync", groups=1, group_size=1, max_lag=1)
    with pytest.raises(ModelError, match="leaves out"):
        PartialRollouts(FakeEngine(SKILLED), mute, settings, SamplingParams(9), seed=0, conversations=rules)


def interrupted(task: TwoTools, steps: int) -> bytes:
    """A state after so many steps of the engine."""
    ours = rollouts(task, FakeEngine(SKILLED), concurrency=6)
    running = ours.in_steps(stream(task))
    for _ in range(steps):
        next(running)
    return ours.state()


@pytest.mark.parametrize("steps", [4, 7, 8, 15, 20])
def test_a_restart_in_the_middle_of_a_conversation_changes_no_token(steps: int) -> None:
    task = TwoTools()
    whole = {one.example.key: one.completions for one in one_round(task)}
    after = rollouts(task, FakeEngine(SKILLED), "sync")
    after.restore(interrupted(task, steps), redraw(task))
    found = list(after.round(iter(())))
    assert {one.example.key: one.completions for one in found} == whole


def test_a_conversation_that_cannot_be_played_again_starts_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked, answers = list[int](), threading.Event()

    def silent(example: Example, turn: int) -> None:
        if turn == 2:
            asked.append(turn)
            answers.wait(30.0)

    ours = rollouts(TwoTools(silent), FakeEngine(SKILLED), "sync")
    # All of them ask for the second time, and the process ends before they are answered.
    assert list(ours.round(stream(TwoTools()), should_stop=lambda: len(asked) == 6)) == []
    state, heard = ours.state(), list[int]()
    answers.set()

    def forgotten(example: Example, turn: int) -> None:
        heard.append(turn)
        if turn == 2 and 1 not in heard:
            lost(example, turn)

    task = TwoTools(forgotten)
    after = rollouts(task, FakeEngine(SKILLED), "sync")
    after.restore(state, redraw(task))
    found = list(after.round(iter(())))
    assert len(found) == 2 and not any(one.broken_off for one in completions(found))
    assert heard[0] == 2 and caplog.text.count("start over: its process died") == 1


def test_what_an_environment_said_must_fit_its_tokens_in_a_checkpoint() -> None:
    task = TwoTools()
    ours = rollouts(task, FakeEngine(SKILLED), "sync")
    found = msgspec.msgpack.decode(ours.state(list(ours.round(stream(task)))))
    found["groups"][0][4][0][6] = []
    with pytest.raises(CheckpointError):
        ours.restore(msgspec.msgpack.encode(found), redraw(task))


def test_groups_that_were_handed_out_and_not_trained_on_come_back_as_they_were() -> None:
    task = TwoTools(lambda example, turn: lost(example, turn) if example.key.index == 1 else None)
    ours = rollouts(task, FakeEngine(SKILLED), "sync")
    groups = list(ours.round(stream(task)))
    again = rollouts(task, FakeEngine(SKILLED), "sync")
    again.restore(ours.state(groups), redraw(task))
    assert list(again.round(iter(()))) == groups


def test_a_stop_leaves_what_waits_for_its_environment_to_the_next_process() -> None:
    stop = threading.Event()

    def killed(example: Example, turn: int) -> None:
        if turn == 3:
            stop.set()
            lost(example, turn)

    task = TwoTools(killed)
    ours = rollouts(task, FakeEngine(SKILLED), "sync")
    assert list(ours.round(stream(task), should_stop=stop.is_set)) == []
    task.before = lambda example, turn: None
    again = rollouts(task, FakeEngine(SKILLED), "sync")
    again.restore(ours.state(), redraw(task))
    found = list(again.round(iter(())))
    assert {learned(one).count("|") for one in completions(found)} == {4}


def test_tasks_that_answer_and_others_share_a_round() -> None:
    task = TwoTools()
    plain = Example(ExampleKey("sums", "1", 0, 0), "1+1?")
    ours = rollouts(
        task,
        FakeEngine(lambda r: SKILLED(r) if "Sum" in Letters().decode(r.prompt_ids) else said("2")),
        "sync",
    )
    found = {one.example.key.task: one for one in ours.round(iter([plain, next(stream(task))]))}
    assert [one.text for one in found["sums"].completions] == ["2"] * 3
    assert {len(one.given) for one in found[task.name].completions} == {3}


def test_a_judged_environment_answers_until_the_node_stops() -> None:
    task = TwoTools()
    judge = OwnJudge({task.name: task}, 30.0)
    judged = judge.tasks[task.name]
    assert is_environment(judged) and judged.most_turns == 8
    example = next(task.examples(3))
    assert judged.observe(example, [Turn("look 0")]) == ({"role": "tool", "content": "3"},)
    judge.stop()
    with pytest.raises(JudgementLost, match="stopping"):
        judged.observe(example, [Turn("look 0")])
