"""SIGKILL at random moments and at every step of a save: what is left can always be gone on from."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.training.checkpoints.checkpoint import read_checkpoint
from tests.swarm.killable_saver import KEPT, KillableSaver, is_whole, reward_of, store_in

pytestmark = pytest.mark.slow

KILLS = 40
"""At random moments."""
STEPS = 32
"""More than the steps on the disk of a save that deletes an old checkpoint too."""


@pytest.fixture(scope="module")
def saver() -> Iterator[KillableSaver]:
    with KillableSaver() as saver:
        yield saver


def what_is_left(root: Path, acknowledged: int) -> tuple[int, int]:
    """Look as the next start does. Returns the newest round, and how many things a crash left behind."""
    store = store_in(root)
    leftovers = len(list(store.folder.glob(".*")))
    newest, best = store.tidy(), store.best()
    if newest is None:
        assert acknowledged == 0
        return 0, leftovers
    assert is_whole(newest)
    assert newest.state.counters.round >= acknowledged, "what was said to be on disk is on disk"
    assert best is not None and is_whole(best)
    whole = {read_checkpoint(folder).state.counters.round for folder in store.folder.iterdir()}
    assert best.state.counters.round == max(whole, key=reward_of), "nothing else is left"
    return newest.state.counters.round, leftovers


def test_sigkill_at_random_moments_leaves_a_checkpoint_to_go_on_from(
    saver: KillableSaver, tmp_path: Path
) -> None:
    rng, last, hits, moved = random.Random(0), 0, 0, 0
    for _ in range(KILLS):
        acknowledged = saver.killed_after(rng.randrange(3), rng.uniform(0.0, 0.06), tmp_path, last)
        newest, leftovers = what_is_left(tmp_path, acknowledged)
        assert newest >= last, "a kill never loses what was there before"
        moved += newest > last
        hits += leftovers > 0
        last = newest
    assert hits > 0, "no kill fell into a save"
    assert moved > KILLS // 3, "nothing was saved between the kills"


def test_sigkill_at_every_step_of_a_save_leaves_a_checkpoint_to_go_on_from(
    saver: KillableSaver, tmp_path: Path
) -> None:
    last, best, folders = 0, 0.0, set[int]()
    for step in range(STEPS):
        acknowledged = saver.killed_at(step, tmp_path, last)
        last, _ = what_is_left(tmp_path, acknowledged)
        found = store_in(tmp_path)
        folders.add(len(list(found.folder.glob("round-*"))))
        if (kept := found.best()) is not None:
            assert kept.state.reward is not None and kept.state.reward >= best, "the best is never lost"
            best = kept.state.reward
    assert last > 2
    assert max(folders) > KEPT, "no kill fell between a save and the deletion after it"
