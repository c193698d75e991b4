"""How a node judges its own rollouts when a judge does not answer."""

import threading
from concurrent.futures import wait
from functools import partial
from itertools import islice

import pytest

from swarmnode.chat import Turn
from swarmnode.errors import JudgementLost, TaskError
from swarmnode.tasks.deadlines.daemon_threads import in_daemon_thread
from swarmnode.tasks.deadlines.timed_threads import MAX_STUCK
from swarmnode.tasks.judging.own_judge import JudgedEnvironment, OwnJudge
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.testing import FakeTask
from swarmnode.types import Example, ExampleKey

EXAMPLE = Example(ExampleKey("sum", "1", 0, 0), "1+1=", {"answer": "2"})


class Hanging(FakeTask):
    """Hangs on "hang" until it is released, is lost on "lost", and raises on "raise"."""

    def __init__(self, name: str = "sum") -> None:
        self.name = name
        self.release = threading.Event()
        self.scored = 0
        self.inside = self.most_inside = 0

    def score(self, example, completions):
        self.scored += 1
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        try:
            return self._score(example, completions)
        finally:
            self.inside -= 1

    def _score(self, example, completions):
        match completions:
            case ["lost"]:
                raise JudgementLost("the reward ended its process", hint="see line 3")
            case ["raise"]:
                error = TaskError("reward correct failed: ZeroDivisionError()", hint="see sums.py line 7")
                error.add_note("Traceback: sums.py, line 7, in reward")
                raise error
            case ["memory"]:
                raise MemoryError
            case ["hang"]:
                self.release.wait()
            case ["nonsense"]:
                return []
            case ["bug"]:
                raise ValueError("in the reward")
            case ["text"]:
                return [{"correct": "1"}]
        return super().score(example, completions)


class Answering(Hanging):
    """An environment whose answers fail as its scores do."""

    most_turns, exchangeable = 2, True

    def observe(self, example, turns):
        self._score(example, [turn.said for turn in turns])
        return ()


def judge_of(*tasks: Hanging, timeout_s: float = 30.0, max_failures: int = 3) -> OwnJudge:
    return OwnJudge({task.name: task for task in tasks}, timeout_s, max_failures=max_failures)


def score(judge: OwnJudge, name: str, *completions: str):
    return judge.tasks[name].score(EXAMPLE, list(completions))


def hang(judge: OwnJudge, name: str):
    """A judgement that hangs, which alone has a short deadline."""
    judge.threads.limit_s = 0.02
    try:
        return score(judge, name, "hang")
    finally:
        judge.threads.limit_s = judge.timeout_s


def test_what_is_judged_in_time_is_as_the_task_says():
    assert score(judge_of(Hanging()), "sum", "2", "3") == [{"correct": 1.0}, {"correct": 0.0}]


def test_answers_whose_judge_hangs_have_no_reward_and_it_is_told_once(caplog):
    task = Hanging()
    judge = judge_of(task)
    for _ in range(2):
        assert hang(judge, "sum") == [{}]
        assert score(judge, "sum", "2") == [{"correct": 1.0}]
    assert (judge.lost, judge.threads.stuck) == (2, 2)
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "task sum did not return within 0.02 s" in told and "tasks.score_timeout_s" in told
    task.release.set()


@pytest.mark.parametrize("how", ["lost", "hang", "memory"])
def test_so_many_failures_in_a_row_end_the_run(how):
    task = Hanging()
    judge = judge_of(task, timeout_s=0.02 if how == "hang" else 30.0)
    for _ in range(2):
        assert score(judge, "sum", how) == [{}]
    with pytest.raises(TaskError, match="task sum was given up after 3 groups in a row") as caught:
        score(judge, "sum", how)
    assert "task check" in caught.value.hint and judge.lost == 3
    assert ("tasks.score_timeout_s" in caught.value.hint) == (how == "hang")
    task.release.set()


@pytest.mark.parametrize("how", ["raise", "nonsense", "bug", "text"])
def test_a_reward_that_judged_before_may_raise_now_and_then(how, caplog):
    judge = judge_of(Hanging())
    for _ in range(5):
        assert score(judge, "sum", "2") == [{"correct": 1.0}]
        assert score(judge, "sum", how) == [{}]
        assert score(judge, "sum", how) == [{}]
    assert judge.lost == 10
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_what_a_reward_raised_is_shown_with_its_traceback(caplog):
    judge = judge_of(Hanging())
    score(judge, "sum", "2")
    score(judge, "sum", "raise")
    assert "sums.py, line 7, in reward" in caplog.text
    score(judge, "sum", "raise")
    with pytest.raises(TaskError, match=r"given up after 3 groups .* ZeroDivisionError") as caught:
        score(judge, "sum", "raise")
    assert caught.value.__notes__ == ["Traceback: sums.py, line 7, in reward"]
    assert "see sums.py line 7" in caught.value.hint


@pytest.mark.parametrize("how", ["bug", "text"])
def test_an_object_of_a_script_that_fails_is_an_error_with_its_line(how):
    with pytest.raises(TaskError, match="the reward of task sum failed") as caught:
        score(judge_of(Hanging()), "sum", how)
    assert how == "text" or "test_own_judge.py line" in caught.value.hint


def test_a_bug_in_the_answer_of_an_environment_is_one_of_the_task():
    judge = judge_of(Answering())
    with pytest.raises(TaskError, match=r"observe\(\) of sum failed: ValueError"):
        judge.tasks["sum"].observe(EXAMPLE, [Turn("bug")])


def test_a_reward_that_raises_before_it_ever_judged_ends_the_run_at_once():
    with pytest.raises(TaskError, match=r"^reward correct failed") as caught:
        score(judge_of(Hanging()), "sum", "raise")
    assert caught.value.__notes__


def test_failures_count_for_each_task_by_itself():
    judge = judge_of(Hanging("bad"), Hanging("good"))
    for _ in range(2):
        assert score(judge, "bad", "lost") == [{}]
        assert score(judge, "good", "2") == [{"correct": 1.0}]
    with pytest.raises(TaskError, match="task bad was given up"):
        score(judge, "bad", "lost")


def test_one_failure_is_enough_where_a_user_says_so():
    with pytest.raises(TaskError, match="given up after a group without"):
        score(judge_of(Hanging(), max_failures=1), "sum", "lost")


def test_a_task_of_this_process_is_asked_by_one_thread_at_a_time():
    task = Hanging()
    judge = judge_of(task)
    threads = [threading.Thread(target=score, args=(judge, "sum", "2")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (task.scored, task.most_inside, judge.width) == (16, 1, 1)


def test_threads_that_never_end_are_bounded():
    task, other = Hanging(), Hanging("other")
    judge = judge_of(task, other, max_failures=99)
    for _ in range(2 * MAX_STUCK):
        hang(judge, "sum")
        if judge.threads.stuck < MAX_STUCK:
            score(judge, "sum", "2")
        else:
            break
    scored = task.scored
    assert judge.threads.stuck == MAX_STUCK
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


def test_an_environment_that_fails_breaks_off_one_conversation_and_too_many_of_them_end_the_run():
    judge = judge_of(Answering())
    environment = judge.tasks["sum"]
    assert isinstance(environment, JudgedEnvironment)
    assert environment.observe(EXAMPLE, [Turn("2")]) == ()
    score(judge, "sum", "2")
    for _ in range(2):
        with pytest.raises(JudgementLost, match="ZeroDivisionError"):
            environment.observe(EXAMPLE, [Turn("raise")])
        environment.broke_off()
    with pytest.raises(TaskError, match=r"given up after 3 groups .* ZeroDivisionError"):
        environment.broke_off()


def test_an_environment_that_fails_before_it_ever_judged_ends_the_run_at_once():
    environment = judge_of(Answering()).tasks["sum"]
    assert isinstance(environment, JudgedEnvironment)
    with pytest.raises(TaskError, match=r"^reward correct failed"):
        environment.observe(EXAMPLE, [Turn("raise")])


def test_a_stop_lets_what_waits_for_an_environment_that_hangs_go_on_at_once():
    """A step that hangs in this process keeps the lock of all tasks, and others wait for it one by one."""
    release, entered = threading.Event(), threading.Event()

    class Stuck:
        def reset(self, **columns):
            return "Go."

        def step(self, said):
            entered.set()
            release.wait()
            return "", 1.0, True, {}

    task = as_task(None, environment=Stuck)
    judge = OwnJudge({task.name: task}, timeout_s=30.0)
    judged = judge.tasks[task.name]
    example = next(judged.examples(0))
    asked = [in_daemon_thread(partial(judged.observe, example, (Turn("left"),))) for _ in range(3)]
    entered.wait()
    drawn = in_daemon_thread(lambda: list(islice(judged.examples(1), 4)))
    judge.stop()
    with pytest.raises(JudgementLost, match="stopping"):
        drawn.result(timeout=20.0)
    release.set()
    wait(asked)


def test_a_stop_waits_for_no_draw_that_hangs():
    entered, release = threading.Event(), threading.Event()

    class Stuck:
        def reset(self, **columns):
            entered.set()
            release.wait()
            return "Go."

        def step(self, said):
            return "", 1.0, True, {}

    task = as_task(None, environment=Stuck)
    judge = OwnJudge({task.name: task}, timeout_s=30.0)
    drawn = in_daemon_thread(lambda: list(islice(judge.tasks[task.name].examples(1), 4)))
    entered.wait()
    judge.stop()
    with pytest.raises(JudgementLost, match="stopping"):
        drawn.result(timeout=20.0)
    release.set()


def test_a_tasks_examples_are_drawn_in_one_thread_which_ends_with_them():
    """A generator may hold what wants to stay in its thread, as a connection of sqlite3 does."""
    threads = []

    class Drawn(Hanging):
        def examples(self, seed):
            threads.append(threading.current_thread())
            for example in super().examples(seed):
                threads.append(threading.current_thread())
                yield example

    judge = judge_of(Drawn("drawn"))
    assert len(list(islice(judge.tasks["drawn"].examples(1), 3))) == 3
    assert len(threads) == 4 and len(set(threads)) == 1 and threads[0] is not threading.current_thread()
    threads[0].join(20.0)
    assert not threads[0].is_alive()
