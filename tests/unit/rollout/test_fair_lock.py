"""Turns at an engine: what is left to whoever has one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident

import pytest

from swarmnode.errors import EngineError
from swarmnode.rollout.fair_lock import FairLock


def refused() -> None:
    raise EngineError("no")


def test_a_job_is_done_here_where_nobody_has_the_turn() -> None:
    turns = FairLock()
    assert turns.do(get_ident) == get_ident()
    with pytest.raises(EngineError, match="no"):
        turns.do(refused)
    assert not turns.taken


def test_whoever_has_the_turn_does_the_jobs_of_others_and_their_errors_are_theirs() -> None:
    turns, waiting = FairLock(), Event()
    with ThreadPoolExecutor(3) as pool:
        with turns:
            done = pool.submit(turns.do, get_ident)
            failed = pool.submit(turns.do, refused)
            broken = pool.submit(turns.do, lambda: {}["nothing"])
            while len(turns._jobs) < 3:
                waiting.wait(0.01)
        assert done.result(30) == get_ident()
        with pytest.raises(EngineError, match="no"):
            failed.result(30)
        with pytest.raises(KeyError, match="nothing"):
            broken.result(30)
    assert not turns.taken
