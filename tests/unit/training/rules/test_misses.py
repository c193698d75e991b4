"""Our newest wrong answers: a few of each task, and no more than a checkpoint takes."""

import pytest

from swarmnode.training.rules.book import MAX_TOKENS, Entry
from swarmnode.training.rules.misses import Misses
from swarmnode.training.rules.teachers import NEWEST


def entry(number: int, task: str = "sum", tokens: int = 1) -> Entry:
    return Entry(task, "1", 0, number, "?", (7,) * tokens, 0.0, "me", True, True)


def test_the_newest_of_each_task_stay() -> None:
    misses = Misses()
    misses.add(entry(number) for number in range(2 * NEWEST))
    misses.add([entry(0, "rev")])
    assert [one.index for one in misses.entries if one.task == "sum"] == [*range(NEWEST, 2 * NEWEST)]
    assert [one.index for one in misses.entries if one.task == "rev"] == [0]


def test_many_long_ones_take_no_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 5 * entry(0, tokens=1000).saved_bytes
    monkeypatch.setattr("swarmnode.training.rules.misses.MAX_MISSES_BYTES", most)
    misses = Misses()
    for number in range(NEWEST):
        misses.add([entry(number, tokens=1000), entry(number, "rev", tokens=1000)])
        assert sum(one.saved_bytes for one in misses.entries) <= most
    assert {one.task for one in misses.entries} == {"sum", "rev"}
    misses.add([entry(0, tokens=MAX_TOKENS + 1)])
    assert len(misses.entries) == 5, "a state could not hold it"
