"""The learning half of a data node: its rounds, its groups along their paths, its checkpoints."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.pipeline_local import LocalPipeline
from swarmnode.errors import CheckpointError, PipelineError, StorageError
from swarmnode.extensions.pipeline.execution.member_records import Feed, IterationReport
from swarmnode.extensions.pipeline.runtime.data_node import IterationPlan
from swarmnode.extensions.pipeline.runtime.pipeline_learner import PipelineLearner
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.packed_state import unpack_state
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel, load_tokenizer, open_model
from swarmnode.extensions.pipeline.states.holdings import Assembled
from swarmnode.extensions.pipeline.states.stage_checkpoints import single_machine_tensors
from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.node.learner import Overlap
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.rollout.engine import Request
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.tasks.loader import load_tasks
from swarmnode.testing import FakeEngine
from swarmnode.training.adam import adam
from swarmnode.training.checkpoints.checkpoint import check_has_adapter
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters, TrainReport
from swarmnode.types import ExampleKey, RolloutGroup
from tests.unit.extensions.pipeline.tiny_models import CPU

SETTINGS = [
    "rollout.groups=3",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "rollout.mode='sync'",
    "training.learning_rate=1e-2",
    "training.grad_clip=1000",
    "policy.lora_rank=4",
    "pipeline.name=attic",
]
PATHS: Mapping[int, StagePath] = {2: (0, 1), 3: (0, 1)}
"""By agent: others start elsewhere."""
WAVES = 8
EOS = 257
Start = Callable[..., PipelineLearner]


def answer(request: Request) -> Sequence[int]:
    """Half of the answers are right, the others as long as it takes."""
    prompt = bytes(token for token in request.prompt_ids if token < 256)
    luck = hashlib.sha256(request.request_id.encode()).digest()[0]
    text = prompt.split()[-1].rstrip(b"=")[::-1] if luck % 2 else b"x" * (1 + luck // 2 % 5)
    return (*text, EOS)


class LocalDrive:
    """A pipeline in this process, in place of the one that the members are."""

    peer_id = "me"
    parts: Any = None

    def __init__(self, whole: WholeModel, config: Config) -> None:
        settings = StageSettings(adapter=config.policy, device=CPU)
        self.local = LocalPipeline.load(whole.folder, [1, 2], settings, packs=whole.packs)
        self.optimizers = [
            adam(list(worker.model.trainable().values()), config.training.learning_rate)
            for worker in self.local.workers
        ]
        self.iteration = 0
        self.stopped = False
        self.missing = False
        """Whether a member does not tell its state."""
        self.courses: list[IterationPlan] = []

    def train(self, feed: Callable[[IterationPlan], Feed]) -> IterationReport | None:
        if self.stopped:
            return None
        self.courses.append(IterationPlan(self.iteration, PATHS, WAVES))
        found, weight, count = feed(self.courses[-1]), 0, 0
        for wave in range(WAVES):
            for agent, path in PATHS.items():
                inputs = found.take(agent, wave, path)
                if inputs is not None:
                    self.local.accumulate(inputs, found.objective)
                    weight, count = weight + inputs.tokens, count + 1
        norm = None
        for worker, optimizer, one in zip(
            self.local.workers, self.optimizers, self.local.take_gradients(), strict=True
        ):
            norm = worker.apply(one.of_step(1), optimizer, max_norm=1000.0)
        self.iteration += 1
        return IterationReport(self.iteration - 1, micro_batches=count, tokens=weight, grad_norm=norm)

    def whole_state(self) -> Assembled:
        if self.missing:
            raise PipelineError("nobody holds layer 1", hint="wait for the next plan")
        return Assembled(self.tensors(), self.iteration)

    def stop(self) -> None:
        self.stopped = True

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for worker, optimizer in zip(self.local.workers, self.optimizers, strict=True):
            found |= unpack_state(worker.state(optimizer).data)
        return found

    def load(self, tensors: dict[str, Tensor], iteration: int) -> None:
        for worker, optimizer in zip(self.local.workers, self.optimizers, strict=True):
            worker.load_state(tensors, optimizer)
            worker.iteration = worker.version = iteration
        self.iteration = iteration


@pytest.fixture(scope="module")
def whole(quick_model: Path) -> WholeModel:
    return open_model(str(quick_model), torch.float32)


@pytest.fixture
def config() -> Config:
    return load_config(environ={}, assignments=SETTINGS).config


@pytest.fixture
def store(whole: WholeModel, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "quick")


@pytest.fixture
def start(whole: WholeModel, config: Config, store: CheckpointStore) -> Start:
    """A learner over the checkpoints of this test; each call is a new start of the node."""

    def build(drive: LocalDrive, config: Config = config) -> PipelineLearner:
        tokenizer, ends = load_tokenizer(whole)
        own_stage = SimpleNamespace(max_tokens=64, stage=StageSettings(adapter=config.policy, device=CPU))
        drive.parts = SimpleNamespace(config=config, whole=whole, own_stage=own_stage)
        return PipelineLearner(
            drive,
            FakeEngine(answer),
            Renderer(tokenizer, ends),
            {task.name: task for task in load_tasks(("rev",))},
            store,
            seed=3,
            choose_path=lambda prompt: (0, 1),
        )

    return build


@pytest.fixture
def drive(whole: WholeModel, config: Config) -> LocalDrive:
    return LocalDrive(whole, config)


def single_machine(whole: WholeModel, config: Config, store: CheckpointStore) -> tuple[PolicyLearner, Policy]:
    """It learns from own groups alone, as the pipeline does, which has no book."""
    base = load_base_model(str(whole.folder), config.policy)
    policy = Policy(base, config.policy, seed=0)
    learner = PolicyLearner(
        config,
        policy,
        FakeEngine(answer),
        Renderer(base.tokenizer, base.eos_token_ids),
        {task.name: task for task in load_tasks(("rev",))},
        store,
        author="me",
        seed=3,
        overlap=Overlap(on=False, sleep=False, reason="as set"),
    )
    return learner, policy


def asked(groups: Sequence[RolloutGroup]) -> set[ExampleKey]:
    return {group.example.key for group in groups}


def learnt(
    learner: PipelineLearner, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup] = ()
) -> TrainReport:
    report = learner.train(own, external)
    assert report is not None
    return report


def adapter_of(drive: LocalDrive) -> dict[str, Tensor]:
    """The learned state without Adam's moments."""
    return {name: value for name, value in drive.whole_state().tensors.items() if "/" not in name}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


def test_a_round_is_asked_scored_and_learnt_in_one_step(start: Start, drive: LocalDrive) -> None:
    learner = start(drive)
    rollouts = learner.rollouts(1)
    assert rollouts.complete and len(rollouts.groups) == 3
    assert {group.policy_version for group in rollouts.groups} == {0}
    report = learnt(learner, rollouts.groups)
    assert report.own_groups + report.zero_advantage_own == 3 and report.own_groups > 0
    assert (report.optimizer_steps, learner.policy_version) == (1, 1)
    assert report.loss is not None and report.grad_norm is not None and report.grad_norm > 0
    assert report.tokens > 0
    assert drive.courses == [IterationPlan(0, PATHS, WAVES)]


def test_the_engine_is_told_the_version_and_no_weights(start: Start, drive: LocalDrive) -> None:
    learner = start(drive)
    learner.train(learner.rollouts(1).groups, [])
    engine = learner.engine
    assert isinstance(engine, FakeEngine) and engine.updates == []
    learner.use_newest_policy()
    (update,) = engine.updates
    assert (update.version, dict(update.tensors)) == (1, {})
    learner.use_newest_policy()
    assert len(engine.updates) == 1, "the same one is not told twice"
    assert {group.policy_version for group in learner.rollouts(2).groups} == {1}


def test_own_and_strangers_groups_are_learnt_together(start: Start, drive: LocalDrive) -> None:
    learner = start(drive)
    groups = learner.rollouts(1).groups
    report = learnt(learner, groups[:1], groups[1:])
    assert report.own_groups + report.zero_advantage_own == 1
    assert report.external_groups + report.zero_advantage_external == 2


def test_of_strangers_a_pipeline_learns_the_successes_and_by_sapo_everything(
    start: Start, drive: LocalDrive, config: Config
) -> None:
    assert config.exchange.rule == "book"
    groups = [group for group in start(drive).rollouts(1).groups if group.has_gradient]
    foreign = [replace(group, author="stranger") for group in groups]
    right = [ids for group in groups for ids in better_than_their_group(group)]

    def trained_on(rule: str) -> int:
        exchange = config.exchange.model_copy(update={"rule": rule})
        learner = start(drive, config.model_copy(update={"exchange": exchange}))
        return learnt(learner, (), foreign).tokens

    tokens = sum(len(ids) for ids in right)
    everything = sum(len(c.token_ids) for group in groups for c in group.completions)
    assert (trained_on("book"), trained_on("sapo")) == (tokens, everything)
    assert tokens < everything


def better_than_their_group(group: RolloutGroup) -> list[tuple[int, ...]]:
    mean = group.reward_mean
    assert mean is not None
    ids = [completion.token_ids for completion in group.completions]
    return [each for each, reward in zip(ids, group.rewards, strict=True) if reward and reward > mean]


def test_a_checkpoint_of_a_pipeline_is_one_of_a_single_machine_and_learns_on_as_one(
    start: Start, drive: LocalDrive, whole: WholeModel, config: Config, store: CheckpointStore
) -> None:
    learner = start(drive)
    first = learner.rollouts(1).groups
    learner.train(first, [])
    assert learner.save(Counters(round=1, tokens=99)).result() == "round-00000001"
    written = store.latest()
    assert written is not None
    assert written.state.settings["rollout.max_tokens"] == config.rollout.max_tokens

    alone, policy = single_machine(whole, config, store)
    resumed = alone.resume()
    assert resumed is not None
    assert (resumed.counters.round, resumed.counters.tokens, policy.version) == (1, 99, 1)
    weights = adapter_of(drive)
    same(dict(policy.adapter()), dict(weights))

    learner.use_newest_policy()
    second = learner.rollouts(2).groups
    assert asked(alone.rollouts(2).groups) == asked(second), "the examples go on where they stopped"
    learner.train(second, [])
    alone.train(second, [])
    assert policy.version == 2
    same(dict(policy.adapter()), adapter_of(drive), atol=1e-4)
    moved = max((tensor - weights[name]).abs().max() for name, tensor in policy.adapter().items())
    assert moved > 1e-3


def test_a_pipeline_goes_on_from_a_single_machines_checkpoint(
    start: Start, drive: LocalDrive, whole: WholeModel, config: Config, store: CheckpointStore
) -> None:
    alone, policy = single_machine(whole, config, store)
    seen = alone.rollouts(1).groups
    alone.train(seen, [])
    alone.save(Counters(round=1)).result()
    latest = store.latest()
    assert latest is not None
    found = single_machine_tensors(latest.folder)
    drive.load(found.tensors, found.iteration)
    same(adapter_of(drive), dict(policy.adapter()))

    learner = start(drive)
    resumed = learner.resume()
    assert resumed is not None and resumed.counters.round == 1
    assert learner.policy_version == learner.engine.policy_version == 1
    alone.use_newest_policy()
    both = learner.rollouts(2).groups
    assert asked(both) == asked(alone.rollouts(2).groups)
    assert not asked(both) & asked(seen)
    learner.train(both, [])
    alone.train(both, [])
    same(adapter_of(drive), dict(policy.adapter()), atol=1e-4)


def test_without_a_checkpoint_there_is_nothing_to_resume(start: Start, drive: LocalDrive) -> None:
    assert start(drive).resume() is None


def test_a_data_node_that_is_new_in_a_pipeline_goes_on_with_its_rounds(
    start: Start, drive: LocalDrive
) -> None:
    drive.iteration = 5
    resumed = start(drive).resume()
    assert resumed is not None and resumed.counters.round == 5


def test_nothing_is_learnt_once_it_is_stopped(start: Start, drive: LocalDrive) -> None:
    learner = start(drive)
    groups = learner.rollouts(1).groups
    learner.interrupt()
    assert drive.stopped
    assert learner.train(groups, []) is None
    assert drive.iteration == 0
    assert not learner.rollouts(2).complete


def test_an_iteration_that_is_begun_again_reports_its_last_try(
    start: Start, drive: LocalDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another plan, what was trained before it counts for nothing."""
    learner = start(drive)
    groups = learner.rollouts(1).groups
    train = drive.train

    def twice(feed: Callable[[IterationPlan], Feed]) -> IterationReport | None:
        given_up = feed(IterationPlan(0, PATHS, WAVES))
        assert given_up.take(2, 0, PATHS[2]) is not None
        return train(feed)

    monkeypatch.setattr(drive, "train", twice)
    report = learnt(learner, groups)
    assert report.own_groups + report.zero_advantage_own == 3
    assert report.optimizer_steps == 1 and report.loss is not None


def test_a_checkpoint_that_cannot_be_collected_is_a_failed_save_and_not_the_end(
    start: Start, drive: LocalDrive, store: CheckpointStore
) -> None:
    learner = start(drive)
    learner.train(learner.rollouts(1).groups, [])
    drive.missing = True
    failed = learner.save(Counters(round=1)).exception()
    assert isinstance(failed, StorageError)
    assert "nobody holds layer 1" in failed.message and failed.hint == "wait for the next plan"
    assert store.latest() is None
    drive.missing = False
    assert learner.save(Counters(round=1)).result() == "round-00000001"


def test_with_full_training_a_checkpoint_has_the_rounds_and_no_weights(
    start: Start, drive: LocalDrive, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = start(drive)
    learner.train(learner.rollouts(1).groups, [])
    monkeypatch.setattr(drive, "whole_state", lambda: Assembled({}, drive.iteration))
    learner.save(Counters(round=1, tokens=99)).result()
    resumed = start(drive).resume()
    assert resumed is not None and resumed.counters.tokens == 99
    latest = store.latest()
    assert latest is not None
    with pytest.raises(CheckpointError, match="trains all weights"):
        check_has_adapter(latest)


def test_closing_ends_the_engine_and_waits_for_the_checkpoint(
    start: Start, drive: LocalDrive, store: CheckpointStore
) -> None:
    learner = start(drive)
    learner.train(learner.rollouts(1).groups, [])
    written = learner.save(Counters(round=1))
    learner.close()
    assert written.done() and store.latest() is not None
    assert isinstance(learner.engine, FakeEngine) and learner.engine.closed
