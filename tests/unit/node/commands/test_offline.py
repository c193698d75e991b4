"""Which checkpoint is measured, and on what."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from swarmnode.api import Node
from swarmnode.cli.settings import settings_of_trained
from swarmnode.errors import CheckpointError, ConfigError, TaskError
from swarmnode.extensions.suites.eval_command import _lines
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.node.building.local_policy import checkpoint_store, load_policy
from swarmnode.node.commands.offline import OfflineEvaluation, evaluate_offline
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings, load_config, load_settings
from swarmnode.training.checkpoints.checkpoint import Waiting, take_snapshot
from swarmnode.training.checkpoints.run_folders import STAGES, with_trained_model
from swarmnode.training.records import Counters


@pytest.fixture
def config() -> Config:
    return load_config(environ={}, assignments=["rollout.max_tokens=12", "rollout.engine='embedded'"]).config


def at(config: Config, model: str, paths: Paths) -> Settings:
    return Settings(config, {"tasks.names": "default"}, paths, model, "as the test says")


def save(config: Config, model: str, home: Path, rewards: list[float | None]) -> None:
    """One checkpoint per reward, of rounds 1, 2, ..."""
    local = load_policy(config, model, resolve_paths(home), lambda *_: None)
    store = checkpoint_store(config, model, resolve_paths(home), local.base)
    optimizer = torch.optim.AdamW(local.policy.trainable().values())
    for number, reward in enumerate(rewards, start=1):
        evaluated = None if reward is None else number
        counters = Counters(round=number, reward_last=reward, evaluated_round=evaluated)
        store.write(take_snapshot(local.policy, optimizer, counters, Waiting(), 0))


def test_the_only_model_that_was_trained_here_need_not_be_named(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").symlink_to(quick_model)
    save(config, str(tmp_path / "mine"), tmp_path, [None])

    def model(*assignments: str) -> str:
        def loaded(trained: str | None) -> Settings:
            flags = {"policy.model": trained}
            return load_settings(home=tmp_path, assignments=assignments, flags=flags)

        return with_trained_model(loaded).model

    assert model() == str(tmp_path / "mine")
    assert model("policy.model=tiny") == "tiny"
    node = Node("rev", home=tmp_path)
    assert node.config.policy.model == str(tmp_path / "mine"), "a node goes on with it, too"
    (tmp_path / "mine").unlink()
    assert model() == "tiny", "what is gone cannot be gone on with"


def test_a_command_without_a_model_has_no_preset_of_the_model_that_a_node_would_train_here(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    """On a CPU a node trains the demonstration policy, whose answers are ten tokens long."""
    (tmp_path / "mine").symlink_to(quick_model)
    save(config, str(tmp_path / "mine"), tmp_path, [None])

    def longest(model: str | None, *assignments: str) -> int:
        settings = settings_of_trained(
            home=tmp_path, preset=None, config=None, set_=[*assignments], model=model, run=None, policy=0
        )
        return settings.config.rollout.max_tokens

    assert longest(None) == Config().rollout.max_tokens > longest("tiny")
    assert longest(None, "rollout.max_tokens=7") == 7


def test_without_an_evaluation_there_is_no_best(config: Config, quick_model: Path, tmp_path: Path) -> None:
    save(config, str(quick_model), tmp_path, [None])
    with pytest.raises(CheckpointError, match="has been evaluated") as caught:
        evaluate_offline(at(config, str(quick_model), resolve_paths(tmp_path)), best=True)
    assert "eval_every" in caught.value.hint


def test_the_base_model_is_not_the_best_checkpoint(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base and best are two"):
        evaluate_offline(at(config, "any", resolve_paths(tmp_path)), base=True, best=True)


ODD = """
def examples(seed):
    for number in range(1000):
        yield f"{seed % 7} {number}=", "1"

def reward(completions, **columns):
    return [0.25 for _ in completions]
"""


def trained_on(config: Config, model: str, home: Path, *specs: str, **noted: object) -> None:
    local = load_policy(config, model, resolve_paths(home), lambda *_: None)
    optimizer = torch.optim.AdamW(local.policy.trainable().values())
    settings = {f"rollout.{name}": value for name, value in noted.items()}
    snapshot = take_snapshot(
        local.policy, optimizer, Counters(round=1), Waiting(), 0, task_specs=specs, settings=settings
    )
    checkpoint_store(config, model, resolve_paths(home), local.base).write(snapshot)


def test_answers_are_as_long_as_the_run_had_them_unless_another_length_is_named(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    model, file = str(quick_model), tmp_path / "odd.py"
    file.write_text(ODD)
    trained_on(config, model, tmp_path / "home", str(file), max_tokens=3, temperature=0.5, top_p=None)

    def measured(*assignments: str, base: bool = False) -> OfflineEvaluation:
        settings = load_settings(
            home=tmp_path / "home",
            assignments=["tasks.eval_examples=4", *assignments],
            flags={"policy.model": model},
        )
        return evaluate_offline(settings, base=base)

    of_run = measured()
    assert (of_run.max_tokens, of_run.sampling) == (3, "sampled at temperature 0.5")
    assert "at most 3 tokens" in next(iter(_lines(of_run)))
    assert measured(base=True).max_tokens == 3
    assert measured("rollout.max_tokens=5").max_tokens == 5


def test_what_is_measured_is_what_the_policy_trained_on(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    config = config.model_copy(update={"tasks": config.tasks.model_copy(update={"eval_examples": 4})})
    model, home, file = str(quick_model), tmp_path / "home", tmp_path / "odd.py"
    file.write_text(ODD)
    trained_on(config, model, home, "rev", str(file))
    paths = resolve_paths(home)
    assert evaluate_offline(at(config, model, paths)).per_task == {"rev": 0.0, "odd": 0.25}
    assert set(evaluate_offline(at(config, model, paths), base=True).per_task) == {"rev", "odd"}

    named = config.model_copy(update={"tasks": config.tasks.model_copy(update={"names": ("gcd",)})})
    for origin, is_here in ("the script", True), (f"--config {file}", True), ("preset tiny", False):
        chosen = replace(at(named, model, paths), origins={"tasks.names": origin})
        assert set(evaluate_offline(chosen).per_task) == ({"gcd"} if is_here else {"rev", "odd"})

    file.unlink()
    with pytest.raises(TaskError, match="which is gone") as caught:
        evaluate_offline(at(config, model, paths))
    assert "--task" in caught.value.hint


def test_where_nothing_was_trained_it_is_said_before_a_model_is_loaded(
    config: Config, tmp_path: Path
) -> None:
    paths = resolve_paths(tmp_path)
    with pytest.raises(CheckpointError, match="nothing to evaluate") as caught:
        evaluate_offline(at(config, "tiny", paths))
    assert "swarmnode join" in caught.value.hint and "--base" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_who_held_no_data_in_a_pipeline_is_told_where_checkpoints_are(config: Config, tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    (paths.checkpoints / f"{STAGES}1352219cb3f3af6e").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has one stage of a pipeline's model") as caught:
        evaluate_offline(at(config, "tiny", paths))
    assert "tiny" not in caught.value.message and "that last held the data" in caught.value.hint


def test_with_several_answers_to_each_question_pass_at_k_is_part_of_the_result(
    config: Config, quick_model: Path, tmp_path: Path
) -> None:
    config = config.model_copy(update={"tasks": config.tasks.model_copy(update={"eval_examples": 2})})
    model, file = str(quick_model), tmp_path / "odd.py"
    file.write_text(ODD)
    trained_on(config, model, tmp_path / "home", str(file))
    paths = resolve_paths(tmp_path / "home")
    found = evaluate_offline(at(config, model, paths), samples=3, passing_reward=0.25)
    assert (found.samples, found.per_task, found.pass_at) == (3, {"odd": 0.25}, {"odd": {1: 1.0, 2: 1.0}})
    written = msgspec.json.decode(msgspec.json.encode(found))
    assert written["pass_at_mean"] == {"1": 1.0, "2": 1.0} and written["passing_reward"] == 0.25
    assert [line.split() for line in _lines(found)][1:] == [
        ["reward", "pass@1", "pass@2", "maj@2"],
        ["odd", "0.250", "1.000", "1.000", "1.000"],
        ["mean", "0.250", "1.000", "1.000"],
        ["passed:", "a", "reward", "of", "0.25", "or", "more"],
    ]


def test_a_greedy_policy_is_not_asked_twice(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="always gives the same answer"):
        evaluate_offline(at(config, "any", resolve_paths(tmp_path)), base=True, greedy=True, samples=2)
