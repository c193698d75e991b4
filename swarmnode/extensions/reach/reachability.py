"""The verdict whether other peers can reach us, in words and with advice.

Discovery -> [Reachability] -> dialback.py -> Reach
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarmnode.errors import NetworkError
from swarmnode.extensions.reach.dialback import DialBack, DialReport, address_of, public_ip
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.network.finding.invitation import MAX_SEEDS
from swarmnode.network.host import Host
from swarmnode.network.multiaddr import is_for_outsiders, parse_address, scope_of
from swarmnode.network.reach import Reach

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
AGAIN_S = 10.0
"""Seconds between two rounds while the verdict is open, and the least between any two."""
CHECK_EVERY_S = 300.0
"""Seconds between two rounds while the verdict stands."""
PATIENCE_S = 20.0
"""Seconds after the start before a node is called unreachable: peers are still being dialled."""

HELPERS = 3
"""Most peers, of different networks, asked in one round."""
ROUNDS_THAT_AGREE = 2


@dataclass(frozen=True, slots=True)
class ReachEstimate:
    """The belief after the rounds so far."""

    reached: bool | None = None
    against: int = 0
    """Rounds in a row with the opposite result."""
    asked: int = 0
    """Number of peers with an answer in the last round that agreed with this belief."""
    seen: str = ""
    """Public IP address that most of them see us at."""

    def after(self, reports: Sequence[DialReport]) -> "ReachEstimate":
        """Returns the belief after one more round. A peer that refused to look counts for nothing; a tie
        changes nothing."""
        looked = [report for report in reports if report.outcome != "refused"]
        reached = sum(report.outcome == "reached" for report in looked)
        silent = len(looked) - reached
        if reached == silent:
            return self
        seen_at = [report.seen for report in looked if report.seen]
        seen = max(seen_at, key=seen_at.count, default=self.seen)
        if (reached > silent) != self.reached and self.against + 1 < ROUNDS_THAT_AGREE:
            return replace(self, against=self.against + 1, seen=seen)
        return ReachEstimate(reached > silent, 0, len(looked), seen)


def helpers(ends: Mapping[str, Sequence[str]], rng: random.Random) -> list[str]:
    """Returns the connected peers to ask, one of each network, since neighbours know the same."""
    by_network: dict[str, str] = {}
    for peer in rng.sample(sorted(ends), len(ends)):
        for network in filter(None, map(_network_of, ends[peer])):
            by_network.setdefault(network, peer)
    return list(dict.fromkeys(by_network.values()))


def _network_of(end: str) -> str | None:
    """Returns the /16 of a public IPv4 address, the /32 of an IPv6 address."""
    ip = public_ip(end)
    if ip is None:
        return None
    return ":".join(ip.split(":")[:2]) if ":" in ip else ".".join(ip.split(".")[:2])


@dataclass(frozen=True, slots=True)
class ReachEvidence:
    """The evidence for a verdict, at one moment."""

    peer_id: str
    addresses: tuple[str, ...]
    """Our own addresses, each with /p2p/, as the host tells them."""
    peers: int
    """Number of connected peers."""
    outside: int
    """Number of connected peers with a public address."""
    through: Mapping[str, str]
    """Addresses of connected peers that we dialled at a public address ourselves, by peer id."""
    settled: bool
    """False in the first moments after the start."""
    asks_router: bool = False
    """True if the router was asked to forward our port."""


def conclude(held: ReachEstimate, place: ReachEvidence) -> Reach:
    """Returns the verdict on this evidence, in words."""
    port = tcp_port(place.addresses)
    own = tuple(address for address in place.addresses if is_for_outsiders(address))
    steps = _steps(port, held.seen, place.asks_router)
    if place.addresses and all(scope_of(address) == "machine" for address in place.addresses):
        return Reach("local", "only this machine can reach you, because of network.listen")
    if held.reached:
        return _reachable(held, place, own, port)
    if held.reached is False and place.through:
        names = " and ".join(sorted(memorable_name(peer) for peer in place.through)[:2])
        text = f"behind a NAT{_as_far_as(held.asked)}, others reach you through {names}"
        return Reach("relayed", text, steps[:1], tuple(place.through.values())[:MAX_SEEDS])
    if held.reached is False and place.outside:
        return Reach("nobody", f"nobody can reach you{_as_far_as(held.asked)}", steps)
    if not place.settled or place.outside:
        return Reach(addresses=own)
    if place.peers:
        text = "others in your own network can reach you; nobody outside it is connected"
        return Reach("local", text, steps, own)
    if own:
        return Reach(
            text="unknown whether others can reach you: no connected peer can test it", addresses=own
        )
    return Reach("nobody", "nobody can reach you, and you can reach nobody", steps)


def _reachable(held: ReachEstimate, place: ReachEvidence, own: tuple[str, ...], port: int | None) -> Reach:
    text = f"reachable{_as_far_as(held.asked)}"
    found = f"{address_of(held.seen, port)}" if held.seen else ""
    if not found or any(_is_at(address, held.seen, port) for address in own):
        return Reach("reachable", text, addresses=own)
    told = "peers are told other addresses" if own else "peers are not told where"
    step = f"start with `--set network.announce={found}`, where you were found: {told}"
    return Reach("reachable", text, (step,), (f"{found}/p2p/{place.peer_id}",))


def _is_at(address: str, ip: str, port: int | None) -> bool:
    """Returns True for the address of this port; a name may well stand for the IP address."""
    (kind, host), *rest = parse_address(address)
    return ("tcp", str(port)) in rest and (kind.startswith("dns") or host == ip)


def _as_far_as(asked: int) -> str:
    if asked >= HELPERS:
        return ""
    return " (as far as one peer can tell)" if asked < 2 else f" (as far as {asked} peers can tell)"


def _steps(port: int | None, seen: str, asks_router: bool) -> tuple[str, ...]:
    at = address_of(seen or "YOUR.PUBLIC.IP.ADDRESS", port or 4001)
    by_itself = "which it did not do when asked" if asks_router else "or try `--set network.map_port=true`"
    return (
        f"forward TCP port {port or 4001} of your router to this machine and start with"
        f" `--port {port or 4001} --set network.announce={at}` ({by_itself})",
        "join a seed, or any member that others can reach: `swarmnode join ADDRESS`",
        "run `swarmnode seed` on any machine with a public address, and join that",
    )


def tcp_port(addresses: Sequence[str]) -> int | None:
    """Returns the TCP port to be tried: that of the first address that others could use.

    >>> tcp_port(["/ip4/192.168.1.20/udp/4001/quic-v1", "/ip4/192.168.1.20/tcp/4002"])
    4002
    """
    for address in addresses:
        parts = parse_address(address)
        if ("p2p-circuit", "") not in parts and parts[1][0] == "tcp":
            return int(parts[1][1])
    return None


class Reachability:
    """Has peers try again and again whether we can be dialled. `reach` is the verdict so far."""

    def __init__(
        self,
        host: Host,
        dialled: Callable[[], Mapping[str, str]],
        *,
        asks_router: bool = False,
        dialback: DialBack | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`dialled`: peers that answered our dials, and the address of each. `asks_router`: the host asks the
        router to forward its port."""
        self._host = host
        self._dialled = dialled
        self._asks_router = asks_router
        self._dialback = dialback or DialBack(host)
        self._clock = clock
        self._rng = rng or random.Random()
        self._started_s = clock()
        self._held = ReachEstimate()
        self._asked_at_s = float("-inf")
        self._last: tuple[int, tuple[str, ...]] = (0, ())
        """Networks that could be asked in the last round, and our addresses then."""
        self._members: set[str] = set()
        """Peers that answered: they are of our kind, and hand on what we have."""
        self.reach = Reach()

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            try:
                await self._look()
            except NetworkError as error:
                logger.debug("cannot ask whether we can be reached: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        await self._dialback.serve()
        addresses, ends = await self._host.addresses(), await self._host.far_ends()
        ready = helpers(ends, self._rng)
        if self._is_due(len(ready), addresses):
            self._asked_at_s, self._last = self._clock(), (len(ready), addresses)
            await self._ask(ready, addresses)
            ends = await self._host.far_ends()
        self._members &= ends.keys()
        dialled = self._dialled()
        place = ReachEvidence(
            self._host.peer_id,
            addresses,
            peers=len(ends),
            outside=len(ready),
            through={peer: dialled[peer] for peer in sorted(self._members & dialled.keys())},
            settled=self._clock() > self._started_s + PATIENCE_S,
            asks_router=self._asks_router,
        )
        self.reach = conclude(self._held, place)

    def _is_due(self, networks: int, addresses: tuple[str, ...]) -> bool:
        since_s = self._clock() - self._asked_at_s
        before, known = self._last
        is_open = self._held.reached is None or self._held.against > 0
        changed = known != addresses or min(networks, HELPERS) > before
        return networks > 0 and since_s >= (AGAIN_S if is_open or changed else CHECK_EVERY_S)

    async def _ask(self, ready: Sequence[str], addresses: tuple[str, ...]) -> None:
        """Asks one round of peers. One that does not answer is replaced by another, once."""
        port = tcp_port(addresses)
        if port is None:
            return
        answers: list[DialReport] = []
        for peers in (ready[:HELPERS], ready[HELPERS : 2 * HELPERS]):
            wanted = peers[: HELPERS - len(answers)]
            told = await asyncio.gather(*(self._dialback.ask(peer, port) for peer in wanted))
            for peer, answer in zip(wanted, told, strict=True):
                if answer is not None:
                    self._members.add(peer)
                    answers.append(answer)
        self._held = self._held.after(answers)
