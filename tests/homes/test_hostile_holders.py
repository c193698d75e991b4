"""Whatever a holder does that both homes know, they go on through another, and learn nothing from it."""

from swarmnode.extensions.trial_swarm.nat_lab import Lab
from tests.homes.conftest import until
from tests.homes.test_homes import Start


def test_homes_go_on_beside_holders_that_flood_and_lie_give_half_stall_or_drop(
    lab: Lab, start: Start
) -> None:
    seed = start(lab.public(), seed=True)
    holders = {
        kind: start(lab.public(), seed.address, bad=kind) for kind in ("lies", "half", "stalls", "drops")
    }
    known = [holder.address for holder in holders.values()]
    a, b = (start(lab.home()[0], *known, seed.address) for _ in range(2))
    until(lambda: a.has_from(b) >= 3 and b.has_from(a) >= 3)
    liar = holders["lies"].peer
    until(lambda: liar in a.last["banned"] and liar in b.last["banned"])
    before = a.has_from(b), b.has_from(a)
    until(lambda: a.has_from(b) >= before[0] + 8 and b.has_from(a) >= before[1] + 8)
    until(lambda: all({a.peer, b.peer} <= set(holder.last["asked_by"]) for holder in holders.values()))
    assert not any(home.has_from(holder) for home in (a, b) for holder in holders.values())
    assert not {a.peer, b.peer} & {*a.last["banned"], *b.last["banned"]}
