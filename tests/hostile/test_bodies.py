"""Bodies that are slow, never come or do not exist: honest groups are trained on all the same."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.hostile.conftest import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

MIB = 2**20
ROUNDS = 16
UNTIL_ENDED_S = 400.0
"""An attack that lasts as long as the test."""


def rounds_under_attack(pair: Pair, attack: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Rounds that the victim began and ended while it was attacked, and the one before them."""
    with pair.attacked_by(attack, **options) as attacker:
        attacker.wait_for("ready")
        # What is announced is asked for in the round after.
        pair.victim.until_round(pair.victim.status()["progress"]["round"] + 2)
        since = time.time()
        pair.victim.until(lambda: sum(line["time"] > since for line in pair.victim.rounds()) > ROUNDS)
        yield from (line for line in pair.victim.rounds() if line["time"] > since)


@pytest.mark.parametrize("attack", ["slow_bodies", "bodies_that_never_come", "crowd"])
def test_who_does_not_deliver_takes_nobody_elses_place(pair: Pair, attack: str) -> None:
    """Honest groups are trained on meanwhile. How fast rounds go is measured in benchmarks/attacks.py."""
    before = pair.restarts
    with pair.attacked_by(attack, seconds=UNTIL_ENDED_S) as attacker:
        attacker.wait_for("ready")
        # What was announced before the attack may be trained on for a while: new groups come in after it.
        pair.go_on()
        pair.victim.until_round(pair.victim.status()["progress"]["round"] + 2)
        pair.go_on()
    assert pair.restarts == before


def test_of_what_is_drawn_one_author_has_no_more_than_a_share(pair: Pair) -> None:
    """With an honest node that offers as much as it likes, a fast author fills half of no round."""
    lines = list(rounds_under_attack(pair, "honest_texts"))
    honest = f"exchange.trained.{pair.honest.status()['peer_id']}"
    strangers = [
        sum(count for name, count in line.items() if name.startswith("exchange.trained.") and name != honest)
        for line in lines
    ]
    wanted = 16  # exchange.external_groups of the preset
    assert strangers[-1] > strangers[0], "a share it has"
    assert max(after - before for before, after in pairwise(strangers)) <= wanted // 2


def test_bodies_that_nobody_here_could_train_on_are_not_fetched(pair: Pair) -> None:
    """1 MiB of answers that keep every rule of the wire: one of them would be more than is allowed here."""
    before = pair.victim.status()["exchange"]["bytes_in"]
    with pair.attacked_by("too_long_bodies", seconds=8) as attacker:
        pair.go_on()
        assert attacker.done()["sent"]["headers"] > 0
    assert pair.victim.status()["exchange"]["bytes_in"] - before < MIB
