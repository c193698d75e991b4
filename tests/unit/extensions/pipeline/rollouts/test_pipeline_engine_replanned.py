"""Rollouts that are under way when a member dies, freezes, or the plan changes.

Nothing waits for what is gone, no token is lost or sampled twice, and the path on record is the one taken.

A step may take a minute here, and no test waits for that: each ends because somebody was told.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from swarmnode.errors import EngineError
from swarmnode.extensions.pipeline.rollouts.chain import ChainFeed, Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_messages import DecodeMessage
from swarmnode.extensions.pipeline.rollouts.feeder import MAX_FAILURES, PATIENCE
from swarmnode.extensions.pipeline.rollouts.pipeline_engine import PipelineEngine
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments, StageCaches
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.rollout.engine import Output, Request
from tests.unit.extensions.pipeline import raw_wire
from tests.unit.extensions.pipeline.rollouts.test_decode_node import PLAN
from tests.unit.extensions.pipeline.rollouts.test_pipeline_engine import (
    ENDS,
    FULL,
    MODEL,
    ROOM,
    Member,
    Swarm,
    assert_true,
    eventually,
    expected_logprobs,
    local,
    prompts,
    requests,
    resumed,
    run,
    swarm,
    wait_shortly_for,
)
from tests.unit.extensions.pipeline.stages.test_stage_model import stages_of

NEXT = "cd" * 32
STAGES = stages_of(MODEL, ENDS)


@asynccontextmanager
async def patient(stage_of: Sequence[int], **settings: Any) -> AsyncGenerator[Swarm, None]:
    async with asyncio.timeout(30), swarm(stage_of, step_timeout_s=60.0, **settings) as pipeline:
        yield pipeline


def take_places(pipeline: Swarm, stage_of: Sequence[int], who: Collection[int] | None = None) -> None:
    """These members, or all, have their stages under the next plan."""
    peers = tuple(member.host.peer_id for member in pipeline.members)
    for number, member in enumerate(pipeline.members):
        if who is not None and number not in who:
            continue
        stage = stage_of[number]
        member.node.hold(None if stage < 0 else StageCaches(STAGES[stage], max_bytes=ROOM))
        member.node.adopt(None if stage < 0 else PlanMembers(NEXT, peers, number, tuple(stage_of)))


def do_nothing(member: Member) -> Callable[[], bool]:
    """Take work from now on and do none of it; whether some was taken."""
    asked = False

    async def never(fn: Callable[[], Any]) -> Any:
        nonlocal asked
        asked = True
        await asyncio.Event().wait()

    member.node.run_in_stage_thread = never
    return lambda: asked


def waited_for(pipeline: Swarm) -> list[str]:
    """The peers that keep others waiting from now on."""
    found: list[str] = []
    for member in pipeline.members:
        member.node.on_silent = lambda peer_id, why: found.append(peer_id)
    return found


def go_down(member: Member) -> None:
    assert isinstance(member.host, MemoryHost)
    member.host.go_down()


async def begin(pipeline: Swarm, asked: Sequence[Request], steps: int = 3) -> None:
    """Submit them, and have the first tokens sampled."""
    pipeline.engine.submit(asked)
    for _ in range(steps):
        await asyncio.to_thread(pipeline.engine.step)


def going_on(pipeline: Swarm) -> "asyncio.Task[dict[str, Output]]":
    return asyncio.create_task(asyncio.to_thread(run, pipeline.engine))


async def going_on_without(pipeline: Swarm, dying: Member) -> dict[str, Output]:
    """The round to its end; the member dies with a step in hand."""
    has_it = do_nothing(dying)
    round_ = going_on(pipeline)
    await eventually(has_it)
    go_down(dying)
    return await round_


def on_the_way(pipeline: Swarm, hop: int = 1) -> Member:
    """The member that the full path comes to at this hop."""
    route = pipeline.chain.route(FULL)
    assert route is not None
    return pipeline.members[route.nodes[hop]]


def assert_as_undisturbed(found: dict[str, Output], asked: Sequence[Request]) -> None:
    expected = run(local(), asked)
    for request in asked:
        output = found[request.request_id]
        assert (output.token_ids, output.spans) == (
            expected[request.request_id].token_ids,
            expected[request.request_id].spans,
        )
        assert output.sampled.path == FULL
        assert_true(output, request.prompt_ids)


# Members that die


@pytest.mark.parametrize("stage", [1, 2])
async def test_a_member_that_dies_with_a_step_in_hand_is_replaced_by_its_replica(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Next to the data node, or behind another member, which sees its stream end."""
    caplog.set_level(logging.INFO)
    asked = requests(prompts(5))
    async with patient((0, 1, 1, 2, 2)) as pipeline:
        await begin(pipeline, asked)
        dying = on_the_way(pipeline, stage)
        found = await going_on_without(pipeline, dying)
    assert {peer for peer, _ in pipeline.lost} == {dying.host.peer_id}
    assert resumed(caplog) == (sum(len(request.prompt_ids) + 2 for request in asked), 0)
    assert_as_undisturbed(found, asked)


async def test_a_stage_that_dies_with_its_only_member_is_left_out_and_the_path_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    asked = requests(prompts(4))
    async with patient((0, 1, 2)) as pipeline:
        await begin(pipeline, asked, steps=4)
        found = await going_on_without(pipeline, pipeline.members[1])
        assert resumed(caplog)[1] == len(asked)
    for request in asked:
        output = found[request.request_id]
        assert (len(output.token_ids), output.sampled.path) == (12, (0, 2))
        assert_true(output, request.prompt_ids, (0, 2), since=4)
        kept = expected_logprobs(request.prompt_ids, output.token_ids)[:4]
        torch.testing.assert_close(torch.tensor(output.logprobs[:4]), kept, atol=1e-5, rtol=0)


async def test_what_is_on_other_paths_keeps_its_keys_and_values(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    questions = prompts(4)
    paths = {prompt: FULL if place % 2 else (0, 2) for place, prompt in enumerate(questions)}
    asked = requests(questions)
    async with patient((0, 1, 1, 2), paths=lambda prompt: paths[tuple(prompt)]) as pipeline:
        await begin(pipeline, asked)
        found = await going_on_without(pipeline, on_the_way(pipeline))
        along = [request for request in asked if paths[request.prompt_ids] == FULL]
        refed = sum(len(request.prompt_ids) + 2 for request in along)
        assert resumed(caplog)[0] == refed
    for request in asked:
        assert_true(found[request.request_id], request.prompt_ids, paths[request.prompt_ids])


# Members that freeze


async def test_a_frozen_member_is_not_waited_for_once_the_others_have_given_it_up() -> None:
    """It takes no message and answers none, and no stream ends."""
    asked = requests(prompts(4))
    network = MemoryNetwork(seed=1)
    async with patient((0, 1, 1, 2), new_host=network.host) as pipeline:
        await begin(pipeline, asked)
        route = pipeline.chain.route(FULL)
        assert route is not None
        frozen = pipeline.members[route.nodes[1]].host
        assert isinstance(frozen, MemoryHost)
        network.partition([[frozen]])
        round_ = going_on(pipeline)
        data_node = pipeline.members[0].node
        await eventually(lambda: bool(data_node._in_flight._expected))
        data_node.lose(frozen.peer_id, "silent for 12 s")
        found = await round_
    assert [peer for peer, _ in pipeline.lost] == [frozen.peer_id]
    assert_as_undisturbed(found, asked)


async def test_a_frozen_member_is_replaced_under_the_next_plan() -> None:
    asked = requests(prompts(4))
    network = MemoryNetwork(seed=1)
    async with patient((0, 1, 2, 1), new_host=network.host) as pipeline:
        peers = tuple(member.host.peer_id for member in pipeline.members)
        pipeline.members[0].node.adopt(PlanMembers(PLAN, peers, 0, (0, 1, 2, -1)))
        await begin(pipeline, asked)
        frozen = pipeline.members[1].host
        assert isinstance(frozen, MemoryHost)
        network.partition([[frozen]])
        round_ = going_on(pipeline)
        await eventually(lambda: bool(pipeline.members[0].node._in_flight._expected))
        take_places(pipeline, (0, -1, 2, 1), who=(0, 2, 3))
        found = await round_
        assert pipeline.members[3].node.steps > 0
    assert pipeline.lost == []
    assert_as_undisturbed(found, asked)


# Plans that change


async def test_another_plan_ends_the_step_that_is_under_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked = requests(prompts(4))
    async with patient((0, 1, 2)) as pipeline:
        await begin(pipeline, asked)
        busy = pipeline.members[2]
        own = busy.node.run_in_stage_thread
        has_it = do_nothing(busy)
        round_ = going_on(pipeline)
        await eventually(has_it)
        busy.node.run_in_stage_thread = own
        take_places(pipeline, (0, 1, 2))
        assert_as_undisturbed(await round_, asked)
        assert pipeline.lost == []
        assert resumed(caplog)[0] == sum(len(request.prompt_ids) + 2 for request in asked)


@pytest.mark.parametrize("first", [(0,), (0, 1), (0, 2), (1, 2), (1,), (2,)])
async def test_members_take_their_places_one_after_the_other(first: Sequence[int]) -> None:
    asked = requests(prompts(4))
    async with patient((0, 1, 2)) as pipeline:
        await begin(pipeline, asked)
        take_places(pipeline, (0, 1, 2), who=first)
        waits_for = waited_for(pipeline)
        round_ = going_on(pipeline)
        await eventually(lambda: bool(waits_for))
        assert not round_.done()
        take_places(pipeline, (0, 1, 2), who={0, 1, 2} - set(first))
        assert_as_undisturbed(await round_, asked)
    assert pipeline.lost == []


async def test_a_newcomer_that_knows_nobody_yet_is_waited_for() -> None:
    asked = requests(prompts(4))
    async with patient((0, 1, 2)) as pipeline:
        newcomer = pipeline.members[2].node
        plan, caches = newcomer.members, newcomer.caches
        newcomer.hold(None)
        newcomer._members = None
        waits_for = waited_for(pipeline)
        pipeline.engine.submit(asked)
        round_ = going_on(pipeline)
        await eventually(lambda: waits_for == [pipeline.members[2].host.peer_id])
        newcomer.hold(caches)
        newcomer.adopt(plan)
        assert_as_undisturbed(await round_, asked)
    assert pipeline.lost == []


async def test_a_member_with_other_layers_by_now_computes_nothing_for_the_former_plan() -> None:
    """Its stage under the next plan is another one: sequences that begin would pass the wrong layers."""
    asked = requests(prompts(4))
    async with patient((0, 1, 2)) as pipeline:
        take_places(pipeline, (0, 2, 1), who=(1, 2))
        waits_for = waited_for(pipeline)
        pipeline.engine.submit(asked)
        round_ = going_on(pipeline)
        await eventually(lambda: bool(waits_for))
        assert [member.node.steps for member in pipeline.members[1:]] == [0, 0]
        take_places(pipeline, (0, 2, 1), who=(0,))
        assert_as_undisturbed(await round_, asked)


async def test_a_step_waits_while_our_own_stage_changes() -> None:
    asked = requests(prompts(3))
    async with patient((0, 1, 2)) as pipeline:
        await begin(pipeline, asked)
        pipeline.members[0].node.hold(None)
        round_ = going_on(pipeline)
        await asyncio.sleep(0.05)
        assert not round_.done()
        take_places(pipeline, (0, 1, 2))
        assert_as_undisturbed(await round_, asked)


async def test_a_node_without_a_place_under_the_new_plan_says_so_and_loses_no_token() -> None:
    asked = requests(prompts(3))
    async with patient((0, 1, 2)) as pipeline:
        await begin(pipeline, asked)
        has_it = do_nothing(pipeline.members[1])
        step = asyncio.create_task(asyncio.to_thread(pipeline.engine.step))
        await eventually(has_it)
        pipeline.members[0].node.hold(None)
        pipeline.members[0].node.adopt(None)
        with pytest.raises(EngineError, match="does not sample"):
            await step
        parts = {part.request_id: part.sampled for part in pipeline.engine.abort()}
    resumed = [request.resumed(parts[request.request_id]) for request in asked]
    assert all(len(request.sampled) == 3 for request in resumed)
    assert_as_undisturbed(run(local(), resumed), asked)


async def test_hidden_states_go_with_the_head_that_they_began_under() -> None:
    async with patient((0, 1, 2)) as pipeline:
        route = pipeline.chain.route(FULL)
        assert route is not None
        feed = ChainFeed(route, 1, (5, 6), Segments((0,), (0,), (2,)), 0)
        (hidden,) = await asyncio.to_thread(pipeline.chain.run, [feed])
        pipeline.members[0].node.hold(None)
        assert isinstance(hidden, torch.Tensor)
        logits = await asyncio.to_thread(pipeline.chain.logits, hidden)
    with torch.no_grad():
        expected = MODEL(torch.tensor([[5, 6]]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


async def test_a_version_that_changes_under_a_step_is_gone_on_with() -> None:
    (asked,) = requests(prompts(1))
    async with patient((0, 1, 2)) as pipeline:
        now = 0
        pipeline.engine._newest_version = lambda: now
        await begin(pipeline, [asked])
        has_it = do_nothing(pipeline.members[2])
        own = pipeline.members[1].node.run_in_stage_thread
        round_ = going_on(pipeline)
        await eventually(has_it)
        now = 1
        for member in pipeline.members:
            member.version[0] = 1
            member.node.run_in_stage_thread = own
        take_places(pipeline, (0, 1, 2))
        output = (await round_)["0"]
    assert [(span.version, span.start, span.end) for span in output.spans] == [(0, 0, 3), (1, 3, 12)]
    assert_true(output, asked.prompt_ids)


# Bounds, and what is told


async def test_a_member_that_ends_every_stream_is_lost_in_the_end() -> None:
    asked = requests(prompts(3))
    async with swarm((0, 1, 2)) as pipeline:
        wait_shortly_for(1, pipeline)
        times = 0

        async def refuse(stream: Any) -> None:
            nonlocal times
            await raw_wire.read(stream, DecodeMessage)
            times += 1

        await pipeline.members[1].host.serve_streams(PROTOCOL, refuse)
        found = await asyncio.to_thread(run, pipeline.engine, asked)
        assert 1 < times < 10
    assert [peer for peer, _ in pipeline.lost] == [pipeline.members[1].host.peer_id]
    for request in asked:
        assert_true(found[request.request_id], request.prompt_ids, (0, 2))


async def test_the_log_says_once_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked = requests(prompts(5))
    async with patient((0, 1, 1, 2)) as pipeline:
        await begin(pipeline, asked)
        route = pipeline.chain.route(FULL)
        assert route is not None
        await going_on_without(pipeline, pipeline.members[route.nodes[1]])
    (line,) = [record.getMessage() for record in caplog.records if "resumed" in record.getMessage()]
    tokens = sum(len(request.prompt_ids) + 2 for request in asked)
    assert line.startswith(f"5 of 5 sequences were resumed ({tokens} tokens), 0 go along fewer stages")
    assert f"node {route.nodes[1]} lost" in line


def test_a_token_whose_logits_were_not_had_is_brought_again() -> None:
    asked = requests(prompts(3))
    engine = local()
    engine.submit(asked)
    engine.step()
    logits = engine._chain.logits

    def fails(hidden_ND: torch.Tensor) -> torch.Tensor:
        engine._chain.logits = logits  # type: ignore[method-assign]
        raise EngineError("no time")

    engine._chain.logits = fails  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no time"):
        engine.step()
    assert_as_undisturbed(run(engine), asked)


def interrupted(times: int, node: int) -> PipelineEngine:
    """On every path there is; so many times a feed along any of them fails at this node."""
    prompt_paths = dict(zip(prompts(4), [FULL, (0, 1), (0, 2), (0, 2, 1)], strict=True))
    engine = local(lambda prompt: prompt_paths[tuple(prompt)])
    real, calls = engine._chain.run, 0

    def fails(feeds: Sequence[ChainFeed]) -> list[torch.Tensor | Stopped]:
        nonlocal calls
        calls += 1
        return real(feeds) if calls > times else [Stopped(StopReason.FORGOTTEN, node) for _ in feeds]

    engine._chain.run = fails  # type: ignore[method-assign]
    return engine


def test_what_fails_on_all_paths_at_once_is_one_failure() -> None:
    asked = requests(prompts(4))
    found = run(interrupted(PATIENCE, 1), asked)
    assert len({output.sampled.path for output in found.values()}) == len(asked)


def test_a_step_is_given_up_when_nothing_helps() -> None:
    run(interrupted(MAX_FAILURES, 0), requests(prompts(4)))
    engine = interrupted(MAX_FAILURES + 1, 0)
    with pytest.raises(EngineError, match="failed 17 times"):
        run(engine, requests(prompts(4)))
