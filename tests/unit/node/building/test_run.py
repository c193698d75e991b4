"""Several nodes in one process: each to its own end, whatever becomes of the others."""

import gc
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarmnode.errors import IdentityInUse, PortInUse, StorageError, TaskError
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.node.building.node_process import RunningNode, read_running, write_running
from swarmnode.node.building.policies import PolicyNode, Seat, config_of
from swarmnode.node.building.run import Company as PoliciesHere
from swarmnode.node.building.run import forget_earlier_runs, serve, serve_several, take_identity
from swarmnode.node.learner import Resumed, RoundRollouts
from swarmnode.node.node import NodeLoop
from swarmnode.node.showing.board import StatusBoard, Watchers, policy_label
from swarmnode.node.showing.node_status import PipelineStatus, Summary
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.testing import FakeLearner
from swarmnode.training.records import Counters
from tests.shown_page import STATUS, shown_page


class BadDisk(FakeLearner):
    def resume(self) -> Resumed | None:
        raise StorageError("the disk is gone")


class BadTask(FakeLearner):
    def rollouts(self, number: int) -> RoundRollouts:
        if number == 2:
            raise TaskError("a judge is gone")
        return super().rollouts(number)


class Broken(FakeLearner):
    def rollouts(self, number: int) -> RoundRollouts:
        raise KeyError("a bug")


class ErrorsTold(logging.Handler):
    """Sets an event once so many errors are in the log."""

    def __init__(self, count: int) -> None:
        super().__init__(logging.ERROR)
        self.all = threading.Event()
        self._left = count

    def emit(self, record: logging.LogRecord) -> None:
        self._left -= 1
        if self._left == 0:
            self.all.set()


class Outlasting(FakeLearner):
    """Generates nothing before the others have ended."""

    others_ended: threading.Event

    def rollouts(self, number: int) -> RoundRollouts:
        assert self.others_ended.wait(60), "the others stay"
        return super().rollouts(number)


class Company:
    """Memberships over fake learners."""

    def __init__(self, paths: Paths, *learners: FakeLearner, rounds: int = 3) -> None:
        assignments = [f"node.policies={len(learners)}", f"node.rounds={rounds}"]
        self.config = load_config(environ={}, assignments=assignments).config
        self.paths = paths
        self.built: list[int] = []
        self.left: list[int] = []
        self.closed: list[int] = []
        """Whose part of the engine no node gave back."""
        self.members = [self.member(number, learner) for number, learner in enumerate(learners)]

    def member(self, number: int, learner: FakeLearner) -> PolicyNode:
        def loop(config: Config, network: None) -> NodeLoop:
            self.built.append(number)
            board = StatusBoard(config, peer_id=learner.author, name="otter", model="fake", policy=number)
            return NodeLoop(config, learner, board, Watchers([]), seed=0, network=network)

        key = NodeKey(bytes([number] * 32))
        seat = Seat(number, config_of(self.config, number), self.paths.policy(number), key, 0, {})
        leave, close_engine = partial(self.leave, number), partial(self.close_engine, number)
        return PolicyNode(seat, loop, lambda seat: None, leave, close_engine)

    def close_engine(self, number: int) -> None:
        assert threading.current_thread() is not threading.main_thread(), "a step of others may be waited for"
        self.closed.append(number)

    def leave(self, number: int) -> None:
        self.left.append(number)


@pytest.fixture
def company(tmp_path: Path) -> Callable[..., Company]:
    return lambda *learners, **more: Company(resolve_paths(tmp_path), *learners, **more)


def rounds(outcome: Summary | BaseException) -> int:
    assert isinstance(outcome, Summary), outcome
    return outcome.rounds


async def test_all_run_to_their_own_end_in_order(company: Callable[..., Company]) -> None:
    ahead = FakeLearner("b")
    both = company(FakeLearner("a"), FakeLearner("b", disk=ahead.disk))
    ahead.save(Counters(round=2))
    outcomes = await serve_several(both.members)
    assert [rounds(outcome) for outcome in outcomes] == [3, 3]
    assert both.built == [0, 1] and set(both.left) == {0, 1}


async def test_who_fails_at_the_start_or_later_leaves_and_the_others_go_on(
    company: Callable[..., Company], caplog: pytest.LogCaptureFixture
) -> None:
    last = Outlasting("c")
    three = company(BadDisk("a"), BadTask("b"), last)
    told = ErrorsTold(2)
    # Who has left may not have said so yet, and the others go on until then.
    last.others_ended = told.all
    logging.getLogger("swarmnode").addHandler(told)
    with caplog.at_level("INFO", "swarmnode"):
        first, second, third = await serve_several(three.members)
    logging.getLogger("swarmnode").removeHandler(told)
    assert isinstance(first, StorageError) and isinstance(second, TaskError) and rounds(third) == 3
    assert set(three.left) == {0, 1, 2}
    ended = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(ended) == 2 and all(line.endswith("; the other policies continue") for line in ended)


async def test_who_fails_before_there_is_a_node_gives_back_its_part_of_the_engine(
    company: Callable[..., Company],
) -> None:
    def no_network(seat: Seat) -> None:
        raise PortInUse("taken")

    two = company(FakeLearner("a"), BadDisk("b"))
    two.members[0].network = no_network
    first, second = await serve_several(two.members)
    assert isinstance(first, PortInUse) and isinstance(second, StorageError)
    assert two.closed == [0], "a node closes its own"


async def test_the_last_one_does_not_say_that_others_go_on(
    company: Callable[..., Company], caplog: pytest.LogCaptureFixture
) -> None:
    both = company(BadDisk("a"), Broken("b"))
    _, second = await serve_several(both.members)
    assert isinstance(second, KeyError), "the error itself, not the group it came in"
    assert [message.partition("; ")[2] for message in caplog.messages if message.startswith("stopped")] == [
        "the other policies continue",
        "",
    ]


async def test_a_stop_reaches_those_that_have_not_started_yet(company: Callable[..., Company]) -> None:
    both = company(FakeLearner("a"), FakeLearner("b"))
    both.members[1].request_stop()
    first, second = await serve_several(both.members)
    assert rounds(first) == 3
    assert isinstance(second, Summary) and second.stopped == "stopped on request"


async def test_lines_of_a_policy_carry_its_name_and_notes_are_taken_back(
    company: Callable[..., Company],
) -> None:
    said: list[str] = []
    notes: list[RunningNode | None] = []

    class Curious(FakeLearner):
        def rollouts(self, number: int) -> RoundRollouts:
            said.append(policy_label.get())
            # Its own: the other one may be done, and its note gone.
            number_of_policy = int(policy_label.get().removeprefix("policy ").removesuffix(": "))
            notes.append(read_running(both.paths.policy(number_of_policy).running))
            return super().rollouts(number)

    both = company(Curious("a"), Curious("b"), rounds=1)
    await serve_several(both.members)
    assert sorted(said) == ["policy 0: ", "policy 1: "]
    assert all(notes)
    assert [read_running(both.paths.policy(k).running) for k in range(2)] == [None, None]


def test_notes_of_earlier_runs_are_removed_whatever_the_number_of_policies(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    for place in (paths, paths.policy(1), paths.policy(2)):
        write_running(place.running, RunningNode(os.getpid(), "old", "127.0.0.1", 1))
    forget_earlier_runs(paths)
    assert [read_running(place.running) for place in paths.policies()] == [None, None, None]


@pytest.mark.parametrize(
    ("private", "pipeline", "told"),
    [
        (False, "", "swarmnode join --home ~/swarmnode-2 /ip4/127.0.0.1/tcp/1/p2p/12D3KooWexample"),
        (True, "", "swarmnode join --home ~/swarmnode-2 INVITATION, printed by `swarmnode swarm invite"),
        (True, "attic", "swarmnode join --home ~/swarmnode-2 --pipeline attic INVITATION, printed"),
    ],
)
def test_a_second_start_of_one_identity_is_told_how_another_node_joins_the_same_swarm_and_pipeline(
    private: bool, pipeline: str, told: str, tmp_path: Path
) -> None:
    paths = resolve_paths(tmp_path)
    network = replace(STATUS.network, private=private)
    status = replace(STATUS, network=network, pipeline=PipelineStatus(name=pipeline))
    with ExitStack() as first, ExitStack() as second, shown_page(lambda: status) as page:
        take_identity(first, paths)
        write_running(paths.running, RunningNode(os.getpid(), "me", "127.0.0.1", page.port))
        with pytest.raises(IdentityInUse) as caught:
            take_identity(second, paths)
    assert told in caught.value.hint


async def test_the_only_policy_runs_to_its_end(company: Callable[..., Company]) -> None:
    one = company(FakeLearner("only"), rounds=2)
    (member,) = one.members
    summary = await serve(member, PoliciesHere(one.members))
    assert (summary.rounds, one.left) == (2, [0])
    assert read_running(member.seat.paths.running) is None


async def test_the_error_of_the_only_policy_is_raised_as_it_is(company: Callable[..., Company]) -> None:
    one = company(BadTask("only"))
    with pytest.raises(TaskError, match="a judge is gone"):
        await serve(one.members[0], PoliciesHere(one.members))


class Counting(FakeLearner):
    """Counts in a round what the garbage collector leaves out."""

    left_out = 0

    def rollouts(self, number: int) -> RoundRollouts:
        self.left_out = gc.get_freeze_count()
        return super().rollouts(number)


async def test_what_a_start_makes_is_no_garbage_while_it_runs_and_what_a_program_around_it_keeps_stays_kept(
    company: Callable[..., Company],
) -> None:
    learner = Counting("only")
    gc.unfreeze()
    try:
        one = company(learner)
        await serve(one.members[0], PoliciesHere(one.members))
        assert learner.left_out > 0 and gc.get_freeze_count() == 0
        gc.freeze()
        other = company(Counting("only"))
        await serve(other.members[0], PoliciesHere(other.members))
        assert gc.get_freeze_count() > 0
    finally:
        gc.freeze()


class StartsLast(FakeLearner):
    """Makes something at its start, and looks in a round whether that may be garbage, before others end."""

    may_be_garbage = True

    def __init__(self, author: str, looked: threading.Event) -> None:
        super().__init__(author)
        self.made: list[list[int]] = []
        self._looked = looked

    def resume(self) -> Resumed | None:
        self.made = [[]]
        return super().resume()

    def rollouts(self, number: int) -> RoundRollouts:
        if not self._looked.is_set():
            self.may_be_garbage = any(one is self.made for one in gc.get_objects())
            self._looked.set()
        return super().rollouts(number)


async def test_what_the_start_of_a_second_policy_makes_is_no_garbage_either(
    company: Callable[..., Company],
) -> None:
    first = Outlasting("a")
    first.others_ended = threading.Event()
    second = StartsLast("b", first.others_ended)
    gc.unfreeze()
    try:
        await serve_several(company(first, second).members)
        assert not second.may_be_garbage
    finally:
        gc.freeze()
