"""Whatever a holder does that both homes know, they go on through another, and learn nothing from it."""

import pytest

from swarmnode.extensions.trial_swarm.nat_lab import Lab
from tests.homes.conftest import until
from tests.homes.test_homes import Start


@pytest.mark.parametrize("kind", ["lies", "half", "stalls", "drops"])
def test_homes_go_on_beside_a_holder_that_floods_and(lab: Lab, start: Start, kind: str) -> None:
    seed = start(lab.public(), seed=True)
    bad = start(lab.public(), seed.address, bad=kind)
    a, b = (start(lab.home()[0], bad.address, seed.address) for _ in range(2))
    until(lambda: a.has_from(b) >= 3 and b.has_from(a) >= 3)
    if kind == "lies":
        until(lambda: bad.peer in a.last["banned"] and bad.peer in b.last["banned"])
    before = a.has_from(b), b.has_from(a)
    until(lambda: a.has_from(b) >= before[0] + 8 and b.has_from(a) >= before[1] + 8)
    assert a.has_from(bad) == b.has_from(bad) == 0
    assert not {a.peer, b.peer} & {*a.last["banned"], *b.last["banned"]}
