"""`swarmnode peers`: who the running node knows, and what they gave."""

from collections.abc import Iterator, Sequence

from swarmnode.cli.output import Json, table, tell
from swarmnode.cli.settings import Home, Policy
from swarmnode.cli.status import running_nodes
from swarmnode.errors import SwarmnodeError
from swarmnode.exchange.drop_reasons import in_words
from swarmnode.exchange.exchange_stats import PeerFigures
from swarmnode.extensions.page.known_peers import KnownPeer, known_peers
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running
from swarmnode.node.building.page_client import ask_status

DISTANCES = {
    "machine": "this machine", "lan": "this LAN", "public": "internet", "relayed": "through a relay",
    "": "connected", None: "not connected",
}  # fmt: skip


def peers(policy: Policy = 0, home: Home = None, json: Json = False) -> None:
    """List the peers that are connected or gave something: groups accepted, groups dropped through their
    fault, groups learnt from, and their reputation (100 at most, below 20 banned). A newcomer gave little or
    is in doubt, and gets less of our time; a paused peer gave nothing useful, so nothing is fetched from it
    for a while; a slow peer took long to send its last group. Below: why groups they sent were not used."""
    paths = resolve_paths(home)
    running_nodes(paths)
    if (note := read_running(paths.policy(policy).running)) is None:
        raise SwarmnodeError(f"no policy {policy} is running here", hint="name another: --policy")
    status = ask_status(note, paths)
    if isinstance(status, SwarmnodeError):
        raise status
    found = known_peers(status)
    tell(json, {"peers": found, "reach": status.network.reach.text}, _lines(found, status.network.reach.text))


def _lines(found: Sequence[KnownPeer], reach: str) -> Iterator[str]:
    rows = [("peer", "connected", "accepted", "dropped", "learnt from", "reputation", "peer id")]
    yield from table([*rows, *map(_row, found)]) if found else ["no peers yet"]
    for one in found:
        if one.figures is not None and one.figures.refused:
            yield f"not used, or counted against {one.name}: {in_words(one.figures.refused)}"
    if reach:
        yield f"this node: {reach}"


def _row(one: KnownPeer) -> tuple[str, ...]:
    counts, worth = ("-", "-"), "-"
    if one.figures is not None:
        counts = str(one.figures.accepted), str(one.figures.dropped)
        worth = f"{one.figures.score:.0f}, {_trust(one.figures)}"
    learnt = f"{one.gave}, waits" if one.waits else str(one.gave)
    return one.name, DISTANCES.get(one.connected, str(one.connected)), *counts, learnt, worth, one.peer


def _trust(figures: PeerFigures) -> str:
    if figures.banned:
        return "banned"
    return f"paused {figures.paused_s:.0f} s" if figures.paused_s >= 1 else figures.trust
