import asyncio
import subprocess
import sys
import threading

import pytest

from swarmnode.errors import JudgementOverran, Rejected, StillLoading
from swarmnode.exchange.limits import MAX_STUCK_JUDGEMENTS
from swarmnode.exchange.validation.judge import Judge
from swarmnode.tasks.deadlines.work_clock import off_the_clock


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  a thread has no event to wait for
            await asyncio.sleep(0.01)


def raising(error: BaseException):
    def work():
        raise error

    return work


async def test_the_judge_gives_back_what_the_work_returns():
    assert await Judge(10.0).run(lambda: 42) == 42
    assert await Judge(10.0).run(lambda: None) is None


async def test_the_judge_works_in_another_thread():
    assert await Judge(10.0).run(threading.current_thread) is not threading.current_thread()


async def test_what_the_work_raises_reaches_the_caller():
    with pytest.raises(KeyError):
        await Judge(10.0).run(raising(KeyError("answer")))


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration()])
async def test_a_judge_that_wants_to_end_the_process_is_only_an_error(error: BaseException):
    with pytest.raises(RuntimeError):
        await Judge(10.0).run(raising(error))


async def test_judgements_do_not_overlap():
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.01)
        running -= 1

    judge = Judge(10.0)
    await asyncio.gather(*(judge.run(work) for _ in range(5)))
    assert most == 1


async def test_the_event_loop_goes_on_while_a_judgement_hangs_and_the_next_is_judged():
    release = threading.Event()
    judge = Judge(0.05)
    with pytest.raises(Rejected) as caught:
        await judge.run(release.wait)
    assert caught.value.reason == "score_timeout"
    assert judge.stuck == 1
    assert await judge.run(lambda: "next") == "next"
    release.set()
    await until(lambda: judge.stuck == 0)


async def test_too_many_stuck_judgements_stop_judging_until_one_returns():
    release = threading.Event()
    judge = Judge(0.02)
    for _ in range(MAX_STUCK_JUDGEMENTS):
        with pytest.raises(Rejected):
            await judge.run(release.wait)
    with pytest.raises(Rejected) as caught:
        await judge.run(lambda: "next")
    assert caught.value.reason == "judge_stuck"
    release.set()
    await until(lambda: judge.stuck == 0)
    assert await judge.run(lambda: "next") == "next"


async def test_a_thread_that_is_stuck_is_known_by_whose_group_it_is_stuck_on():
    release, judge = threading.Event(), Judge(0.05)
    with pytest.raises(Rejected):
        await judge.run(release.wait, author="a")
    assert judge.is_stuck_on("a") and not judge.is_stuck_on("b")
    release.set()
    await until(lambda: not judge.is_stuck_on("a"))


async def test_one_that_returns_as_the_next_is_counted_is_not_counted_for_ever():
    first, second, judge = threading.Event(), threading.Event(), Judge(0.05)
    before = set(threading.enumerate())
    with pytest.raises(Rejected):
        await judge.run(first.wait, author="a")
    [of_first] = set(threading.enumerate()) - before
    judged = asyncio.ensure_future(judge.run(second.wait, author="b"))
    await asyncio.sleep(0.01)
    judged.cancel()
    # The word that it returned reaches the loop behind the end of the second, in one turn of it.
    first.set()
    of_first.join()
    with pytest.raises(asyncio.CancelledError):
        await judged
    second.set()
    await until(lambda: judge.stuck == 0)


async def test_what_the_work_waits_for_others_does_not_count():
    go_on = threading.Event()

    def queueing() -> str:
        with off_the_clock():
            go_on.wait()
        return "judged"

    judge = Judge(0.5)
    async with asyncio.TaskGroup() as tasks:
        judged = tasks.create_task(judge.run(queueing))
        await asyncio.sleep(1.0)
        go_on.set()
    assert judged.result() == "judged"


async def test_a_cancelled_judgement_is_counted_until_it_ends():
    release = threading.Event()
    judge = Judge(30.0)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(judge.run(release.wait))
        await asyncio.sleep(0.02)
        waiting.cancel()
    assert judge.stuck == 1
    release.set()
    await until(lambda: judge.stuck == 0)


STUCK = """
import asyncio, threading
from swarmnode.errors import Rejected
from swarmnode.exchange.validation.judge import Judge

try:
    asyncio.run(Judge(0.05).run(threading.Event().wait))
except Rejected as rejected:
    print(rejected.reason)
"""


def test_a_stuck_judgement_does_not_keep_the_process_alive():
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, "score_timeout")


def test_a_thread_that_returns_after_the_loop_has_ended_is_harmless():
    release, judged = threading.Event(), threading.Event()

    def work() -> None:
        release.wait()
        judged.set()

    async def give_up() -> None:
        with pytest.raises(Rejected):
            await Judge(0.02).run(work)

    asyncio.run(give_up())
    thread = next(thread for thread in threading.enumerate() if thread.name == "judge")
    release.set()
    thread.join(timeout=30)
    assert judged.is_set()


async def test_what_the_work_took_is_told_however_it_ends_and_without_the_wait_for_others():
    now, charge = [0.0], []

    def lasts(seconds: float, error: BaseException | None = None) -> None:
        now[0] += seconds
        if error is not None:
            raise error

    judge = Judge(10.0, clock=lambda: now[0])
    await asyncio.gather(*(judge.run(lambda: lasts(2.0), charge.append) for _ in range(2)))
    for error in (Rejected("too_long"), JudgementOverran("a turn"), StillLoading("not yet")):
        with pytest.raises(Rejected):
            await judge.run(lambda error=error: lasts(3.0, error), charge.append)
    assert charge == [2.0, 2.0, 3.0, 3.0]
