"""A member's parts out of its settings: what it refuses, plans with, and takes along from an earlier run."""

import logging
from pathlib import Path

import pytest
import torch

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.plans.plan_settings import plan_terms
from swarmnode.extensions.pipeline.runtime.pipeline_settings import (
    MOST_WAVES,
    TEXT_WAVES,
    check,
    check_closed,
    holds_data,
    membership_settings,
    plan_settings,
    waves_of,
)
from swarmnode.extensions.pipeline.runtime.run_pipeline import _earlier, _put_aside
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel, open_model
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints
from swarmnode.identity.node_key import NodeKey
from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.training.checkpoints.checkpoint import Waiting, take_snapshot
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters
from swarmnode.training.trainer import Trainer


def config_of(*settings: str) -> Config:
    return load_config(
        environ={}, assignments=["pipeline.name='big'", "rollout.max_tokens=64", *settings]
    ).config


@pytest.fixture(scope="module")
def whole(quick_model: Path) -> WholeModel:
    return open_model(str(quick_model), torch.float32)


def test_waves_hold_a_round_of_full_answers_to_the_longest_prompts() -> None:
    """32 answers, of which four fit into a micro-batch."""
    answers = ("rollout.groups=4", "rollout.group_size=8", "rollout.max_tokens=100")
    sizes = (*answers, "rollout.max_prompt_tokens=28", "pipeline.slots=2", "training.micro_batch_tokens=512")
    few = ("exchange.local_groups=1", "exchange.external_groups=1")
    assert waves_of(config_of(*sizes, *few)) == 4
    assert waves_of(config_of(*sizes, *few, "rollout.max_tokens=101")) == 6, "three fit, not four"
    assert waves_of(config_of(*sizes, few[0], "exchange.external_groups=9")) == 10
    assert waves_of(config_of(*sizes, *few, "training.micro_batch_tokens=16")) == 16, "each travels alone"
    assert waves_of(config_of(*sizes, *few, "training.micro_batch_tokens=100000")) == 1


def test_waves_are_bounded() -> None:
    many = "rollout.groups=1000"
    assert waves_of(config_of(many)) == MOST_WAVES
    assert waves_of(config_of("pipeline.text='/texts'", many)) == TEXT_WAVES


def test_a_micro_batch_that_no_message_takes_is_refused_before_anything_starts(whole: WholeModel) -> None:
    with pytest.raises(ConfigError, match="more than 67,108,864") as refused:
        plan_settings(config_of("training.micro_batch_tokens=1048576"), whole)
    assert "lower training.micro_batch_tokens to" in str(refused.value.hint)


def test_who_has_no_text_at_hand_does_not_claim_to_hold_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert holds_data(config_of()) and holds_data(config_of(f"pipeline.text='{tmp_path}'"))
    assert not holds_data(config_of("pipeline.data=false"))
    assert not holds_data(config_of(f"pipeline.text='{tmp_path / 'gone'}'"))
    assert "which is not here" in caplog.text


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("node.policies=2", "node.policies"),
        ("policy.quantization='nf4'", "policy.quantization"),
        ("rollout.engine=vllm", "rollout.engine"),
        ("rollout.engine=mymodule:ENGINE", "rollout.engine"),
        ("node.learner=mymodule:Curious", "node.learner"),
        ("training.kl_coef=0.1", "training.kl_coef"),
        ("training.warmup_rounds=2", "training.warmup_rounds"),
        ("training.inner_epochs=2", "training.inner_epochs"),
    ],
)
def test_what_a_pipeline_does_not_have_is_refused_by_its_name(setting: str, key: str) -> None:
    check(config_of())
    with pytest.raises(ConfigError, match=key) as caught:
        check(config_of(setting))
    assert key in caught.value.hint


@pytest.mark.parametrize(
    "setting",
    [
        "pipeline.skip=0.25", "pipeline.slots=5", "pipeline.stages=2", "training.micro_batch_tokens=64",
        "pipeline.trainable='full'", "policy.lora_rank=3",
    ],
)  # fmt: skip
def test_members_with_another_setting_of_the_plan_tell_it(whole: WholeModel, setting: str) -> None:
    ours = plan_terms(plan_settings(config_of(), whole), whole.fingerprint)
    theirs = plan_terms(plan_settings(config_of(setting), whole), whole.fingerprint)
    assert ours.keys() == theirs.keys() and ours != theirs


@pytest.mark.parametrize("setting", ["pipeline.data=false", "limits.memory_gb=1", "node.rounds=3"])
def test_what_is_a_members_own_affair_does_not_divide_the_members(whole: WholeModel, setting: str) -> None:
    assert plan_settings(config_of(setting), whole) == plan_settings(config_of(), whole)


def test_a_plan_counts_the_bytes_of_a_token_as_it_travels(whole: WholeModel) -> None:
    for dtype in ("float32", "bfloat16"):
        planned = plan_settings(config_of(f"policy.dtype='{dtype}'"), whole)
        assert planned.token_bytes == 2 * whole.card.hidden
        assert planned.model.layers == whole.layers


def test_members_are_whoever_comes_unless_they_are_named() -> None:
    key = NodeKey(bytes([7]) * 32)
    everybody = membership_settings(config_of("swarm.name='home'"))
    assert (everybody.swarm, everybody.name, everybody.allowed, everybody.at_least) == (
        "home", "big", None, 2,
    )  # fmt: skip
    named = membership_settings(
        config_of(f"pipeline.members=['{key.peer_id}']", "pipeline.wait_for_members=5")
    )
    assert (named.allowed, named.at_least) == (frozenset({key.peer_id}), 5)


def test_a_pipeline_is_closed_to_whoever_was_not_invited() -> None:
    with pytest.raises(ConfigError, match="commons is public") as caught:
        check_closed(config_of(), private=False)
    assert "--private" in caught.value.hint
    check_closed(config_of(), private=True)
    check_closed(config_of("network.listen=127.0.0.1"), private=False)
    opened = config_of("pipeline.members=anyone")
    check_closed(opened, private=False)
    assert membership_settings(opened).allowed is None


class Earlier:
    """The folders of an earlier run."""

    def __init__(self, whole: WholeModel, folder: Path) -> None:
        self.whole = whole
        self.store = CheckpointStore(folder / "quick")
        self.stages = StageCheckpoints(folder / "stages", whole.fingerprint)

    def stage(self, step: int) -> HeldState:
        tensors = {"base_model.model.model.layers.1.w": torch.full((2,), float(step))}
        held = HeldState.of(StagePart(1, 2), step, tensors)
        self.stages.write(held)
        return held

    def data_node(self, version: int) -> None:
        config = config_of("policy.lora_rank=4")
        policy = Policy(load_base_model(str(self.whole.folder), config.policy), config.policy, seed=0)
        policy.version = version
        trainer = Trainer(
            policy, config.training, temperature=1.0, max_tokens=8, seed=0, render=lambda prompt: (1,)
        )
        counters = Counters(round=max(version, 1))
        self.store.write(take_snapshot(policy, trainer.optimizer, counters, Waiting(), 0))

    def found(self) -> tuple[HeldState, ...]:
        return _earlier(self.stages, self.store, self.whole)


@pytest.fixture
def earlier(whole: WholeModel, tmp_path: Path) -> Earlier:
    return Earlier(whole, tmp_path)


def test_a_first_start_has_nothing_to_go_on_from(earlier: Earlier) -> None:
    assert earlier.found() == ()


def test_a_member_goes_on_from_its_newest_stage(earlier: Earlier) -> None:
    for step in (3, 4):
        newest = earlier.stage(step)
    assert earlier.found() == (newest,)


def test_a_data_node_brings_the_whole_adapter_along_under_the_names_of_the_stages(earlier: Earlier) -> None:
    earlier.data_node(version=2)
    stage = earlier.stage(3)
    whole, own = earlier.found()
    holding = whole.holding
    assert (holding.first_layer, holding.end_layer, holding.iteration) == (0, earlier.whole.layers, 2)
    assert holding.has_ends and own == stage


def test_an_untrained_checkpoint_is_nothing_to_go_on_from(earlier: Earlier) -> None:
    earlier.data_node(version=0)
    assert earlier.found() == ()


def test_a_damaged_stage_is_passed_over_for_the_one_before(
    earlier: Earlier, caplog: pytest.LogCaptureFixture
) -> None:
    kept = earlier.stage(3)
    earlier.stage(4)
    (damaged,) = earlier.stages.folder.glob("step-00000004-*/state.safetensors")
    damaged.write_bytes(b"rubbish")
    with caplog.at_level(logging.WARNING):
        assert earlier.found() == (kept,)
    assert "step-00000004" in caplog.text


def test_a_fresh_start_puts_everything_aside_and_deletes_nothing(earlier: Earlier, tmp_path: Path) -> None:
    earlier.data_node(version=2)
    earlier.stage(3)
    before = sorted(file.name for file in tmp_path.rglob("*.safetensors"))
    _put_aside(earlier.stages, earlier.store)
    assert earlier.found() == ()
    assert sorted(file.name for file in tmp_path.rglob("*.safetensors")) == before
    _put_aside(earlier.stages, earlier.store)  # nothing is left: no error
