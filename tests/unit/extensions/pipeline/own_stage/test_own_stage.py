"""A member's place: what was learnt in its layers is there, whoever has held them until now."""

import asyncio
import errno
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.errors import CheckpointError, PipelineError
from swarmnode.extensions.pipeline.own_stage import collected_state as learned_state
from swarmnode.extensions.pipeline.own_stage import own_stage
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaVote
from swarmnode.extensions.pipeline.rollouts.chain import ChainFeed, Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.routing import Route
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel, open_model
from swarmnode.extensions.pipeline.states import stage_checkpoints as checkpoints_module
from swarmnode.extensions.pipeline.states.holdings import HeldState, LayerHolders
from tests.unit.extensions.pipeline.members import ListFeed
from tests.unit.extensions.pipeline.own_stage.own_stages import SETTINGS, One, equal, home, together
from tests.unit.extensions.pipeline.tiny_models import LAYERS, batches, saved, tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> WholeModel:
    return open_model(str(saved(tiny_model("llama"), tmp_path_factory.mktemp("model"))), torch.float32)


async def test_after_each_step_a_neighbour_keeps_what_was_learnt_under_the_digest_that_was_told(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with home(whole, tmp_path, 2) as (found, (first, second)):
        await found.assign([[first], [second]], [2, LAYERS])
        for steps in (1, 2):
            digests = await found.step(first)
            for owner, keeper in ((first, second), (second, first)):
                copy = keeper.states._copies.kept.get(owner.peer_id)
                assert copy is not None
                assert (copy.holding.iteration, copy.holding.digest) == (steps, digests[owner.peer_id])
                newest = owner.states.holdings()[1]
                assert (newest.iteration, newest.digest) == (steps, copy.holding.digest)


async def test_what_a_dead_member_had_learnt_is_taken_from_the_copy_at_its_neighbour(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with home(whole, tmp_path, 3) as (found, (first, second, third)):
        await found.assign([[first], [second], [third]], [2, 4, LAYERS])
        await found.step(first)
        await found.step(first)
        learnt = together(first, second, third)
        found.kill(second)
        await found.assign([[first], [third]], [3, LAYERS], iteration=2)
        equal(together(first, third), learnt)
        await found.step(first)
        assert any(not torch.equal(t, learnt[name]) for name, t in third.learnt().items())


async def test_layers_whose_member_died_before_its_first_copy_begin_from_the_folder_and_the_others_go_on(
    whole: WholeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_state, "PAUSE_S", 0.01)
    async with home(whole, tmp_path, 2) as (found, (first, second)):
        await found.assign([[first], [second]], [2, LAYERS])
        await first.member.train(ListFeed(batches(True), 2))
        await second.member.wait_step(1)
        await first.own_stage.stepped()
        kept = first.learnt()
        found.kill(second)
        await found.assign([[first]], [LAYERS], iteration=1)
        assert "what was learnt in layers [2, 3, 4, 5] is lost" in caplog.text
        assert first.own_stage.version == 1
        after = first.learnt()
        equal({name: after[name] for name in kept}, kept)
        assert len(after) > len(kept)


async def test_a_stage_that_is_behind_goes_on_from_there_and_throws_no_other_layers_away(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_state, "PAUSE_S", 0.01)
    async with home(whole, tmp_path, 3) as (found, (first, second, third)):
        await found.assign([[first], [second], [third]], [2, 4, LAYERS])
        await found.step(first)
        behind = second.learnt()
        for steps in (2, 3):
            await first.member.train(ListFeed(batches(True), 2))
            for one in (first, second, third):
                await one.member.wait_step(steps)
                await one.own_stage.stepped()
        newest = together(first, third)
        found.kill(second)
        await found.assign([[first], [third]], [3, LAYERS], iteration=3)
        equal(together(first, third), newest | behind)


async def test_under_a_new_plan_the_new_neighbour_has_a_copy_before_any_step(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with home(whole, tmp_path, 3) as (found, (first, second, third)):
        await found.assign([[first], [second]], [2, LAYERS])
        await found.step(first)
        await found.assign([[first], [third]], [2, LAYERS], iteration=1)
        await first.own_stage.hand_on()
        copy = third.states._copies.kept.get(first.peer_id)
        assert copy is not None and copy.holding.iteration == 1


async def test_a_neighbour_that_takes_its_place_later_is_offered_the_copy_again(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_stage, "COPY_TRIES", 1000)
    monkeypatch.setattr(own_stage, "COPY_PAUSE_S", 0.01)
    async with home(whole, tmp_path, 2) as (found, (first, second)):
        agreed = found.plan([[first], [second]], [2, LAYERS], 0)
        await first.own_stage.take(agreed)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            handing_on = tasks.create_task(first.own_stage.hand_on())
            await second.own_stage.take(agreed)
            await handing_on
        assert second.states._copies.kept.get(first.peer_id) is not None


async def test_a_state_of_another_division_of_layers_is_taken_apart_and_put_together(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with home(whole, tmp_path, 2) as (found, (first, second)):
        await found.assign([[first], [second]], [2, LAYERS])
        await found.step(first)
        learnt = together(first, second)
        for ends in ([5, LAYERS], [1, LAYERS]):
            await found.assign([[first], [second]], ends, iteration=1)
            assert (first.own_stage.part, second.own_stage.part) != (None, None)
            assert first.own_stage.part is not None and first.own_stage.part.end_layer == ends[0]
            equal(together(first, second), learnt)
        await found.step(first)


async def test_a_newcomer_beside_a_member_has_its_weights_and_moments_and_steps_with_it(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with home(whole, tmp_path, 3) as (found, (first, second, new)):
        await found.assign([[first], [second]], [2, LAYERS])
        assert (new.own_stage.part, new.own_stage.model, new.own_stage.version) == (
            None,
            None,
            0,
        )
        await found.step(first)
        await found.assign([[first], [second, new]], [2, LAYERS], iteration=1)
        equal(new.learnt(), second.learnt())
        assert any("/" in name for name in new.learnt())
        digests = await found.step(first)
        equal(new.learnt(), second.learnt())
        assert digests[new.peer_id] == digests[second.peer_id]


async def test_who_is_left_out_of_a_plan_lets_go_and_gives_what_it_had(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with home(whole, tmp_path, 3) as (found, (first, second, third)):
        await found.assign([[first], [second]], [2, LAYERS])
        await found.step(first)
        learnt = second.learnt()
        await found.assign([[first], [third]], [2, LAYERS], iteration=1)
        assert second.own_stage.part is None
        await second.own_stage.stepped()
        equal(third.learnt(), learnt)


async def test_a_change_of_place_ends_the_steps_of_generation_that_are_under_way(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with asyncio.timeout(30), home(whole, tmp_path, 3) as (found, (first, second, third)):
        await found.assign([[first], [second]], [2, LAYERS])
        asked = asyncio.Event()

        async def never(fn: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        second.decode.run_in_stage_thread = never
        plan = first.decode.plan
        assert (
            plan is not None and first.own_stage.agreed is not None and plan == first.own_stage.agreed.digest
        )
        hidden_1D = torch.ones(1, 32)
        feed = ChainFeed(Route((0, 1), (0, 1), plan), 1, (), Segments((0,), (0,), (1,)), version=0)
        going = asyncio.create_task(first.decode.send_around(feed, hidden_1D, timeout_s=60.0))
        await asked.wait()
        await found.assign([[first], [third]], [2, LAYERS])
        stopped = await going
        assert isinstance(stopped, Stopped) and stopped.why is StopReason.OTHER_PLAN
        assert second.decode.plan is None
        await second.decode.settled.wait()


def sends_astray(one: One) -> None:
    """Its next step comes out wrong."""
    worker = one.own_stage._worker  # pyright: ignore[reportPrivateUsage]
    assert worker is not None
    honest, model = worker.apply, worker.model

    def apply(*arguments: Any, **named: Any) -> float | None:
        norm = honest(*arguments, **named)
        with torch.no_grad():
            for parameter in model.trainable().values():
                parameter.add_(1.0)
        worker.apply = honest
        return norm

    worker.apply = apply


async def test_one_of_three_whose_step_went_wrong_takes_over_the_state_of_the_others_and_names_it(
    whole: WholeModel, tmp_path: Path
) -> None:
    async with home(whole, tmp_path, 4) as (found, (first, *replicas)):
        await found.assign([[first], replicas], [2, LAYERS])
        await found.step(first)
        sends_astray(replicas[1])
        digests = await found.step(first)
        for one in replicas:
            equal(one.learnt(), replicas[0].learnt())
            assert digests[one.peer_id] == digests[replicas[0].peer_id]
            assert digests[one.peer_id] in {holding.digest for holding in one.states.holdings()}


@pytest.mark.parametrize("wrong", [0, 1])
async def test_two_that_differ_go_on_from_the_step_before_and_their_neighbours_have_that(
    whole: WholeModel, tmp_path: Path, wrong: int
) -> None:
    async with home(whole, tmp_path, 3) as (found, (first, *replicas)):
        await found.assign([[first], replicas], [2, LAYERS])
        await found.step(first)
        agreed = replicas[0].learnt()
        sends_astray(replicas[wrong])
        digests = await found.step(first)
        for one in replicas:
            equal(one.learnt(), agreed)
            newest = max(one.states.holdings(), key=lambda each: each.iteration)
            assert (newest.iteration, newest.digest) == (2, digests[one.peer_id])
        await found.step(first)
        equal(replicas[0].learnt(), replicas[1].learnt())
        assert not torch.equal(next(iter(agreed.values())), next(iter(replicas[0].learnt().values())))


async def test_a_replica_that_could_get_an_older_state_only_follows_the_one_that_has_the_newest(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with home(whole, tmp_path, 3) as (found, (first, second, new)):
        await found.assign([[first], [second]], [2, LAYERS])
        await found.step(first)
        await found.step(first)
        assemble = new.states.assemble

        async def older(*arguments: Any, at_most: int, **named: Any) -> Any:
            return await assemble(*arguments, at_most=1, **named)

        monkeypatch.setattr(new.states, "assemble", older)
        await found.assign([[first], [new, second]], [2, LAYERS], iteration=2)
        monkeypatch.undo()
        before = second.learnt()
        assert any(not torch.equal(t, before[name]) for name, t in new.learnt().items())
        await found.step(first)
        equal(new.learnt(), second.learnt())
        assert not torch.equal(next(iter(before.values())), next(iter(second.learnt().values())))


@pytest.mark.parametrize("liar", [None, 0, 1])
async def test_whoever_took_one_of_two_states_that_differ_does_not_vote_for_it(
    whole: WholeModel, tmp_path: Path, liar: int | None
) -> None:
    async with home(whole, tmp_path, 4) as (found, (first, *replicas, new)):
        await found.assign([[first], replicas], [2, LAYERS])
        await found.step(first)
        if liar is not None:
            one = replicas[liar]
            poison = {name: tensor + 1 for name, tensor in one.learnt().items()}
            part = one.own_stage.part
            assert part is not None
            one.states.publish(HeldState.of(part, 1, poison))
            one.states.publish = lambda held: None  # type: ignore[method-assign]
        await found.assign([[first], [*replicas, new]], [2, LAYERS], iteration=1)
        held = new.own_stage._held
        assert held is not None and held.is_known is (liar is None)


async def test_a_full_disk_is_told_and_the_pipeline_goes_on(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with home(whole, tmp_path, 2, replace(SETTINGS, checkpoint_every=2)) as (found, (first, second)):
        await found.assign([[first], [second]], [2, LAYERS])
        write = checkpoints_module.write_synced

        def full(path: Path, *arguments: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoints_module, "write_synced", full)
        await found.step(first)
        assert caplog.text.count("No space left") == 0, "none was due"
        await found.step(first)
        assert caplog.text.count("No space left") == 2
        assert [*first.checkpoints.states()] == []
        monkeypatch.setattr(checkpoints_module, "write_synced", write)
        await found.step(first)
        digests = await found.step(first)
        (written,) = first.checkpoints.states()
        assert (written.holding.iteration, written.holding.digest) == (
            4, digests[first.peer_id],
        )  # fmt: skip


async def test_who_leaves_writes_what_it_has_and_leaves_a_copy(whole: WholeModel, tmp_path: Path) -> None:
    async with home(whole, tmp_path, 2) as (found, (first, second)):
        await found.assign([[first], [second]], [2, LAYERS])
        await first.member.train(ListFeed(batches(True), 2))
        await second.member.wait_step(1)
        await second.own_stage.stepped()
        await second.own_stage.leave(hand_over=True)
        copy = first.states._copies.kept.get(second.peer_id)
        (written,) = second.checkpoints.states()
        assert copy is not None
        assert copy == written
        assert copy.holding in second.states.holdings()


async def test_the_whole_of_a_step_is_put_together_from_all_members_or_the_lack_is_told(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_state, "PAUSE_S", 0.01)
    async with home(whole, tmp_path, 2) as (found, (first, second)):
        await found.assign([[first], [second]], [2, LAYERS])
        await found.step(first)
        state = await first.own_stage.whole_state(1)
        assert state.iteration == 1
        equal(state.tensors, together(first, second))
        (honest,) = [one for one in second.states._own if one.holding.iteration == 1]
        endless = {
            name: tensor.new_ones(1000, 1000) for name, tensor in state.tensors.items() if ".4." in name
        }
        part = StagePart(honest.holding.first_layer, honest.holding.end_layer)
        second.states.publish(HeldState.of(part, 1, endless))
        first.states._copies.kept.clear()
        with pytest.raises(PipelineError, match="no members hold layers 0 to 5"):
            await first.own_stage.whole_state(1)
        second.states.publish(honest)
        found.kill(second)
        first.states._copies.layer_holders = LayerHolders()  # pyright: ignore[reportPrivateUsage]
        first.states._copies.kept.clear()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(PipelineError, match="no members hold layers 0 to 5"):
            await first.own_stage.whole_state(1)


async def test_a_step_that_is_still_under_way_does_not_change_the_weights_of_the_next_assignment(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with home(whole, tmp_path, 3) as (found, (data, quick, slow)):
        await found.assign([[data], [quick, slow]], [2, LAYERS])
        await found.step(data)
        go, exchange = asyncio.Event(), slow.own_stage._gradient_exchange
        combine, publish = exchange.combine, slow.own_stage._publish

        async def combine_late(*given: Any) -> Any:
            combined = await combine(*given)
            await go.wait()
            return combined

        async def publish_and_let_it_go_on(*given: Any) -> Any:
            state = await publish(*given)
            go.set()
            await asyncio.sleep(0.05)
            return state

        async def agree(digest: str, *given: Any, before: str) -> ReplicaVote:
            return ReplicaVote(agrees=True, digest=digest)

        monkeypatch.setattr(exchange, "combine", combine_late)
        monkeypatch.setattr(quick.own_stage._gradient_exchange, "compare", agree)
        monkeypatch.setattr(slow.own_stage, "_publish", publish_and_let_it_go_on)
        await data.member.train(ListFeed(batches(True), 2))
        await quick.member.wait_step(2)
        await quick.own_stage.stepped()
        await found.assign([[data], [quick, slow]], [2, LAYERS], iteration=2)
        equal(slow.learnt(), quick.learnt())


async def test_who_lost_track_takes_the_state_of_its_replicas_though_the_first_attempt_failed(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with home(whole, tmp_path, 3) as (found, (data, right, wrong)):
        await found.assign([[data], [right, wrong]], [2, LAYERS])
        await found.step(data)

        async def fails(*_: Any) -> None:
            raise CheckpointError("nobody gave it")

        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(type(wrong.member), "lost_track", property(lambda self: self is wrong.member))
            patched.setattr(wrong.own_stage, "_bring_up_to_date", fails)
            held = wrong.own_stage._held  # pyright: ignore[reportPrivateUsage]
            assert held is not None
            for parameter in held.model.trainable().values():
                parameter.add_(1.0)
            with pytest.raises(CheckpointError, match="nobody gave it"):
                await found.assign([[data], [right, wrong]], [2, LAYERS], iteration=1)
        await found.assign([[data], [right, wrong]], [2, LAYERS], iteration=1)
        equal(wrong.learnt(), right.learnt())


async def test_the_former_stage_is_out_of_memory_before_the_next_one_is_loaded(
    whole: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with home(whole, tmp_path, 2) as (found, (first, second)):
        await found.assign([[first], [second]], [2, LAYERS])
        await found.step(first)
        former, load = weakref.ref(second.own_stage.model), second.own_stage._load  # pyright: ignore
        in_memory: list[object] = []

        def look(part: Any) -> Any:
            gc.collect()
            in_memory.append(former())
            return load(part)

        monkeypatch.setattr(second.own_stage, "_load", look)
        agreed = found.plan([[first], [second]], [3, LAYERS], 1)
        await asyncio.gather(*(one.own_stage.take(agreed) for one in (first, second)))
        assert in_memory == [None]
