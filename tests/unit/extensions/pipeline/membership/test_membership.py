"""Members agree on a plan, and go on agreeing while others join, die, leave and lie."""

import asyncio
import contextlib
import random
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from swarmnode.errors import ModelError, NetworkError, SwarmnodeError
from swarmnode.extensions.pipeline.membership.known_members import PING_AGAIN_S, MembershipSettings
from swarmnode.extensions.pipeline.membership.membership import Membership
from swarmnode.extensions.pipeline.membership.membership_messages import (
    Begin,
    Introduce,
    Ping,
    Presence,
    ProposalProgress,
    Propose,
    Request,
    Status,
    differing,
    seal_presence,
    topic_of,
)
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, Observation
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings, plan_terms
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.scheduling.plan import violations
from swarmnode.extensions.pipeline.wire.frames import VERSION, AnswerFrame, encode, framed
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL, MemberStreams
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.streams import ByteStream
from tests.unit.extensions.pipeline import pretend_members as pretend
from tests.unit.extensions.pipeline import raw_wire

KEYS = sorted((NodeKey(bytes([number]) * 32) for number in range(1, 9)), key=lambda key: key.peer_id)
"""By peer id: the first convenes."""
STEP_S = 6.0
SETTINGS = MembershipSettings("home", "big", iteration_s=100.0, ping_s=4.0, poll_s=1.0)


class InstantLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next thing to do instead of waiting for it; plans are made in no time, and once:
    that all members compute the same is test_planning.py's business."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now_s = 1000.0
        self._made: dict[bytes, Any] = {}

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        what = msgspec.json.encode(args)
        try:
            if what not in self._made:
                self._made[what] = func(*args)
            done.set_result(self._made[what])
        except SwarmnodeError as error:
            done.set_exception(error)
        return done


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: InstantLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(asyncio.wait_for(work, 100_000))


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Node:
    """A member with a pretended stage: iterations take STEP_S and happen without messages."""

    def __init__(self, network: MemoryNetwork, key: NodeKey, **changes: Any) -> None:
        self.key = key
        self.host = network.host(key.peer_id)
        self.plan: PlanSettings = changes.pop("plan", pretend.settings())
        self.free = changes.pop("free", 400 * pretend.MB)
        self.settings: MembershipSettings = changes.pop("settings", SETTINGS)
        self.model: str = changes.pop("model", "tiny")
        self.load_s: float = changes.pop("load_s", 0.0)
        self.trains: bool = changes.pop("trains", True)
        self.generate_s: float = changes.pop("generate_s", 0.0)
        """Pause between two iterations of a data node, in which it generates."""
        self.linked: list[str] = changes.pop("linked", [])
        """Whom it has links to from the start; else to whoever it has met."""
        self.observed: dict[str, Observation] = {}
        self.places: list[AgreedPlan] = []
        self.trained: list[tuple[int, str]] = []
        self.lost_iterations = 0
        self.iteration = 0
        self.prepared = 0
        self.network = network
        self.streams = MemberStreams(self.host)
        self.membership = Membership(
            self.host,
            self.streams,
            key,
            settings=self.settings,
            plan=self.plan,
            model=self.model,
            announcement=lambda: CostAnnouncement(
                pretend.costs(key.peer_id, free=self.free, at_s=now_s()),
                pretend.links(key.peer_id, self.linked or self.membership.members()),
                self.observed,
            ),
            prepare=self.prepare,
            on_agreed=self.take_place,
            wall_s=now_s,
        )

    @property
    def peer_id(self) -> str:
        return self.key.peer_id

    @property
    def place(self) -> AgreedPlan:
        return self.places[-1]

    async def prepare(self, agreed: AgreedPlan) -> None:
        self.prepared += 1
        await asyncio.sleep(self.load_s)

    async def take_place(self, agreed: AgreedPlan) -> None:
        self.places.append(agreed)
        self.lost_iterations += max(0, self.iteration - agreed.iteration)
        self.iteration = agreed.iteration

    async def train(self) -> None:
        """What a node does all day: a data node drives, the others step with them."""
        while True:
            place = self.places[-1] if self.places else None
            if place is not None and place.stage_of(self.peer_id) == 0:
                plan = await self.membership.agreed(self.iteration)
                self.trained.append((self.iteration, plan.digest))
            elif place is None or self.membership.status().progress == ProposalProgress.READY:
                await asyncio.sleep(0.5)
                continue
            began = self.places[-1]
            await asyncio.sleep(STEP_S)
            if began is self.places[-1]:
                self.iteration += 1
                self.membership.stepped(self.iteration)
            await asyncio.sleep(self.generate_s)


class Home:
    """A network with members on it."""

    def __init__(self, seed: int = 1, delay_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self.network = MemoryNetwork(seed=seed, delay_s=delay_s)
        self.nodes: dict[NodeKey, Node] = {}
        self._stacks: dict[NodeKey, AsyncExitStack] = {}
        self._tasks: dict[NodeKey, asyncio.Task[None]] = {}

    async def add(self, *keys: NodeKey, **changes: Any) -> list[Node]:
        added = [Node(self.network, key, **changes) for key in keys]
        for node in added:
            stack = self._stacks[node.key] = AsyncExitStack()
            await stack.enter_async_context(node.host)
            for other in self.nodes.values():
                with contextlib.suppress(NetworkError):
                    await node.host.connect(other.host.address)
            await stack.enter_async_context(node.streams)
            await stack.enter_async_context(node.membership)
            self.nodes[node.key] = node
            if node.trains:
                self._tasks[node.key] = asyncio.ensure_future(node.train())
        return added

    async def remove(self, node: Node) -> None:
        """It leaves in order."""
        if task := self._tasks.pop(node.key, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        del self.nodes[node.key]
        await self._stacks.pop(node.key).aclose()

    async def kill(self, node: Node) -> None:
        """Its host is gone, without a word."""
        node.host.go_down()
        await self.remove(node)

    async def close(self) -> None:
        for node in tuple(self.nodes.values()):
            await self.remove(node)

    async def settled(self, *nodes: Node, within_s: float = 300.0) -> AgreedPlan:
        """Wait until these members, and nobody else, are in one plan that has begun."""
        wanted = nodes or tuple(self.nodes.values())
        await until(lambda: agree(wanted), within_s)
        return wanted[0].place


async def until(holds: Callable[[], bool], within_s: float = 300.0) -> None:
    until_s = now_s() + within_s
    while not holds():
        assert now_s() < until_s
        await asyncio.sleep(0.1)


def agree(nodes: tuple[Node, ...]) -> bool:
    statuses = [node.membership.status() for node in nodes]
    return (
        len({each.plan for each in statuses}) == 1
        and all(each.progress == ProposalProgress.BEGUN for each in statuses)
        and nodes[0].place.members == {node.peer_id for node in nodes}
    )


@asynccontextmanager
async def home(count: int = 5, **changes: Any) -> AsyncIterator[tuple[Home, list[Node]]]:
    here = Home()
    try:
        yield here, await here.add(*KEYS[:count], **changes)
    finally:
        await here.close()


def told(work: Callable[[Home, list[Node]], Awaitable[None]], count: int = 5, **changes: Any) -> None:
    async def tell() -> None:
        async with home(count, **changes) as (here, nodes):
            await work(here, nodes)

    run(tell())


def test_five_members_agree_on_one_plan():
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        assert violations(plan.plan) == []
        assert {node.place.digest for node in nodes} == {plan.digest}
        assert [len(node.places) for node in nodes] == [1] * 5

    told(story)


def test_two_members_that_missed_each_other_meet_soon_after_both_have_met_a_third():
    linked = [key.peer_id for key in KEYS[:3]]

    async def story(here: Home, nodes: list[Node]) -> None:
        here.network.partition([[nodes[0].host]])
        nodes += await here.add(KEYS[1], linked=linked)
        await asyncio.sleep(0.1)
        here.network.heal()
        nodes += await here.add(KEYS[2], linked=linked)
        await asyncio.sleep(0.1)
        assert [len(node.membership.members()) for node in nodes] == [2, 2, 3]
        await here.settled(within_s=SETTINGS.announce_s / 2)

    told(story, count=1, linked=linked)


def test_members_announce_themselves_ever_more_rarely_while_nothing_changes():
    async def story(here: Home, nodes: list[Node]) -> None:
        heard_s: list[float] = []

        async def listen() -> None:
            async for message in await nodes[0].host.subscribe(topic_of("home", "big")):
                if message.sender == nodes[1].peer_id:
                    heard_s.append(now_s())

        listening = asyncio.ensure_future(listen())
        await asyncio.sleep(10 * SETTINGS.announce_s)
        listening.cancel()
        between_s = [later - sooner for sooner, later in pairwise(heard_s)]
        assert between_s == sorted(between_s)
        assert between_s[0] < SETTINGS.announce_s / 4 and SETTINGS.announce_s <= between_s[-1]
        assert between_s[-1] < SETTINGS.announce_s + SETTINGS.ping_s

    told(story, count=3)


def test_a_data_node_is_told_at_once_while_nothing_changes():
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        feeder = next(node for node in nodes if plan.stage_of(node.peer_id) == 0)
        before_s = now_s()
        assert (await feeder.membership.agreed(0)).digest == plan.digest
        assert now_s() == before_s

    told(story, trains=False)


def test_a_newcomer_joins_while_iterations_run_and_nobody_else_loads_anything():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        await asyncio.sleep(5 * STEP_S)
        prepared = [node.prepared for node in nodes]
        (late,) = await here.add(KEYS[6], load_s=3 * STEP_S)
        second = await here.settled()
        assert second.iteration > first.iteration
        assert all(
            second.planned_stage_of(n.peer_id).first == first.planned_stage_of(n.peer_id).first for n in nodes
        )  # type: ignore[union-attr]
        assert [node.prepared for node in nodes] == prepared and late.prepared == 1
        # Training went on under the former plan while it loaded.
        old = [i for node in nodes for i, digest in node.trained if digest == first.digest]
        assert max(old) - first.iteration >= 6

    told(story)


@pytest.mark.parametrize("generate_s", [0.0, STEP_S], ids=["always busy", "generates between two steps"])
@pytest.mark.parametrize("steps", [3, 12, 40])
def test_no_iteration_is_lost_however_many_are_taken_while_a_newcomer_loads(steps: int, generate_s: float):
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        await here.add(KEYS[6], load_s=steps * (STEP_S + generate_s), generate_s=generate_s)
        second = await here.settled(within_s=1000.0)
        assert second.iteration >= first.iteration + steps
        assert second.epoch == first.epoch + 1, "nobody is left out for being busy"
        assert [node.lost_iterations for node in nodes] == [0] * 5

    told(story, generate_s=generate_s)


def test_no_iteration_runs_under_two_plans():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        for key in KEYS[5:8]:
            await asyncio.sleep(1.3 * STEP_S)
            await here.add(key)
            await here.settled()
        await here.kill(nodes[2])
        await here.settled()
        await asyncio.sleep(3 * STEP_S)
        plans: dict[int, set[str]] = {}
        for node in here.nodes.values():
            for iteration, digest in node.trained:
                plans.setdefault(iteration, set()).add(digest)
        assert len(plans) > 5
        assert all(len(digests) == 1 for digests in plans.values())

    told(story)


def test_a_member_that_dies_is_planned_around_within_seconds_of_silence():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        await here.kill(nodes[3])
        second = await here.settled(within_s=SETTINGS.silence_s + STEP_S + 10)
        assert second.epoch > first.epoch
        assert nodes[3].peer_id not in second.members

    told(story)


def test_a_reported_loss_is_confirmed_and_planned_around_before_the_silence_is_noticed():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        await here.kill(nodes[3])
        nodes[4].membership.lost(nodes[3].peer_id, "did not take a gradient")
        await asyncio.sleep(0.5)
        assert nodes[3].peer_id not in nodes[0].membership.members()
        await here.settled()

    told(story)


def test_a_member_reported_lost_that_answers_stays():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        nodes[0].membership.lost(nodes[3].peer_id, "one message did not arrive")
        await asyncio.sleep(60)
        assert (await here.settled()).epoch == first.epoch

    told(story)


def test_a_member_that_leaves_is_planned_around_at_once():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        await here.remove(nodes[2])
        await asyncio.sleep(0.1)
        assert all(nodes[2].peer_id not in node.membership.members() for node in here.nodes.values())
        await here.settled(within_s=STEP_S + 10)

    told(story)


def test_the_convener_dies_in_the_middle_of_a_proposal():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        (late,) = await here.add(KEYS[7], load_s=15.0)
        await until(lambda: late.membership.status().progress == ProposalProgress.PLANNING)
        await asyncio.sleep(2)
        assert late.membership.status().proposed
        await here.kill(nodes[0])
        plan = await here.settled()
        assert plan.members == {node.peer_id for node in [*nodes[1:], late]}

    told(story)


def test_the_convener_dies_between_seating_and_beginning():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        (late,) = await here.add(KEYS[7])
        await until(lambda: any(n.membership.status().progress == ProposalProgress.READY for n in nodes[1:]))
        await here.kill(nodes[0])
        plan = await here.settled()
        assert plan.members == {node.peer_id for node in [*nodes[1:], late]}

    told(story)


def test_both_sides_of_a_partition_go_on_and_meet_again_under_one_plan():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        left, right = nodes[:3], nodes[3:]
        here.network.partition([[n.host for n in left], [n.host for n in right]])
        await here.settled(*left)
        await here.settled(*right)
        await asyncio.sleep(5 * STEP_S)
        here.network.heal()
        merged = await here.settled()
        assert merged.epoch > first.epoch + 1
        assert merged.members == first.members
        assert len({node.iteration for node in nodes}) <= 2

    told(story, free=800 * pretend.MB)


def test_a_restarted_member_is_seated_anew():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        await here.kill(nodes[4])
        (again,) = await here.add(KEYS[4])
        await here.settled()
        assert again.places and again.prepared == 1

    told(story)


def test_the_last_member_holds_everything_if_it_fits():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        await here.kill(nodes[0])
        plan = await here.settled()
        assert [(part.first, part.end) for part in plan.partition.stages] == [(0, 6)]
        assert nodes[1].iteration >= 0

    told(story, count=2, free=800 * pretend.MB)


def test_without_enough_memory_they_wait_and_say_what_is_missing(caplog: pytest.LogCaptureFixture):
    async def story(here: Home, nodes: list[Node]) -> None:
        await asyncio.sleep(60)
        assert not nodes[0].places
        assert "bytes more" in caplog.text
        await here.add(*KEYS[2:6])
        await here.settled()

    told(story, count=2, free=150 * pretend.MB)


def test_another_model_is_said_in_words_and_a_setting_that_is_unset_is_called_so():
    here = plan_terms(pretend.settings(), "a" * 64)
    assert differing(here, plan_terms(pretend.settings(skip=0.5), "b" * 64)) == (
        "the model there is another than here"
    )
    assert differing(here, here | {"stages": "7"}) == "stages is 7 there and unset here"


def test_other_settings_are_refused_and_both_sides_say_which(caplog: pytest.LogCaptureFixture):
    async def story(here: Home, nodes: list[Node]) -> None:
        (other,) = await here.add(KEYS[5], plan=pretend.settings(skip=0.5))
        await here.settled(*nodes)
        await asyncio.sleep(60)
        assert not other.places
        assert nodes[0].membership.refused[Refusal.OTHER_TERMS] > 0
        assert (
            f"{other.peer_id} cannot join pipeline big with us: skip is 0.5 there and 0.0 here;"
            in caplog.text
        )
        assert "skip is 0.0 there and 0.5 here;" in caplog.text
        assert "let us take part" not in caplog.text, "one line a side, and it is not the wrong way round"

    told(story)


def test_a_member_that_does_nothing_loses_its_stage_when_the_data_nodes_say_so_and_not_before():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        data = [node for node in nodes if first.stage_of(node.peer_id) == 0]
        idle = next(node for node in nodes if (first.stage_of(node.peer_id) or 0) > 0)
        assert len(data) == 2
        data[0].observed = {idle.peer_id: Observation(20.0, 3)}
        await asyncio.sleep(2 * SETTINGS.announce_s)
        assert (await here.settled()).digest == first.digest, "the word of one does not do"
        data[1].observed = data[0].observed
        await until(lambda: nodes[0].place.digest != first.digest, 60)
        second = await here.settled()
        assert second.spare == (idle.peer_id,) and second.members == first.members
        await asyncio.sleep(2 * SETTINGS.announce_s)
        assert (await here.settled()).digest == second.digest

    told(story, count=6, plan=pretend.settings(stages=3, skip=0.33), free=800 * pretend.MB)


def test_a_list_of_members_keeps_others_out():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.add(KEYS[6])
        await here.settled(*nodes)
        assert nodes[0].membership.refused[Refusal.NOT_INVITED] > 0

    allowed = frozenset(key.peer_id for key in KEYS[:3])
    told(story, count=3, settings=replace(SETTINGS, allowed=allowed))


def test_a_member_that_cannot_load_is_left_out_and_the_others_go_on():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        (late,) = await here.add(KEYS[6], trains=False)

        async def refuse(agreed: AgreedPlan) -> None:
            raise ModelError("the folder lacks a file")

        late.prepare = refuse  # type: ignore[method-assign]
        late.membership._jobs.prepare = refuse  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(25)
        await here.settled(*nodes)
        assert not late.places

    told(story)


def test_a_member_that_fails_once_to_take_its_place_is_in_the_next_plan():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        fails = nodes[2]

        async def once(agreed: AgreedPlan) -> None:
            fails.membership._jobs.on_agreed = fails.take_place  # pyright: ignore[reportPrivateUsage]
            raise ModelError("not now")

        fails.membership._jobs.on_agreed = once  # pyright: ignore[reportPrivateUsage]
        (late,) = await here.add(KEYS[7])
        plan = await here.settled(within_s=SETTINGS.barred_s)
        assert plan.members == {node.peer_id for node in [*nodes, late]}

    told(story)


def test_a_member_that_nobody_can_reach_is_planned_around_before_its_silence_is_noticed():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        await here.kill(nodes[3])
        await asyncio.sleep(SETTINGS.ping_s + 2 * PING_AGAIN_S)
        assert nodes[3].peer_id not in nodes[0].membership.members()

    told(story)


def test_an_iteration_that_has_begun_is_not_ended_by_late_word_of_the_one_before():
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        member = next(node for node in nodes if plan.stage_of(node.peer_id) == 0).membership
        await member.agreed(plan.iteration)
        member.stepped(plan.iteration)
        assert member.status().busy
        member.stepped(plan.iteration + 1)
        assert not member.status().busy

    told(story, trains=False)


def test_who_waits_for_a_plan_is_told_when_the_membership_ends():
    async def story(here: Home, nodes: list[Node]) -> None:
        waits = asyncio.ensure_future(nodes[0].membership.agreed(0))
        await asyncio.sleep(1)
        await here.remove(nodes[0])
        with pytest.raises(ModelError, match="has ended"):
            await waits

    told(story, count=1, settings=replace(SETTINGS, at_least=2), trains=False)


# A hostile member: it has a key of its own and a host, and says what it likes.


class Hostile:
    def __init__(self, here: Home, key: NodeKey) -> None:
        self.key, self.host = key, here.network.host(key.peer_id)
        self.session = 7

    def presence(self, key: NodeKey | None = None, sequence: int = 1, **changes: Any) -> bytes:

        author = key or self.key
        said = Presence(
            session=self.session,
            sequence=sequence,
            terms=plan_terms(pretend.settings(), "tiny"),
            costs=CostAnnouncement(pretend.costs(author.peer_id, at_s=now_s()), {}, {}),
        )
        return seal_presence(author, msgspec.structs.replace(said, **changes), topic=topic_of("home", "big"))

    def status(self, **changes: Any) -> Status:
        said = Status(session=self.session, sequence=1, iteration=0, busy=False)
        return msgspec.structs.replace(said, **changes)

    async def ask(self, node: Node, request: Request | bytes, *, version: int = VERSION) -> AnswerFrame:
        stream = await self.host.open_stream(node.peer_id, PROTOCOL)
        body = request if isinstance(request, bytes) else encode(request)
        await stream.send(bytes([version]) + framed(MemberService.MEMBERSHIP, body, 5.0)[1:])
        answer = await raw_wire.answer_on(stream)
        stream.close()
        return answer

    async def refusal(self, node: Node, request: Request | bytes, *, version: int = VERSION) -> str:
        answer = await self.ask(node, request, version=version)
        assert answer.refused is not None, answer
        return answer.refused.reason

    async def tell(self, said: Callable[[], Status]) -> None:
        """Answers every request with this status."""

        async def answer(stream: ByteStream) -> None:
            await raw_wire.read(stream, Request)
            await raw_wire.say(stream, said())
            await stream.discard()

        await self.host.serve_streams(PROTOCOL, answer)


def hostile(work: Callable[[Home, list[Node], Hostile], Awaitable[None]], key: NodeKey = KEYS[7]) -> None:
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        bad = Hostile(here, key)
        async with bad.host:
            await bad.host.connect(nodes[0].host.address)
            await work(here, nodes, bad)

    told(story)


def test_a_stranger_is_asked_to_introduce_itself_and_bytes_are_refused():
    async def story(here: Home, nodes: list[Node], bad: Hostile) -> None:
        assert await bad.refusal(nodes[0], Ping(bad.status())) == Refusal.UNKNOWN_MEMBER
        assert await bad.refusal(nodes[0], Begin(5)) == Refusal.UNKNOWN_MEMBER
        assert await bad.refusal(nodes[0], b"\xc1") == Refusal.MALFORMED
        assert await bad.refusal(nodes[0], b"", version=VERSION + 1) == Refusal.OTHER_VERSION

    hostile(story)


def test_nobody_speaks_for_another_member():
    async def story(here: Home, nodes: list[Node], bad: Hostile) -> None:
        theirs = bad.presence(NodeKey(bytes([99]) * 32))
        assert await bad.refusal(nodes[0], Introduce(theirs)) == Refusal.NOT_OWN
        costs = CostAnnouncement(pretend.costs(nodes[1].peer_id, at_s=now_s()), {}, {})
        assert await bad.refusal(nodes[0], Introduce(bad.presence(costs=costs))) == Refusal.NOT_OWN
        elsewhere = seal_presence(
            bad.key, Presence(session=1, sequence=1, terms={}, costs=costs), topic="other"
        )
        assert await bad.refusal(nodes[0], Introduce(elsewhere)) == Refusal.BAD_SIGNATURE
        await bad.host.publish(topic_of("home", "big"), theirs)
        await asyncio.sleep(1)
        assert nodes[0].membership.refused[Refusal.NOT_OWN] == 3

    hostile(story)


def test_a_flood_of_announcements_is_cut_off():
    async def story(here: Home, nodes: list[Node], bad: Hostile) -> None:
        for number in range(400):
            await bad.host.publish(topic_of("home", "big"), bad.presence(sequence=number + 1))
            await asyncio.sleep(0)
        before = await here.settled(*nodes)
        assert nodes[0].membership.refused[Refusal.TOO_OFTEN] > 150
        await asyncio.sleep(60)
        assert (await here.settled(*nodes)).digest == before.digest

    hostile(story)


def test_only_the_smallest_living_peer_id_proposes():
    async def story(here: Home, nodes: list[Node], bad: Hostile) -> None:
        await bad.ask(nodes[1], Introduce(bad.presence()))
        proposal = Propose(9, (), {}, (bad.presence(),))
        assert await bad.refusal(nodes[1], proposal) == Refusal.NOT_CONVENER

    hostile(story)


def test_a_proposal_with_forged_announcements_is_refused():
    async def story(here: Home, nodes: list[Node], bad: Hostile) -> None:
        target = nodes[0]
        own = target.membership._own.sealed  # pyright: ignore[reportPrivateUsage]
        await bad.ask(target, Introduce(bad.presence()))
        assert await bad.refusal(target, Propose(9, (), {}, (own,))) == Refusal.NOT_IN_IT
        assert await bad.refusal(target, Propose(9, (), {}, (bad.presence(),))) == Refusal.NOT_IN_IT
        forged = msgspec.msgpack.encode([nodes[1].peer_id, *msgspec.msgpack.decode(bad.presence())[1:]])
        assert (
            await bad.refusal(target, Propose(9, (), {}, (own, bad.presence(), forged)))
            == Refusal.BAD_SIGNATURE
        )
        twice = (own, bad.presence(), bad.presence())
        assert await bad.refusal(target, Propose(9, (), {}, twice)) == Refusal.MALFORMED
        lie = target.membership.status().ends
        stage = (target.membership.status().stage + 1) % len(lie)
        both = (own, bad.presence())
        assert await bad.refusal(target, Propose(9, lie, {target.peer_id: stage}, both)) == Refusal.WRONG_PART
        assert await bad.refusal(target, Propose(10**9, (), {}, both)) == Refusal.EPOCH_LEAP
        assert await bad.refusal(target, Propose(1, (), {}, both)) == Refusal.OUTBID
        assert target.membership.status().progress == ProposalProgress.BEGUN

    smallest = min((NodeKey(bytes([n]) * 32) for n in range(50, 250)), key=lambda key: key.peer_id)
    assert smallest.peer_id < KEYS[0].peer_id
    hostile(story, smallest)


def test_a_member_that_lies_about_its_epoch_and_iteration_holds_nobody_up():
    async def story(here: Home, nodes: list[Node], bad: Hostile) -> None:
        await bad.tell(lambda: lies)
        await bad.ask(nodes[0], Introduce(bad.presence()))
        await here.add(KEYS[6])
        plan = await here.settled(*(n for n in here.nodes.values()), within_s=200)
        assert plan.epoch < 100
        assert plan.iteration < 100

    lies = Status(session=7, sequence=1, iteration=2**50, busy=True, stage=0, epoch=2**50)
    hostile(story)


def test_random_churn_always_ends_in_one_plan():
    async def story(here: Home, nodes: list[Node]) -> None:
        rng = random.Random(3)
        for _ in range(12):
            idle = [key for key in KEYS if key not in here.nodes]
            if idle and (len(here.nodes) < 4 or rng.random() < 0.5):
                await here.add(rng.choice(idle))
            else:
                victim = rng.choice(list(here.nodes.values()))
                await (here.kill(victim) if rng.random() < 0.7 else here.remove(victim))
            await asyncio.sleep(rng.uniform(0, 25))
        await here.settled(within_s=1200)

    told(story)
