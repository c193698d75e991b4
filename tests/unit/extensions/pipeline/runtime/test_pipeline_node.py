"""Whole members in one process: they find each other, train, come, go, fall and come back."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.pipeline_local import LocalPipeline
from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.feeds.text_feed import TextFeed
from swarmnode.extensions.pipeline.rollouts.chain import ChainFeed, Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.routing import Route
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments
from swarmnode.extensions.pipeline.runtime.data_roles import DataRole
from swarmnode.extensions.pipeline.runtime.pipeline_node import PipelineNode
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel, open_model
from swarmnode.settings.config_layers import load_config
from swarmnode.training.adam import adam
from tests.unit.extensions.pipeline.runtime.pipeline_home import (
    KEYS,
    Gate,
    Home,
    Member,
    equal,
    home,
    text_of,
    until,
)
from tests.unit.extensions.pipeline.tiny_models import CPU, LAYERS, saved, tiny_model

NO_DATA = ["pipeline.data=false"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> WholeModel:
    return open_model(str(saved(tiny_model("llama"), tmp_path_factory.mktemp("model"))), torch.float32)


@pytest.fixture
async def three(whole: WholeModel, tmp_path: Path) -> AsyncGenerator[Home, None]:
    """A home where three members wait for each other and hold a stage each."""
    async with home(whole, tmp_path, "pipeline.wait_for_members=3", "pipeline.stages=3") as found:
        yield found


def all_weights(members: Sequence[Member]) -> dict[str, Tensor]:
    """Of all stages that these members hold."""
    return {name: tensor for member in members for name, tensor in member.weights().items()}


def trained_alone(found: Home, data_node: str, iterations: int, agents: int, waves: int) -> dict[str, Tensor]:
    """What one process learns from the same micro-batches."""
    config = load_config(environ={}, assignments=found.settings).config
    settings = StageSettings(adapter=config.policy, device=CPU)
    local = LocalPipeline.load(found.whole.folder, [LAYERS], settings, packs=found.whole.packs)
    (worker,) = local.workers
    optimizer = adam(list(worker.model.trainable().values()), config.training.learning_rate)
    source = text_of(config)
    for iteration in range(iterations):
        feed = TextFeed(source, data_node, iteration)
        for agent in range(agents):
            for wave in range(waves):
                inputs = feed.take(agent, wave, (0,))
                assert inputs is not None
                local.accumulate(inputs, feed.objective)
        (summed,) = local.take_gradients()
        worker.apply(summed.of_step(1), optimizer, max_norm=1e9)
    return {name: p.detach() for name, p in worker.model.trainable().items()}


def start(found: Home, *, settings: Sequence[str] = (), **more: object) -> list[Member]:
    """One member with data, two without: the first always drives."""
    (first,) = found.start(KEYS[0], settings=settings, **more)  # type: ignore[arg-type]
    return [first, *found.start(*KEYS[1:3], settings=[*settings, *NO_DATA], **more)]  # type: ignore[arg-type]


@pytest.mark.slow
async def test_members_that_all_stop_go_on_where_they_were_and_learn_what_one_process_learns(
    three: Home,
) -> None:
    members = start(three, settings=["node.rounds=2"])
    for member in members:
        summary = await member.ended()
        assert summary.stopped == "2 rounds are done"
    assert [member.iteration for member in members] == [2, 2, 2]
    before = all_weights(members)
    three.members.clear()

    gate = Gate(2)
    again = start(three, settings=["node.rounds=4"], role=gate.role)
    await until(lambda: all(member.layers is not None for member in again))
    assert [member.iteration for member in again] == [2, 2, 2]
    equal(all_weights(again), before)

    gate.iterations = 4
    for member in again:
        await member.ended()
    assert [member.iteration for member in again] == [4, 4, 4]
    equal(all_weights(again), trained_alone(three, again[0].peer_id, 4, agents=2, waves=2), atol=1e-4)


@pytest.mark.slow
async def test_a_newcomer_takes_over_what_one_that_left_had_learnt(three: Home) -> None:
    gate = Gate(2)
    members = start(three, role=gate.role)
    await until(lambda: [member.iteration for member in members] == [2, 2, 2])
    learnt = all_weights(members)
    going = next(member for member in members if member.stage == 1)
    layers = going.layers
    await three.leave(going)
    rest = [member for member in members if member is not going]
    await until(lambda: covered(rest) and layers not in [member.layers for member in rest])
    equal(all_weights(rest), learnt)

    (newcomer,) = three.start(KEYS[3], settings=NO_DATA, role=gate.role)
    everybody = [*rest, newcomer]
    await until(lambda: newcomer.layers is not None and covered(everybody))
    assert newcomer.iteration == 2
    equal(all_weights(everybody), learnt)
    assert newcomer.weights()

    gate.iterations = 4
    await until(lambda: [member.iteration for member in everybody] == [4, 4, 4])
    equal(all_weights(everybody), trained_alone(three, members[0].peer_id, 4, agents=2, waves=2), atol=1e-4)


def covered(members: Sequence[Member]) -> bool:
    """Whether these members hold all layers, each of them once."""
    held = [layer for member in members if member.layers for layer in range(*member.layers)]
    return sorted(held) == list(range(LAYERS)) and all(member.layers for member in members)


async def test_what_a_member_that_fell_had_learnt_comes_from_the_copy_at_its_neighbour(three: Home) -> None:
    gate = Gate(2)
    members = start(three, role=gate.role)
    await until(lambda: [member.iteration for member in members] == [2, 2, 2])
    await until(lambda: all(copies_of(member, members) for member in members))
    learnt = all_weights(members)
    fallen = next(member for member in members if member.stage == 2)
    await three.kill(fallen)
    rest = [member for member in members if member is not fallen]
    await until(lambda: covered(rest))
    equal(all_weights(rest), learnt)
    gate.iterations = 3
    await until(lambda: [member.iteration for member in rest] == [3, 3])


async def test_generation_does_not_wait_for_a_member_that_the_others_have_given_up(three: Home) -> None:
    gate = Gate(1)
    members = start(three, role=gate.role)
    await until(lambda: [member.iteration for member in members] == [1, 1, 1])
    data, away = members[0], next(member for member in members if member.stage == 2)
    agreed = data.node.own_stage.agreed
    assert agreed is not None
    three.network.partition([[away.host]])
    path = tuple(agreed.plan.instance.stages[stage][0] for stage in (0, 2))
    feed = ChainFeed(Route((0, 2), path, agreed.digest), 1, (), Segments((0,), (0,), (1,)), version=1)
    async with asyncio.timeout(60.0):
        found = await data.node.decode.send_around(feed, torch.ones(1, 32), timeout_s=600.0)
    assert isinstance(found, Stopped) and found.why in (StopReason.LOST, StopReason.OTHER_PLAN)


def copies_of(member: Member, members: Sequence[Member]) -> bool:
    """Whether another one keeps a copy of what this one has learnt by now."""
    kept = [other.node.own_stage.states._copies.kept.get(member.peer_id) for other in members]
    return any(copy is not None and copy.holding.iteration == member.iteration for copy in kept)


@pytest.mark.slow
async def test_a_member_that_was_cut_off_comes_back_and_trains_with_the_others(three: Home) -> None:
    members = start(three)
    await until(lambda: covered(members) and all(member.iteration >= 1 for member in members))
    away = next(member for member in members if member.stage == 2)
    rest = [member for member in members if member is not away]
    three.network.partition([[away.host]])
    reached = away.iteration
    await until(lambda: covered(rest) and all(member.iteration >= reached + 2 for member in rest), 60.0)
    three.network.heal()
    await until(lambda: covered(members), 60.0)
    together = max(member.iteration for member in members)
    await until(lambda: all(member.iteration >= together + 2 for member in members))


async def test_two_data_nodes_train_one_stage_to_the_same_weights(whole: WholeModel, tmp_path: Path) -> None:
    gate = Gate(2)
    async with home(whole, tmp_path, "pipeline.wait_for_members=3", "pipeline.stages=2") as found:
        first, second = found.start(*KEYS[:2], role=gate.role)
        (third,) = found.start(KEYS[2], settings=NO_DATA, role=gate.role)
        members = [first, second, third]
        await until(lambda: [member.iteration for member in members] == [2, 2, 2])
        assert [member.stage for member in members] == [0, 0, 1]
        assert first.node.announcement().observed.keys() == {third.peer_id}, (
            "each data node sees who passes its own on"
        )
        equal(first.weights(), second.weights())
        start = StageSettings(adapter=first.node.parts.config.policy, device=CPU)
        untrained = LocalPipeline.load(whole.folder, [LAYERS], start, packs=whole.packs).workers[0].model
        moved = [
            (tensor - untrained.trainable()[name]).abs().max()
            for name, tensor in all_weights(members).items()
        ]
        assert all(moved)
        gate.iterations = 3
        await until(lambda: [member.iteration for member in members] == [3, 3, 3])
        equal(first.weights(), second.weights())


@pytest.mark.slow
async def test_a_data_node_dies_and_a_step_is_soon_taken_on_as_many_tokens_as_before(
    whole: WholeModel, tmp_path: Path
) -> None:
    settings = ("pipeline.wait_for_members=6", "pipeline.stages=3", "pipeline.skip=0.25")
    async with home(whole, tmp_path, *settings) as found:
        gate = Gate(1)
        members = found.start(*KEYS[:6], role=gate.role)
        await until(lambda: all(member.iteration == 1 for member in members))
        data = [member for member in members if member.stage == 0]
        assert len(data) == 2
        await found.kill(data[0])
        rest = [member for member in members if member is not data[0]]
        await until(lambda: sum(member.stage == 0 for member in rest) == 2)
        # Steps find who took its place without anything to train on, as long as that takes on this machine.
        gate.iterations = steps = 200
        await until(lambda: any(gate.tokens[step] == gate.tokens[0] > 0 for step in range(1, steps)))


async def test_a_member_that_waits_for_others_stops_at_once(three: Home) -> None:
    (alone,) = three.start(KEYS[0])
    await alone.up.wait()
    assert (await three.leave(alone)).stopped == "stopped on request"


async def test_a_member_that_is_too_small_for_a_stage_says_so_and_shows_its_page_as_any_node(
    three: Home, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    members = start(three)
    await until(lambda: all(member.layers is not None for member in members))
    (small,) = three.start(KEYS[3], settings=NO_DATA, free_bytes=1000)
    await until(lambda: "no stage for us; the smallest stage takes" in caplog.text)
    small.node.show_page("http://127.0.0.1:1/")
    await until(lambda: "smallest stage" in small.node.status.phase.detail)
    assert small.node.status.page == "http://127.0.0.1:1/"
    members[0].node.show_page("http://127.0.0.1:2/")
    assert members[0].node.status.page == "http://127.0.0.1:2/"


async def test_a_data_node_that_waits_for_a_plan_stops_at_once(three: Home) -> None:
    """The others have fallen, and nobody can hold the model alone."""
    members = start(three, free_bytes=three.bytes_of(layers=4))
    await until(lambda: all(member.iteration >= 1 for member in members))
    data = members[0]
    for member in members[1:]:
        await three.kill(member)
    await until(lambda: data.node.membership.members() == (data.peer_id,))
    assert data.summary is None
    assert (await three.leave(data)).stopped == "stopped on request"


async def test_a_member_that_fails_says_why(three: Home) -> None:
    def none(node: PipelineNode) -> DataRole:
        raise ConfigError("the text is gone")

    first, second, third = start(three, role=none)
    await until(lambda: first.error is not None)
    assert isinstance(first.error, ExceptionGroup)
    assert first.error.subgroup(ConfigError) is not None
    assert second.error is None and third.error is None
