"""A home is dialled at its place at a seed, and the way becomes a direct one where the routers let it."""

from collections.abc import Callable

from swarmnode.extensions.trial_swarm.nat_lab import Lab, Nat
from swarmnode.network.multiaddr import is_relayed
from tests.homes.conftest import Running, until

Start = Callable[..., Running]

WATCHERS = 4
"""So many have to tell go-libp2p the same address of its own before it believes it."""


def test_ordinary_routers_are_punched_through_and_others_need_a_relay_that_lives(
    lab: Lab, start: Start
) -> None:
    seed = start(lab.public(), seed=True)
    watchers = [start(lab.public(), caller="watch").address for _ in range(WATCHERS)]

    def caller(nat: Nat) -> Running:
        """Return the home that calls another one, both behind such routers."""
        served = start(lab.home(nat)[0], seed.address, *watchers, caller="serve")
        assert is_relayed(served.address)
        return start(lab.home(nat)[0], seed.address, served.address, *watchers, caller="call")

    through, relayed = caller("cone"), caller("symmetric")
    until(lambda: any(not is_relayed(end) for end in through.last["ends"]))
    # A mebibyte each.
    before = through.last["answered"]
    until(lambda: through.last["answered"] >= before + 3 and relayed.last["answered"] >= 3)
    assert all(is_relayed(end) for end in relayed.last["ends"])

    seed.process.kill()
    until(lambda: relayed.last["error"].startswith("PeerUnreachable"))
    before = through.last["answered"]
    until(lambda: through.last["answered"] >= before + 3)
