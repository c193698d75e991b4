"""One thread at a time, in order, and never stuck behind one that hangs."""

import threading
from concurrent.futures import ThreadPoolExecutor

from swarmnode.errors import JudgementLost
from swarmnode.tasks.deadlines.daemon_threads import in_daemon_thread
from swarmnode.tasks.deadlines.task_lock import TaskLock
from swarmnode.tasks.deadlines.work_clock import clock_of_work


def test_threads_are_never_inside_together():
    turn, inside, most = TaskLock(), [], []

    def work(number):
        for _ in range(50):
            with turn.taken():
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    with ThreadPoolExecutor(max_workers=4) as threads:
        list(threads.map(work, range(4)))
    assert (len(most), max(most)) == (200, 1)


def test_the_holder_may_take_its_turn_again():
    turn = TaskLock()
    with turn.taken(), turn.taken():
        pass
    with ThreadPoolExecutor(max_workers=1) as thread:
        assert thread.submit(lambda: turn.taken().__enter__()).result(timeout=30) is None


def test_a_thread_that_comes_back_at_once_queues_behind_one_that_waits():
    turn, order = TaskLock(), []

    def wait_and_note():
        with turn.taken():
            order.append("waited")

    waiting = threading.Thread(target=wait_and_note)
    with turn.taken():
        waiting.start()
        while not turn._next.locked():
            pass
    with turn.taken():
        order.append("came back")
    waiting.join(timeout=30)
    assert order == ["waited", "came back"]


def test_a_thread_that_hangs_is_left_behind_and_may_still_end_later(caplog):
    turn, release, inside = TaskLock(patience_s=0.05), threading.Event(), threading.Event()

    def hang():
        with turn.taken():
            inside.set()
            release.wait()

    hanging = threading.Thread(target=hang)
    hanging.start()
    inside.wait()
    with turn.taken():
        assert "continuing without it" in caplog.text
        release.set()
        hanging.join(timeout=30)
        assert turn._holder is threading.current_thread()
    with turn.taken():
        pass
    assert caplog.text.count("continuing") == 1


def test_whoever_is_not_waited_for_any_more_keeps_nobody_out_and_does_not_come_in(caplog):
    turn, release, inside = TaskLock(patience_s=600.0), threading.Event(), threading.Event()
    refused = []

    def hang():
        with turn.taken():
            inside.set()
            release.wait()

    def queue():
        try:
            with turn.taken():
                raise AssertionError
        except JudgementLost as lost:
            refused.append(lost)

    hanging, queued = threading.Thread(target=hang), threading.Thread(target=queue)
    hanging.start()
    inside.wait()
    queued.start()
    turn.leave_behind(queued)
    queued.join(timeout=30)
    turn.leave_behind(hanging)
    with turn.taken():
        release.set()
        hanging.join(timeout=30)
        assert turn._holder is threading.current_thread()
    assert len(refused) == 1 and not caplog.text


def test_a_failure_inside_gives_the_turn_back():
    turn = TaskLock(patience_s=30.0)
    try:
        with turn.taken():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    with ThreadPoolExecutor(max_workers=1) as thread:
        assert thread.submit(lambda: turn.taken().__enter__()).result(timeout=10) is None


def test_the_clock_of_a_thread_stands_while_it_waits_for_the_others():
    now, turn = [0.0], TaskLock()
    with turn.taken():
        waiting = in_daemon_thread(lambda: inside(turn, now), 10.0, lambda: now[0])
        while not turn._next.locked():
            pass
        now[0] += 100.0
        assert waiting.clock.off_s == 100.0
    assert waiting.result(timeout=30) == 7.0


def inside(turn: TaskLock, now: list[float]) -> float:
    """Seconds that the clock of this thread has left after 3 s of work."""
    with turn.taken():
        now[0] += 3.0
        return clock_of_work().left_s
