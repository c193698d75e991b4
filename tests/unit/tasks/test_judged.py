"""How a node judges its own rollouts when a judge does not answer."""

import threading

import pytest

from swarmnode.errors import JudgementLost, TaskError
from swarmnode.tasks.judged import LOST_IN_A_ROW, MAX_STUCK, REST_S, OwnJudge
from swarmnode.testing import FakeTask
from swarmnode.types import Example, ExampleKey

EXAMPLE = Example(ExampleKey("sum", "1", 0, 0), "1+1=", {"answer": "2"})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Hanging(FakeTask):
    """Hangs on "hang" until it is released, and is lost on "lost"."""

    def __init__(self, name: str = "sum") -> None:
        self.name = name
        self.release = threading.Event()
        self.scored = 0

    def score(self, example, completions):
        self.scored += 1
        if completions == ["lost"]:
            raise JudgementLost("the reward ended its process", hint="see line 3")
        if completions == ["hang"]:
            self.release.wait()
        return super().score(example, completions)


def judge_of(*tasks: Hanging, timeout_s: float = 30.0, clock=None) -> OwnJudge:
    return OwnJudge({task.name: task for task in tasks}, timeout_s, clock=clock or Clock())


def score(judge: OwnJudge, name: str, *completions: str):
    return judge.tasks[name].score(EXAMPLE, list(completions))


def test_what_is_judged_in_time_is_as_the_task_says():
    assert score(judge_of(Hanging()), "sum", "2", "3") == [{"correct": 1.0}, {"correct": 0.0}]


def test_answers_whose_judge_hangs_have_no_reward_and_it_is_told_once(caplog):
    task = Hanging()
    judge = judge_of(task, timeout_s=0.05)
    for _ in range(2):
        assert score(judge, "sum", "hang") == [{}]
        assert score(judge, "sum", "2") == [{"correct": 1.0}]
    assert (judge.lost, judge.stuck) == (2, 2)
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "task sum did not return within 0.05 s" in told and "tasks.score_timeout_s" in told
    task.release.set()


def test_the_only_task_is_given_up_after_a_few_in_a_row_with_what_to_do():
    judge = judge_of(Hanging())
    for _ in range(LOST_IN_A_ROW - 1):
        assert score(judge, "sum", "lost") == [{}]
    with pytest.raises(TaskError, match="the only task was given up after 3 groups") as caught:
        score(judge, "sum", "lost")
    assert "see line 3" in caught.value.hint and "task check" in caught.value.hint


def test_a_judgement_in_between_makes_it_begin_anew():
    judge = judge_of(Hanging())
    for _ in range(3 * LOST_IN_A_ROW):
        assert score(judge, "sum", "lost") == [{}]
        assert score(judge, "sum", "2") == [{"correct": 1.0}]


def test_one_of_several_tasks_is_left_aside_and_tried_again(caplog):
    clock, bad, good = Clock(), Hanging("bad"), Hanging("good")
    judge = judge_of(bad, good, clock=clock)
    for _ in range(LOST_IN_A_ROW + 5):
        assert score(judge, "bad", "lost") == [{}]
    assert bad.scored == LOST_IN_A_ROW
    assert judge.lost == LOST_IN_A_ROW + 5
    assert "left aside" in caplog.text
    assert score(judge, "good", "2") == [{"correct": 1.0}]

    clock.now += REST_S
    assert score(judge, "bad", "lost") == [{}]
    assert score(judge, "bad", "2") == [{}], "it was tried once, and rests again"
    clock.now += REST_S
    assert score(judge, "bad", "2") == [{"correct": 1.0}]


def test_when_the_last_task_rests_too_the_run_ends():
    judge = judge_of(Hanging("bad"), Hanging("worse"))
    for _ in range(LOST_IN_A_ROW):
        score(judge, "bad", "lost")
    with pytest.raises(TaskError, match="the last task that was left"):
        for _ in range(LOST_IN_A_ROW):
            score(judge, "worse", "lost")


def test_threads_that_never_end_are_bounded():
    task, other = Hanging(), Hanging("other")
    judge = judge_of(task, other, timeout_s=0.02)
    for _ in range(2 * MAX_STUCK):
        score(judge, "sum", "hang")
        if judge.stuck < MAX_STUCK:
            score(judge, "sum", "2")
        else:
            break
    scored = task.scored
    assert judge.stuck == MAX_STUCK
    assert score(judge, "other", "2") == [{}]
    assert (task.scored, other.scored) == (scored, 0)
    task.release.set()


def test_a_stop_lets_a_hanging_judgement_return_at_once_and_counts_nothing():
    task = Hanging()
    judge = judge_of(task, timeout_s=3600.0)
    threading.Timer(0.1, judge.stop).start()
    assert score(judge, "sum", "hang") == [{}]
    assert score(judge, "sum", "2") == [{}]
    assert judge.lost == 0
    with pytest.raises(JudgementLost):
        next(iter(judge.tasks["sum"].examples(0)))
    task.release.set()
