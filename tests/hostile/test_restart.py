"""A restart is no way back in: what was taken is not taken again, who was banned stays banned."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.attackers.handle import Attacker
from tests.hostile.conftest import LOOPBACK, Pair
from tests.joined_node import JoinedNode
from tests.warm_start import WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SAVING = (*LOOPBACK, "--seed", "1", "--set", "node.checkpoint_every=2")
TAKEN = 24
"""Of the forty groups of one author: enough to see whether they are taken again."""
HEARD = 200
"""Headers that are said again at once: more than an honest node may say at once."""


def accepted(node: JoinedNode) -> int:
    return node.status()["exchange"]["accepted"]


def settled(node: JoinedNode) -> int:
    """Groups accepted in this life, once no more come: those that waited in a checkpoint come one by one."""
    count = accepted(node)
    while True:
        node.until_round(node.status()["progress"]["round"] + 5)
        if (now := accepted(node)) == count:
            return count
        count = now


def remembers(node: JoinedNode) -> bool:
    """Whether the ban and the groups are on the disk: what a node knows of others goes there now and then."""
    from swarmnode.exchange.peers.exchange_record import load

    record = load(node.paths.exchange_record)
    return (
        record is not None
        and len(record.groups) >= TAKEN
        and any(standing.banned for standing in record.standings)
    )


@pytest.fixture(scope="module")
def restarted(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, warm: WarmStart
) -> Iterator[tuple[JoinedNode, Attacker]]:
    """A node that banned one author and took groups of another before SIGKILL; and the other author."""
    home = tmp_path_factory.mktemp("restarted") / "node"
    options = ("--model", str(tiny_model), *SAVING)
    nodes = [JoinedNode(home, *options, warm=warm)]
    try:
        address = nodes[0].running().addresses[0]
        with Attacker("replay_own", [address], seconds=280) as author:
            author.wait_for("announced")
            nodes[0].until(lambda: accepted(nodes[0]) >= TAKEN)
            with Attacker("junk_gossip", [address], seconds=60) as attacker:
                attacker.wait_for("ready")
                nodes[0].until(lambda: nodes[0].status()["exchange"]["banned_peers"] == 1)
            nodes[0].until(lambda: remembers(nodes[0]))
            nodes[0].vanish()
            nodes.append(JoinedNode(home, *options, warm=warm))
            assert nodes[1].running().addresses[0] == address
            nodes[1].until_round(1)
            yield nodes[1], author
    finally:
        for node in nodes:
            node.end()


def test_who_is_banned_is_still_so_after_a_kill(restarted: tuple[JoinedNode, Attacker]) -> None:
    node, _ = restarted
    assert node.status()["exchange"]["banned_peers"] == 1


def test_old_groups_are_not_taken_again_after_a_kill(restarted: tuple[JoinedNode, Attacker]) -> None:
    node, author = restarted
    waited = settled(node)
    author.tell("again")
    author.wait_for("replayed")
    assert settled(node) == waited, "none of the forty"
    # Apart from the others: of a burst, gossip may lose a part.
    author.tell("go on")
    author.wait_for("new")
    node.until(lambda: accepted(node) > waited)
    assert settled(node) == waited + 1, "the new one, and none of the forty"


def test_what_a_node_said_before_is_not_held_against_it(pair: Pair) -> None:
    """GossipSub forgets a message after two minutes, or at once with its daemon; the exchange does not."""

    def charged() -> int:
        return pair.honest.status()["exchange"]["dropped"].get("rate_limited", 0)

    with pair.attacked_by("replay_victim", seconds=200) as attacker:
        attacker.wait_for("ready")
        heard = 0
        while heard < HEARD:
            pair.victim.until_round(pair.victim.status()["progress"]["round"] + 2)
            attacker.tell("how many?")
            heard = attacker.wait_for("heard")["messages"]
        restarts = pair.restarts[1]
        pair.honest.daemon().kill()
        pair.honest.until(lambda: pair.restarts[1] > restarts)
        pair.go_on()
        before = charged()
        attacker.tell("again")
        assert attacker.wait_for("replayed")["messages"] >= HEARD
        pair.go_on()
        # What gossip had lost before is new to it, and there may be more of that than it hears at once.
        assert charged() - before <= HEARD // 8
