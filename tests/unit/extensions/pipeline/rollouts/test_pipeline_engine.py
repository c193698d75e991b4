"""Rollouts through stages at several members: the path that is kept, and members that are lost on it."""

import asyncio
import logging
import random
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.errors import EngineError, NetworkError
from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue
from swarmnode.extensions.pipeline.rollouts import remote_chain
from swarmnode.extensions.pipeline.rollouts.chain import ChainFeed, Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_node import DecodeNode
from swarmnode.extensions.pipeline.rollouts.pipeline_engine import PipelineEngine
from swarmnode.extensions.pipeline.rollouts.remote_chain import RemoteChain
from swarmnode.extensions.pipeline.rollouts.stage_caches import StageCaches
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.streams import StreamHost
from swarmnode.rollout.engine import Output, PolicyUpdate, Request, Sampled, SamplingParams
from swarmnode.types import Span
from tests.contracts.hosts import HostFactory, p2pd_hosts
from tests.local_chain import LocalChain, LocalPipelineEngine
from tests.unit.extensions.pipeline.stages.test_stage_model import stages_of
from tests.unit.extensions.pipeline.tiny_models import LAYERS, VOCABULARY, bypass, tiny_model

PLAN = "ab" * 32
ENDS = (2, 4, LAYERS)
FULL = (0, 1, 2)
ROOM = 1 << 24
MODEL = tiny_model()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(2, 9))) for _ in range(count)]


def requests(questions: Sequence[tuple[int, ...]], tokens: int = 12) -> list[Request]:
    return [
        Request(str(place), prompt, SamplingParams(tokens, seed=place))
        for place, prompt in enumerate(questions)
    ]


def run(engine: PipelineEngine, asked: Sequence[Request] = ()) -> dict[str, Output]:
    engine.submit(asked)
    outputs: list[Output] = []
    for _ in range(500):
        if engine.stats().running + engine.stats().waiting == 0:
            break
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


def local(paths: Callable[[Sequence[int]], StagePath] = lambda _: FULL, **settings: Any) -> PipelineEngine:
    chain = LocalChain(stages_of(MODEL, ENDS), max_cache_bytes=settings.pop("room", ROOM))
    return LocalPipelineEngine(chain, (), choose_path=paths, max_length=128, **settings)


@torch.no_grad()
def expected_logprobs(prompt: Sequence[int], tokens: Sequence[int], path: StagePath = FULL) -> torch.Tensor:
    """From one pass of the whole model without the layers that the path leaves out."""
    model = tiny_model()
    bounds = [(0, 2), (2, 4), (4, 6)]
    bypass(model, [n for stage in set(range(3)) - set(path) for n in range(*bounds[stage])])
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    found = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return found.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_true(output: Output, prompt: Sequence[int], path: StagePath = FULL, since: int = 0) -> None:
    """The recorded log-probabilities from token `since` on are those of the path."""
    found = torch.tensor(output.logprobs)[since:]
    expected = expected_logprobs(prompt, output.token_ids, path)[since:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def resumed(caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """Tokens that were brought again, and sequences that lost a stage, by the log."""
    told = re.findall(r"resumed \((\d+) tokens\), (\d+) go along fewer", caplog.text)
    return sum(int(tokens) for tokens, _ in told), sum(int(rerouted) for _, rerouted in told)


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


@dataclass
class Member:
    host: StreamHost
    node: DecodeNode
    version: list[int]


@dataclass
class Swarm:
    """Members in one process; the first one samples."""

    members: list[Member]
    engine: PipelineEngine
    chain: RemoteChain
    lost: list[tuple[str, str]]


def wait_shortly_for(number: int, pipeline: Swarm) -> None:
    """Shortens the deadline of steps that visit this member. On a slow machine, the others need more time."""
    data_node = pipeline.members[0].node
    send_around = data_node.send_around

    async def sent(feed: ChainFeed, hidden_ND: torch.Tensor, *, timeout_s: float) -> torch.Tensor | Stopped:
        timeout_s = 1.0 if number in feed.route.nodes else timeout_s
        return await send_around(feed, hidden_ND, timeout_s=timeout_s)

    data_node.send_around = sent


@asynccontextmanager
async def swarm(
    stage_of: Sequence[int] = (0, 1, 2),
    *,
    step_timeout_s: float = 5.0,
    paths: Callable[[Sequence[int]], StagePath] = lambda _: FULL,
    new_host: HostFactory | None = None,
) -> AsyncGenerator[Swarm, None]:
    new_host = new_host or MemoryNetwork(seed=1).host
    stages = stages_of(MODEL, ENDS)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(new_host()) for _ in stage_of]
        for one in hosts:
            for other in hosts:
                if one is not other:
                    await one.connect((await other.addresses())[0])
        peers = tuple(host.peer_id for host in hosts)
        made: list[Member] = []
        for number, host in enumerate(hosts):
            version = [0]
            streams = await stack.enter_async_context(MemberStreams(host))
            queue = await stack.enter_async_context(StageQueue())
            node = DecodeNode(
                streams,
                run_in_stage_thread=queue.call,
                version=lambda own=version: own[0],
            )
            await stack.enter_async_context(node)
            node.hold(StageCaches(stages[stage_of[number]], max_bytes=ROOM))
            node.adopt(PlanMembers(PLAN, peers, number, tuple(stage_of)))
            made.append(Member(host, node, version))
        lost: list[tuple[str, str]] = []
        chain = RemoteChain(
            made[0].node, asyncio.get_running_loop(),
            on_lost=lambda peer_id, why: lost.append((peer_id, why)),
            step_timeout_s=step_timeout_s,
        )  # fmt: skip
        engine = PipelineEngine(chain, (), choose_path=paths, max_running=16, max_length=128)
        yield Swarm(made, engine, chain, lost)


# One process


def test_a_group_shares_a_path_that_is_in_its_record() -> None:
    paths = {prompt: path for prompt, path in zip(prompts(3), [FULL, (0, 2), (0, 1)], strict=True)}
    engine = local(lambda prompt: paths[tuple(prompt)])
    asked = requests([prompt for prompt in paths for _ in range(3)])
    for name, output in run(engine, asked).items():
        prompt = asked[int(name)].prompt_ids
        assert output.sampled.path == paths[prompt]
        assert_true(output, prompt, paths[prompt])


def test_a_resumed_answer_goes_on_along_its_own_path() -> None:
    asked = requests(prompts(2))
    engine = local(lambda _: (0, 2))
    engine.submit(asked)
    for _ in range(4):
        engine.step()
    parts = {part.request_id: part.sampled for part in engine.abort()}
    outputs = run(local(), [request.resumed(parts[request.request_id]) for request in asked])
    for request in asked:
        assert outputs[request.request_id].sampled.path == (0, 2)
        assert_true(outputs[request.request_id], request.prompt_ids, (0, 2))


def test_a_request_may_name_its_path_before_it_has_a_token() -> None:
    (asked,) = requests(prompts(1))
    output = run(local(), [asked.resumed(Sampled(path=(0, 1)))])["0"]
    assert output.sampled.path == (0, 1)
    assert_true(output, asked.prompt_ids, (0, 1))


def test_a_path_that_is_none_here_gives_way_to_that_of_the_prompt() -> None:
    (asked,) = requests(prompts(1))
    assert run(local(), [asked.resumed(Sampled(path=(0, 7)))])["0"].sampled.path == FULL


def test_a_shared_prompt_is_computed_once() -> None:
    engine = local()
    prompt = prompts(1)[0]
    brought: list[int] = []
    chain = engine._chain
    real = chain.run

    def counted(feeds: Sequence[Any]) -> Any:
        brought.extend(len(feed.ids) for feed in feeds)
        return real(feeds)

    chain.run = counted  # type: ignore[method-assign]
    outputs = run(engine, requests([prompt] * 8, tokens=1))
    assert brought == [len(prompt), 7]
    for output in outputs.values():
        assert_true(output, prompt)


def test_prompts_longer_than_a_message_come_in_pieces() -> None:
    engine = local()
    engine._chain.max_feed_tokens = 5  # type: ignore[misc]
    asked = requests([tuple(range(2, 20)), *prompts(3)])
    for name, output in run(engine, asked).items():
        assert_true(output, asked[int(name)].prompt_ids)


def test_what_a_stage_has_no_room_for_waits_and_comes_out_the_same() -> None:
    asked = requests(prompts(12), tokens=20)
    engine = local()
    whole = run(engine, asked)
    # Room for four cells of one growth each, at two layers.
    tight = local(room=4 * 64 * 2 * 2 * 16 * 4)
    found = run(tight, asked)
    assert {name: output.token_ids for name, output in found.items()} == {
        name: output.token_ids for name, output in whole.items()
    }


# Members


async def test_members_sample_what_one_process_samples() -> None:
    asked = requests(prompts(10))
    expected = run(local(), asked)
    async with swarm() as pipeline:
        found = await asyncio.to_thread(run, pipeline.engine, asked)
        for name, output in found.items():
            assert output.token_ids == expected[name].token_ids
            assert output.sampled.path == FULL
            assert_true(output, asked[int(name)].prompt_ids)
        assert [member.node.steps for member in pipeline.members] == [0, 12, 12]
        # The last sequence has ended, and nobody holds a session of it.
        await eventually(lambda: not any(len(member.node.caches or ()) for member in pipeline.members))


async def test_several_paths_are_in_use_at_once() -> None:
    questions = prompts(6)
    paths = {prompt: [(0, 1), FULL, (0, 2)][place % 3] for place, prompt in enumerate(questions)}
    async with swarm(paths=lambda prompt: paths.get(tuple(prompt), FULL)) as pipeline:
        engine, asked = pipeline.engine, requests(questions)
        engine.submit(asked)
        found = await asyncio.to_thread(run, engine)
    for name, output in found.items():
        prompt = questions[int(name)]
        assert_true(output, prompt, paths[prompt])


async def test_a_replica_takes_over_from_a_member_that_left_and_nothing_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    asked = requests(prompts(5))
    expected = run(local(), asked)
    async with swarm((0, 1, 1, 2)) as pipeline:
        engine = pipeline.engine
        engine.submit(asked)
        for _ in range(4):
            await asyncio.to_thread(engine.step)
        route = pipeline.chain.route(FULL)
        assert route is not None
        gone = pipeline.members[route.nodes[1]]
        await gone.node.__aexit__(None, None, None)
        await gone.host.__aexit__(None, None, None)
        found = await asyncio.to_thread(run, engine)
    assert {peer for peer, _ in pipeline.lost} == {gone.host.peer_id}
    assert resumed(caplog) == (sum(len(request.prompt_ids) + 3 for request in asked), 0)
    for name, output in found.items():
        assert (output.token_ids, output.sampled.path) == (expected[name].token_ids, FULL)
        assert_true(output, asked[int(name)].prompt_ids)


async def test_a_frozen_member_is_found_and_its_stage_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """It takes messages and never does anything with them."""
    caplog.set_level(logging.INFO)
    asked = requests(prompts(4))
    async with swarm() as pipeline:
        engine, frozen = pipeline.engine, pipeline.members[1]
        engine.submit(asked)
        for _ in range(4):
            await asyncio.to_thread(engine.step)

        async def never(fn: Callable[[], Any]) -> Any:
            await asyncio.Event().wait()

        frozen.node.run_in_stage_thread = never
        wait_shortly_for(1, pipeline)
        found = await asyncio.to_thread(run, engine)
        assert [peer for peer, _ in pipeline.lost] == [frozen.host.peer_id]
        assert resumed(caplog)[1] == len(asked)
    for name, output in found.items():
        assert (len(output.token_ids), output.sampled.path) == (12, (0, 2))
        assert_true(output, asked[int(name)].prompt_ids, (0, 2), since=4)
        assert output.logprobs[:4] == pytest.approx(
            expected_logprobs(asked[int(name)].prompt_ids, output.token_ids)[:4].tolist(), abs=1e-5
        )


async def test_a_member_that_forgot_its_sessions_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked = requests(prompts(4))
    expected = run(local(), asked)
    async with swarm() as pipeline:
        engine = pipeline.engine
        engine.submit(asked)
        for _ in range(4):
            await asyncio.to_thread(engine.step)
        caches = pipeline.members[2].node.caches
        assert caches is not None
        caches._sessions.clear()
        found = await asyncio.to_thread(run, engine)
        assert pipeline.lost == []
        assert resumed(caplog)[0] > 0
    assert {name: output.token_ids for name, output in found.items()} == {
        name: output.token_ids for name, output in expected.items()
    }


async def test_another_plan_is_no_reason_to_lose_a_token() -> None:
    asked = requests(prompts(4))
    expected = run(local(), asked)
    async with swarm((0, 1, 2, 1)) as pipeline:
        engine = pipeline.engine
        engine.submit(asked)
        for _ in range(4):
            await asyncio.to_thread(engine.step)
        plan, peers = "cd" * 32, tuple(member.host.peer_id for member in pipeline.members)
        for number, member in enumerate(pipeline.members):
            member.node.adopt(PlanMembers(plan, peers, number, (0, -1, 2, 1)))
        found = await asyncio.to_thread(run, engine)
        assert pipeline.members[3].node.steps == 8
    assert {name: output.token_ids for name, output in found.items()} == {
        name: output.token_ids for name, output in expected.items()
    }


async def test_a_step_waits_for_members_that_are_a_version_behind() -> None:
    (asked,) = requests(prompts(1))
    async with swarm() as pipeline:
        engine = pipeline.engine
        engine.submit([asked])
        await asyncio.to_thread(engine.step)
        engine.set_policy(PolicyUpdate(1, {}, 1.0), "keep")
        pipeline.members[0].version[0] = pipeline.members[2].version[0] = 1
        step = asyncio.ensure_future(asyncio.to_thread(engine.step))
        await asyncio.sleep(0.1)
        assert not step.done()
        pipeline.members[1].version[0] = 1
        await step
        output = (await asyncio.to_thread(run, engine))["0"]
    assert output.spans == (Span(0, 0, 1), Span(1, 1, 12, "stale"))


async def test_members_that_are_a_step_ahead_are_asked_again_once_we_have_taken_it() -> None:
    (asked,) = requests(prompts(1))
    async with swarm() as pipeline:
        engine, own = pipeline.engine, pipeline.members[0]
        engine._newest_version = lambda: own.version[0]
        engine.submit([asked])
        for _ in range(2):
            await asyncio.to_thread(engine.step)
        for member in pipeline.members[1:]:
            member.version[0] = 1
        waits = own.node.moves_on

        async def waits_and_moves(version: int, *, within_s: float) -> bool:
            waiting = asyncio.ensure_future(waits(version, within_s=within_s))
            await asyncio.sleep(0)
            own.version[0] = 1
            return await waiting

        own.node.moves_on = waits_and_moves  # type: ignore[method-assign]
        output = (await asyncio.to_thread(run, engine))["0"]
        assert pipeline.lost == []
    assert (output.spans, output.sampled.path) == ((Span(0, 0, 2), Span(1, 2, 12, "stale")), FULL)


async def test_a_member_that_stays_at_another_policy_is_gone_around_until_ours_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_chain, "MOVE_TIMEOUT_S", 0.1)
    first, second = requests(prompts(2))
    async with swarm(step_timeout_s=60.0) as pipeline:
        engine, other = pipeline.engine, pipeline.members[1]
        other.version[0] = 7
        found = (await asyncio.to_thread(run, engine, [first]))["0"]
        for member in pipeline.members:
            member.version[0] = 1
        engine.set_policy(PolicyUpdate(1, {}, 1.0), "recompute")
        engine._feeder.policy_moved()
        after = (await asyncio.to_thread(run, engine, [second]))["1"]
        assert pipeline.lost == []
    assert (found.sampled.path, after.sampled.path) == ((0, 2), FULL)
    assert_true(found, first.prompt_ids, (0, 2))
    assert_true(after, second.prompt_ids)


@pytest.mark.parametrize("why", [*StopReason])
@pytest.mark.parametrize("everybody", [False, True])
async def test_nothing_that_members_say_ends_sampling(
    why: StopReason, everybody: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says of every step that it does not go on, always for the same reason."""
    monkeypatch.setattr(remote_chain, "MOVE_TIMEOUT_S", 0.1)
    asked = requests(prompts(3), tokens=2)
    # Who has another plan is waited for until the end of a step.
    async with swarm(step_timeout_s=3.0 if why is StopReason.OTHER_PLAN else 60.0) as pipeline:
        liars = pipeline.members[1:] if everybody else pipeline.members[2:]

        async def compute(*args: Any) -> Stopped:
            return Stopped(why, None, "for no reason")

        for liar in liars:
            liar.node.compute = compute  # type: ignore[method-assign]
        found = await asyncio.to_thread(run, pipeline.engine, asked)
    path = (0,) if everybody else (0, 1)
    assert {output.sampled.path for output in found.values()} == {path}
    for name, output in found.items():
        assert_true(output, asked[int(name)].prompt_ids, path)


def test_members_of_which_one_swallows_every_step_are_gone_around_for_longer_each_time() -> None:
    """Nobody says which: nothing comes around."""
    engine = local()
    real = engine._chain.run

    def swallowed(feeds: Sequence[ChainFeed]) -> list[torch.Tensor | Stopped]:
        return [
            Stopped(StopReason.FORGOTTEN, None) if len(feed.route.nodes) > 1 else real([feed])[0]
            for feed in feeds
        ]

    engine._chain.run = swallowed  # type: ignore[method-assign]
    (asked,) = requests(prompts(1), tokens=2)
    for policies in (2, 4, 8):
        found = run(engine, [asked])["0"]
        assert found.sampled.path == (0,)
        assert set(engine._feeder._around.values()) == {policies}
        while engine._feeder._around:
            engine._feeder.policy_moved()
        assert_true(found, asked.prompt_ids, (0,))


async def test_a_member_without_room_for_one_sequence_is_gone_around_and_none_before() -> None:
    asked = requests(prompts(3))
    async with swarm() as pipeline:
        engine, caches = pipeline.engine, pipeline.members[1].node.caches
        assert caches is not None
        caches._max_bytes = 0
        found = await asyncio.to_thread(run, engine, asked)
        assert pipeline.lost == []
    for name, output in found.items():
        assert output.sampled.path == (0, 2)
        assert_true(output, asked[int(name)].prompt_ids, (0, 2))


async def test_a_node_that_was_lost_under_the_former_plan_is_none_of_the_next() -> None:
    async with swarm((0, 1, 2)) as pipeline:
        former = pipeline.chain.route(FULL)
        assert former is not None
        peers = tuple(member.host.peer_id for member in pipeline.members)
        pipeline.members[0].node.adopt(PlanMembers("cd" * 32, peers, 0, (0, 2, 1)))
        pipeline.chain.report_lost(former, 1, "does not answer")
        await asyncio.sleep(0)
        now = pipeline.chain.route(FULL)
        assert now is not None and now.nodes == (0, 2, 1)
        assert pipeline.lost == []


async def test_the_numbers_of_sessions_cannot_be_guessed() -> None:
    numbers: list[int] = []
    async with swarm(paths=lambda prompt: FULL if len(prompt) % 2 else (0, 1)) as pipeline:
        real = pipeline.chain.run

        def noted(feeds: Sequence[Any]) -> Any:
            numbers.extend(feed.session for feed in feeds)
            return real(feeds)

        pipeline.chain.run = noted  # type: ignore[method-assign]
        await asyncio.to_thread(run, pipeline.engine, requests([(2, 3), (2, 3, 4)], tokens=1))
    assert len(numbers) == 2 and abs(numbers[0] - numbers[1]) > 1000


async def test_weights_cannot_be_brought_to_members_by_an_update() -> None:
    async with swarm() as pipeline:
        with pytest.raises(EngineError, match="at its stages"):
            pipeline.engine.set_policy(PolicyUpdate(1, {"x": torch.zeros(1)}, 1.0))
        assert pipeline.engine.policy_version == 0


async def test_steps_go_around_over_libp2p(tmp_path: Path) -> None:
    try:
        find_daemon()
    except NetworkError as error:
        pytest.skip(str(error))
    asked = requests(prompts(4), tokens=6)
    expected = run(local(), asked)
    async with swarm(new_host=p2pd_hosts(tmp_path)) as pipeline:
        found = await asyncio.to_thread(run, pipeline.engine, asked)
    assert {name: output.token_ids for name, output in found.items()} == {
        name: output.token_ids for name, output in expected.items()
    }
