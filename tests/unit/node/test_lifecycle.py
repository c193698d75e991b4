from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.node.lifecycle import (
    Evaluate,
    Pause,
    Rest,
    RunRound,
    SaveCheckpoint,
    Stop,
    View,
    WaitForPeers,
    next_action,
)

VIEW = View(
    round=3,
    begun_at=0,
    rounds_limit=None,
    stopping=False,
    evaluated_round=0,
    saved_round=None,
    saved_evaluation=None,
    eval_every=0,
    checkpoint_every=10,
    peers=0,
    peers_wanted=0,
    waited_s=0.0,
)
NEW = replace(VIEW, round=0, evaluated_round=None)


def test_a_new_node_measures_itself_before_its_first_round() -> None:
    assert next_action(NEW) == Evaluate()
    assert next_action(replace(NEW, evaluated_round=0)) == RunRound(1)


def test_a_node_rests_before_its_next_round_and_ends_or_pauses_without() -> None:
    tired = replace(VIEW, rest_left_s=2.5, saved_round=3)
    assert next_action(tired) == Rest(2.5)
    assert next_action(replace(tired, rest_left_s=-1.0)) == RunRound(4)
    assert next_action(replace(tired, paused=True)) == Pause()
    assert next_action(replace(tired, stopping=True)) == Stop("stopped on request")


def test_a_paused_node_begins_no_round_but_ends_and_saves_as_ever() -> None:
    paused = replace(VIEW, paused=True)
    assert next_action(paused) == SaveCheckpoint()
    assert next_action(replace(paused, saved_round=3)) == Pause()
    assert next_action(replace(paused, saved_round=3, stopping=True)) == Stop("stopped on request")
    assert next_action(replace(paused, saved_round=3, rounds_limit=3, evaluated_round=3)) != Pause()


def test_a_node_alone_starts_at_once() -> None:
    assert next_action(replace(NEW, peers=0)) == Evaluate()


def test_a_node_that_wants_peers_waits_for_them_but_not_for_ever() -> None:
    waiting = replace(NEW, peers=1, peers_wanted=2)
    assert next_action(waiting) == WaitForPeers(1)
    assert next_action(replace(waiting, peers=2)) == Evaluate()
    assert next_action(replace(waiting, waited_s=61.0)) == Evaluate()


def test_a_checkpoint_is_written_when_due_and_once() -> None:
    due = replace(VIEW, round=10)
    assert next_action(due) == SaveCheckpoint()
    assert next_action(replace(due, saved_round=10)) == RunRound(11)


def test_the_end_is_measured_saved_and_then_reached() -> None:
    end = replace(VIEW, round=7, rounds_limit=7)
    assert next_action(end) == Evaluate()
    assert next_action(replace(end, evaluated_round=7)) == SaveCheckpoint()
    saved = replace(end, evaluated_round=7, saved_round=7, saved_evaluation=7)
    assert next_action(saved) == Stop("7 rounds are done")


def test_a_start_whose_rounds_were_all_done_before_says_that_there_is_nothing_to_do() -> None:
    end = replace(VIEW, round=7, rounds_limit=5, evaluated_round=7, saved_round=7, saved_evaluation=7)
    done = next_action(replace(end, begun_at=7))
    assert isinstance(done, Stop) and done.reason.startswith(
        "nothing to do: 7 of 5 rounds are done; raise --rounds"
    )
    assert next_action(replace(end, begun_at=6)) == Stop("7 rounds are done")


def test_a_run_that_goes_on_with_other_tasks_measures_itself_first() -> None:
    assert next_action(replace(VIEW, round=7, begun_at=7, evaluated_round=None)) == Evaluate()


def test_a_stop_is_obeyed_before_anything_else_but_saves() -> None:
    stopping = replace(VIEW, stopping=True, peers_wanted=5)
    assert next_action(stopping) == SaveCheckpoint()
    assert next_action(replace(stopping, saved_round=3)) == Stop("stopped on request")
    assert next_action(replace(NEW, stopping=True)) == Stop("stopped on request")


def test_evaluations_come_as_often_as_asked() -> None:
    view = replace(VIEW, eval_every=3)
    assert next_action(view) == Evaluate()
    assert next_action(replace(view, evaluated_round=3, saved_round=3, saved_evaluation=3)) == RunRound(4)


def test_a_policy_that_was_evaluated_is_saved_since_it_may_be_the_best() -> None:
    measured = replace(VIEW, eval_every=3, evaluated_round=3, saved_round=2)
    assert next_action(measured) == SaveCheckpoint()
    assert next_action(replace(NEW, evaluated_round=0)) == RunRound(1), "nothing is learnt before round 1"


def test_what_was_evaluated_after_a_start_belongs_to_the_checkpoint_it_started_from() -> None:
    resumed = replace(VIEW, round=10, eval_every=10, saved_round=10, saved_evaluation=0)
    assert next_action(resumed) == Evaluate()
    measured = replace(resumed, evaluated_round=10)
    assert next_action(measured) == SaveCheckpoint()
    assert next_action(replace(measured, stopping=True)) == SaveCheckpoint()
    assert next_action(replace(measured, saved_evaluation=10)) == RunRound(11)


@given(st.integers(0, 30), st.integers(0, 4), st.integers(1, 7))
def test_a_node_that_does_what_it_is_told_always_comes_to_an_end(
    limit: int, eval_every: int, checkpoint_every: int
) -> None:
    view = replace(NEW, rounds_limit=limit, eval_every=eval_every, checkpoint_every=checkpoint_every)
    for _ in range(4 * limit + 8):
        match next_action(view):
            case RunRound(number):
                assert number == view.round + 1
                view = replace(view, round=number)
            case Evaluate():
                view = replace(view, evaluated_round=view.round)
            case SaveCheckpoint():
                view = replace(view, saved_round=view.round, saved_evaluation=view.evaluated_round)
            case Stop():
                assert view.round == view.evaluated_round == limit
                assert view.saved_round == limit or limit == 0
                return
            case WaitForPeers():
                raise AssertionError("nobody was asked for")
    raise AssertionError("it never stopped")
