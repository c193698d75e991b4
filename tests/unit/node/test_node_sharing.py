"""A node that notices whether others help it, and takes less from them when they do not."""

from collections.abc import Sequence
from typing import Any

import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.identity.node_key import NodeKey
from swarmnode.node.showing.board import StatusBoard
from swarmnode.node.showing.node_status import NodeStatus, SharingEffect, measurements
from swarmnode.testing import FakeLearner, MemoryNetwork
from swarmnode.training.rules.sharing_gauge import LEAST, SharingGauge
from swarmnode.types import RolloutGroup
from tests.unit.node.test_node import Recorder, node, parts, run

KEY = NodeKey(b"\1" * 32)


class Generous(Exchange):
    """Has as many groups as it is asked for, and remembers how many that were."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.asked: list[int] = []
        stranger = FakeLearner("stranger", groups=16)
        self._groups: Sequence[RolloutGroup] = stranger.rollouts(1).groups

    async def collect(self, j: int, policy_version: int, deadline_s: float) -> list[RolloutGroup]:
        self.asked.append(j)
        return list(self._groups[:j])


async def asked_for(
    agreement: float | None, *settings: str, learner: FakeLearner | None = None, rounds: int = 5 * LEAST
) -> tuple[list[int], NodeStatus]:
    """How many groups each round asked for, and the status at the end."""
    learner = learner or FakeLearner(KEY.peer_id)
    learner.agreement = agreement
    network, seen = parts(MemoryNetwork(), KEY, exchange=Generous), Recorder()
    wanted = ("exchange.external_groups=16", f"node.rounds={rounds}", *settings)
    await run(node(learner, *wanted, network=network, monitor=seen))
    assert isinstance(network.exchange, Generous)
    return network.exchange.asked, seen.rounds[-1]


async def test_others_who_work_against_us_are_asked_for_less_and_replayed_less() -> None:
    learner = FakeLearner(KEY.peer_id)
    asked, status = await asked_for(-0.2, learner=learner)
    assert sorted(set(asked), reverse=True) == [16, 8, 4, 2]
    assert sorted(set(learner.foreign_shares), reverse=True) == [1.0, 0.5, 0.25, 0.125]
    sharing = status.sharing
    assert (sharing.verdict, sharing.groups, sharing.groups_most) == ("harms", 2, 16)
    assert sharing.agreement == pytest.approx(-0.2) and sharing.error == pytest.approx(0.0)


async def test_others_who_help_are_asked_for_all_that_is_set() -> None:
    asked, status = await asked_for(0.2)
    assert set(asked) == {16}
    assert (status.sharing.verdict, status.sharing.groups) == ("helps", 16)


async def test_a_round_without_others_says_nothing_about_them() -> None:
    asked, status = await asked_for(None)
    assert set(asked) == {16}
    assert status.sharing == SharingEffect(None, None, "open", 16, 16)
    assert "sharing.agreement" not in measurements(status), "unknown is not zero"


async def test_without_adaptation_it_is_only_looked_at() -> None:
    learner = FakeLearner(KEY.peer_id)
    asked, status = await asked_for(-0.2, "exchange.rule=sapo", learner=learner)
    assert set(asked) == {16} and set(learner.foreign_shares) == {1.0}
    assert (status.sharing.verdict, status.sharing.groups) == ("harms", 16)
    assert measurements(status)["sharing.agreement"] == pytest.approx(-0.2)


async def test_a_restart_does_not_forget_what_was_found() -> None:
    disk: list[Any] = []
    await asked_for(-0.2, learner=FakeLearner(KEY.peer_id, disk=disk), rounds=3 * LEAST + 1)
    asked, _ = await asked_for(-0.2, learner=FakeLearner(KEY.peer_id, disk=disk), rounds=3 * LEAST + 3)
    assert asked == [2, 2]


async def test_a_node_that_takes_nothing_has_nothing_to_tell() -> None:
    seen = Recorder()
    await run(node(FakeLearner(KEY.peer_id), "node.rounds=1", monitor=seen))
    assert seen.rounds[-1].sharing == SharingEffect()
    asked, status = await asked_for(0.1, "exchange.rule=own_book", rounds=1)
    assert asked == [] and status.sharing == SharingEffect()


def test_the_board_tells_how_much_is_taken_of_what_could_be() -> None:
    board = StatusBoard(peer_id="me", name="me", swarm="commons", model="fake", rounds_limit=None)
    board.weighed(SharingGauge(level=1), 16)
    assert board.status.sharing == SharingEffect(None, None, "open", 8, 16)
