"""Rollouts made while a stage waits: an engine and a clock that only tests have, exchanges that are real."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from swarmnode.errors import ConfigError, ModelError, TaskError
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.extensions.pipeline.execution.stage_queue import WorkTimes
from swarmnode.extensions.pipeline.idle import idle_sharing
from swarmnode.extensions.pipeline.idle.idle_sharing import (
    IdleModel,
    IdleSharing,
    load_idle_model,
    sharing_exchange,
)
from swarmnode.extensions.pipeline.runtime.pipeline_settings import check
from swarmnode.extensions.pipeline.runtime.run_pipeline import left_for_stage
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Host
from swarmnode.network.memory_network import MemoryHost
from swarmnode.rollout.engine import Output, Request
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config_layers import load_config
from swarmnode.tasks.task import Task
from swarmnode.testing import FakeEngine, FakeTask, MemoryNetwork
from swarmnode.types import Example

STEP_S = 0.004
CONFIG = load_config(environ={}, assignments=["rollout.groups=2", "rollout.group_size=4"]).config


class Letters:
    """A renderer of one token per character."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token).decode()

    def encode_completion(self, text: str, finish: str) -> tuple[int, ...]:
        return tuple(text.encode()) or (0,)

    def encode_turns(self, turns: Sequence[object], finish: str) -> tuple[tuple[int, ...], tuple[()]]:
        raise AssertionError("nobody answers back here")


class Calculator(FakeEngine):
    """Right every other time. Its steps move the clock of the stage."""

    def __init__(self) -> None:
        super().__init__(self._calculated)
        self.now_s = 100.0

    def step(self) -> Sequence[Output]:
        outputs = super().step()
        self.now_s += STEP_S
        return outputs

    def _calculated(self, request: Request) -> tuple[int, ...]:
        a, b = bytes(request.prompt_ids).decode().removesuffix("=").split("+")
        wrong = (request.sampling.seed or 0) % 2
        return (*str(int(a) + int(b) + wrong).encode(), 0)


class Stage:
    """A member whose stage waits, a swarm beside it, and one who listens there."""

    def __init__(self, task: Task | None = None, network: MemoryNetwork | None = None) -> None:
        self.network = network or MemoryNetwork()
        self.key, self.listener_key = NodeKey.generate(), NodeKey.generate()
        self.host = self.network.host(self.key.peer_id)
        self.listener_host = self.network.host(self.listener_key.peer_id)
        self.engine = Calculator()
        self.exchanges: list[Exchange] = []
        self.times = WorkTimes()
        renderer = cast(Renderer, Letters())
        self.model = IdleModel(self.engine, renderer, "fake", 1, 8, 32, size_bytes=1000)
        self.tasks: dict[str, Task] = {"sum": task or FakeTask()}
        author = self.key.peer_id
        self.idle = IdleSharing(
            self.model,
            self._exchange,
            self.tasks,
            CONFIG,
            author=author,
            seed=0,
            clock=lambda: self.engine.now_s,
        )
        self.idle.rehearse()
        self.idle.follow(self.times)

    def _exchange(self, host: Host) -> Exchange:
        self.exchanges.append(sharing_exchange(CONFIG, self.key, self.tasks, self.model)(host))
        return self.exchanges[-1]

    def listener(self) -> Exchange:
        return Exchange(
            self.listener_host,
            self.listener_key,
            {"sum": FakeTask()},
            encode=Letters().encode_completion,
            prompt_ids=Letters().prompt_ids,
            settings=ExchangeSettings(patience_s=1.0),
            model_family="fake",
            model_size=1,
            rng=random.Random(0),
        )

    def wait(self, gap_s: float = 0.3, *, after_work_s: float = 60.0) -> int:
        """Tokens generated in a gap after so much work of the stage."""
        self.work(after_work_s)
        before = self.idle.stats.tokens
        self.idle.run(self.engine.now_s + gap_s, lambda: False)
        return self.idle.stats.tokens - before

    def work(self, seconds: float) -> None:
        self.times.busy_s += seconds
        self.engine.now_s += seconds


async def connected(one: MemoryHost, other: MemoryHost) -> None:
    await one.connect((await other.addresses())[0])


async def test_what_a_stage_generates_while_it_waits_others_train_on() -> None:
    stage = Stage()
    async with stage.host, stage.listener_host, stage.listener() as listener:
        await connected(stage.host, stage.listener_host)
        await stage.idle.share(stage.host)
        assert stage.wait() > 50
        await stage.idle.share_finished()
        groups = await listener.collect(4, 0, 5.0)
        assert [group.author for group in groups] == [stage.key.peer_id] * 2
        assert all({0.0, 1.0} == set(group.rewards) for group in groups)
        stats = stage.idle.exchange_stats
        assert stats is not None and stats.published > 2
        await stage.idle.rest()


async def test_a_member_that_rests_generates_nothing_and_goes_on_afterwards_on_another_exchange() -> None:
    stage = Stage()
    async with stage.host:
        assert stage.wait() == 0
        await stage.idle.share(stage.host)
        await stage.idle.share(stage.host)
        assert stage.wait() > 0
        await stage.idle.rest()
        assert stage.wait() == 0
        await stage.idle.share_finished()
        assert stage.idle.exchange_stats is None
        await stage.idle.share(stage.host)
        await stage.idle.share_finished()
        first, second = stage.exchanges
        assert first.stats().published == 0
        assert second.stats().published > 0
        await stage.idle.rest()


async def test_others_headers_are_heard_and_their_groups_are_not_fetched() -> None:
    stage = Stage()
    other = Stage(network=stage.network)
    async with stage.host, other.host:
        await connected(stage.host, other.host)
        await stage.idle.share(stage.host)
        await other.idle.share(other.host)
        other.wait()
        await other.idle.share_finished()
        for _ in range(200):
            await asyncio.sleep(0)
        stats = stage.exchanges[0].stats()
        assert stats.headers_accepted > 0
        assert (stats.fetched, other.exchanges[0].stats().served) == (0, 0)
        await other.idle.rest()
        await stage.idle.rest()


async def test_a_broken_judge_ends_the_rollouts_and_not_the_pipeline() -> None:
    class Broken(FakeTask):
        def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
            raise TaskError("the judge has left")

    stage = Stage(Broken())
    async with stage.host:
        await stage.idle.share(stage.host)
        assert stage.wait() > 0
        await stage.idle.share_finished()
        assert "judge has left" in (stage.idle.failure or "")
        assert stage.wait() == 0
        await stage.idle.rest()


async def test_groups_wait_for_a_slow_judge_up_to_a_bound_and_others_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_sharing, "MOST_WAITING", 3)
    stage = Stage()
    async with stage.host:
        await stage.idle.share(stage.host)
        assert stage.wait(1.0) > 1000
        assert stage.idle.dropped == stage.idle.stats.groups - 3 > 0
        await stage.idle.share_finished()
        stats = stage.exchanges[0].stats()
        assert stats.published + sum(stats.unpublished.values()) == 3
        await stage.idle.rest()


async def test_the_share_is_of_the_time_that_the_stage_waited() -> None:
    stage = Stage()
    async with stage.host:
        await stage.idle.share(stage.host)
        assert stage.wait(after_work_s=0.0) == 0, "whoever has not worked has nothing to delay"
        assert stage.idle.used_share is None
        assert stage.wait(1.0) > 1000
        assert stage.idle.used_share == pytest.approx(1.0, abs=0.01)
        stage.engine.now_s += 1.0
        assert stage.idle.used_share == pytest.approx(0.5, abs=0.01)
        stage.work(30.0)
        assert stage.idle.used_share == pytest.approx(0.5, abs=0.01)
        await stage.idle.rest()


async def test_what_others_generate_through_the_stage_is_work_and_our_rehearsal_is_not() -> None:
    stage = Stage()
    stage.times.called_s = 60.0  # of the rehearsal
    stage.idle.follow(stage.times)
    async with stage.host:
        await stage.idle.share(stage.host)
        assert stage.wait(after_work_s=0.0) == 0
        stage.times.called_s += 60.0
        assert stage.wait(after_work_s=0.0) > 0
        await stage.idle.rest()


def test_closing_it_closes_the_engine() -> None:
    stage = Stage()
    stage.idle.close()
    assert stage.engine.closed


def test_a_model_that_is_none_is_refused_by_the_name_of_its_setting() -> None:
    config = load_config(environ={}, assignments=["pipeline.idle_model=./nowhere"]).config
    with pytest.raises(ModelError, match=r"pipeline.idle_model = ./nowhere .*no such folder") as caught:
        load_idle_model("./nowhere", config)
    assert "pipeline.idle_model" in caught.value.hint


def test_what_a_model_takes_is_known_and_its_answers_fit_it(quick_model: Path) -> None:
    model = load_idle_model(str(quick_model), CONFIG)
    weights = 4 * model.parameters
    assert 2 * weights < model.size_bytes < 100 * 2**20
    limit = model.engine.capabilities.max_length
    assert (model.max_tokens, model.longest_prompt) == (limit // 2, limit - limit // 2)
    model.engine.close()


def test_the_stage_gets_what_the_idle_model_leaves() -> None:
    assert left_for_stage(5000, None) == 5000
    assert left_for_stage(5000, Stage().idle) == 4000
    with pytest.raises(ModelError, match=r"pipeline\.idle_model takes"):
        left_for_stage(1000, Stage().idle)


def test_rollouts_for_nobody_are_refused() -> None:
    off = ["pipeline.idle_model=tiny", "exchange.enabled=false"]
    with pytest.raises(ConfigError, match="for nobody"):
        check(load_config(environ={}, assignments=off).config)
    check(load_config(environ={}, assignments=off[:1]).config)
