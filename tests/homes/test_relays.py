"""A home is dialled at its place at a seed, and the way becomes a direct one where the routers let it."""

from collections.abc import Callable

from swarmnode.extensions.trial_swarm.nat_lab import Lab
from swarmnode.network.multiaddr import is_relayed
from tests.homes.conftest import Running, until

Start = Callable[..., Running]

WATCHERS = 4
"""So many have to tell go-libp2p the same address of its own before it believes it."""


def _call(lab: Lab, start: Start, nat: str) -> tuple[Running, Running]:
    """Return the seed, and the home that calls another one."""
    seed = start(lab.public(), seed=True)
    watchers = [start(lab.public(), caller="watch").address for _ in range(WATCHERS)]
    served = start(lab.home(nat=nat)[0], seed.address, *watchers, caller="serve")  # type: ignore[arg-type]
    assert is_relayed(served.address)
    return seed, start(
        lab.home(nat=nat)[0],  # type: ignore[arg-type]
        seed.address,
        served.address,
        *watchers,
        caller="call",
    )


def test_a_hole_is_punched_between_two_ordinary_routers(lab: Lab, start: Start) -> None:
    _, caller = _call(lab, start, "cone")
    until(lambda: any(not is_relayed(end) for end in caller.last["ends"]))
    before = caller.last["answered"]
    until(lambda: caller.last["answered"] >= before + 3)


def test_where_no_hole_can_be_punched_a_mebibyte_goes_through_the_relay(lab: Lab, start: Start) -> None:
    _, caller = _call(lab, start, "symmetric")
    until(lambda: caller.last["answered"] >= 3)
    assert all(is_relayed(end) for end in caller.last["ends"])


def test_whoever_was_reached_through_a_relay_that_dies_cannot_be_reached(lab: Lab, start: Start) -> None:
    seed, caller = _call(lab, start, "symmetric")
    until(lambda: caller.last["answered"] >= 1)
    seed.process.kill()
    until(lambda: caller.last["error"].startswith("PeerUnreachable"))
