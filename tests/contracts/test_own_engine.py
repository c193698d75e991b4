"""An engine and a learner of a user's own, named in the settings, answer and learn in a whole node."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import swarmnode as sn
from swarmnode.engine_record import EngineOptions, EngineRecord, record_of
from swarmnode.errors import ConfigError, EngineError, ModelError
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building import local_policy
from swarmnode.node.building.loaded_memory import choose_budget
from swarmnode.node.building.local_policy import load_policy
from swarmnode.node.building.machine_memory import plan_for
from swarmnode.node.learner import Learner
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.settings.config_layers import load_config
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.training.records import TrainReport
from swarmnode.types import RolloutGroup
from tests.toy_engine import ENGINE, OWN_ENGINE, repeats_the_prompt

SMALL = {
    "rollout.engine": OWN_ENGINE,
    "exchange.enabled": False,
    "rollout.groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 16,
    "node.eval_every": 0,
}


def words(seed: int) -> Iterator[tuple[str, str]]:
    for number in range(40):
        yield f"say {(seed + number) % 26} ", f"say {(seed + number) % 26}"


def repeated(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    return [float(text.strip() == said) for text, said in zip(completions, answer, strict=True)]


def settings(*more: str) -> Any:
    said = [f"rollout.engine={OWN_ENGINE}", "policy.device=cpu", "rollout.max_tokens=16", *more]
    return load_config(environ={}, assignments=said).config


def test_a_node_answers_with_an_engine_of_ones_own_and_learns(quick_model: Path, tmp_path: Path) -> None:
    told: list[NodeStatus] = []
    done = sn.run(
        words, repeated, rounds=2, model=quick_model, home=tmp_path, settings=SMALL, on_round=told.append
    )
    assert done.rounds == 2 and [said.reward.own for said in told] == [0.5, 0.5]
    assert [said.generation.engine for said in told] == ["repeats"] * 2
    assert all((said.training.grad_norm or 0.0) > 0.0 for said in told)


NOTHING = EngineRecord("nothing", make=lambda options: None)


MADE: list[FakeEngine] = []
"""The engines that `remembered` has made."""


def remembered(options: EngineOptions) -> FakeEngine:
    MADE.append(repeats_the_prompt(options))
    return MADE[-1]


REMEMBERED = EngineRecord("remembered", make=remembered)


def test_a_script_closes_every_engine_that_it_opens(quick_model: Path, tmp_path: Path) -> None:
    MADE.clear()
    said = {**SMALL, "rollout.engine": f"{__name__}:REMEMBERED"}
    options: dict[str, Any] = {"model": quick_model, "home": tmp_path, "settings": said}
    node = sn.Node(words, repeated, rounds=1, **options)
    node.run()
    sn.evaluate(words, repeated, **options)
    sn.load_adapter(**options)
    with node.policy as policy:
        assert policy.generate("say 3 ").strip() and node.policy is policy
    assert policy.closed and node.policy is not policy
    with pytest.raises(ModelError, match="policy is closed"):
        policy.generate("say 3 ")
    node.policy.close()
    loaded = sn.load_policy(**options)
    assert [engine.closed for engine in MADE] == [True] * 5 + [False]
    loaded.close()
    loaded.close()
    assert MADE[-1].closed


def test_a_load_that_fails_closes_the_engine_that_it_opened(
    quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise ModelError("no room for an adapter")

    MADE.clear()
    monkeypatch.setattr(local_policy, "Policy", no_room)
    config = settings(f"rollout.engine={__name__}:REMEMBERED")
    with pytest.raises(ModelError, match="no room"):
        load_policy(config, str(quick_model), resolve_paths(tmp_path), lambda *_: None)
    (engine,) = MADE
    assert engine.closed


class Counts(PolicyLearner):
    """Counts the groups that learners of its kind have trained on."""

    seen = 0

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        Counts.seen += len(own)
        return super().train(own, external)


def test_a_node_learns_by_a_learner_of_ones_own(quick_model: Path, tmp_path: Path) -> None:
    said = {**SMALL, "node.learner": f"{__name__}:Counts"}
    assert sn.run(words, repeated, rounds=2, model=quick_model, home=tmp_path, settings=said).rounds == 2
    assert Counts.seen == 4


class Plain:
    """A learner that has what `Learner` asks for, and nothing more."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        self._ours = PolicyLearner(*parts, **more)
        for name in vars(Learner):
            if not name.startswith("_") and name != "policy_version":
                setattr(self, name, getattr(self._ours, name))

    @property
    def policy_version(self) -> int:
        return self._ours.policy_version


def test_a_learner_needs_only_what_is_checked(quick_model: Path, tmp_path: Path) -> None:
    said = {**SMALL, "node.learner": f"{__name__}:Plain"}
    done = sn.run(words, repeated, rounds=2, model=quick_model, home=tmp_path, settings=said)
    assert done.rounds == 2 and done.reward_last is not None
    (rollouts,) = (tmp_path / "data" / "checkpoints").glob("*/rollouts.jsonl")
    assert '"advantage": -' in rollouts.read_text()


def test_its_memory_is_planned_for_as_that_of_a_copy_of_the_model(quick_model: Path, tmp_path: Path) -> None:
    plan = plan_for(settings(), str(quick_model)).plan
    ours = plan_for(settings("rollout.engine=embedded"), str(quick_model)).plan
    assert plan is not None and ours is not None and plan.engine_weights > ours.engine_weights > 0
    local = load_policy(settings(), str(quick_model), resolve_paths(tmp_path), lambda *_: None)
    assert choose_budget(settings(), local).tokens > 0


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        (
            "sglang",
            ConfigError,
            "no such engine; available: auto, embedded, generate, vllm. Use",
        ),
        ("no_such_module:ENGINE", ConfigError, "No module named 'no_such_module'.*install 'no_such_module'"),
        ("tests.toy_engine:SLOW", ConfigError, "no attribute 'SLOW'.*has: .*ENGINE"),
        (f"{__name__}:NOTHING", ConfigError, "NOTHING' made a NoneType, which lacks: capabilities, .*close"),
        ("tests.toy_engine:NO_ENGINE", ConfigError, "function, not an EngineRecord.*EngineRecord"),
        (
            "tests.toy_engine:FOR_A_CARD",
            EngineError,
            "card's driver is not installed.*pip install the-driver",
        ),
    ],
)
def test_an_engine_that_cannot_be_had_says_why_and_what_to_do(
    setting: str, error: type[Exception], message: str, quick_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load_policy(
            settings(f"rollout.engine={setting}"), str(quick_model), resolve_paths(tmp_path), lambda *_: None
        )


def test_several_policies_do_not_share_an_engine_that_does_not_say_that_it_can(
    quick_model: Path, tmp_path: Path
) -> None:
    assert record_of(OWN_ENGINE) is ENGINE
    with pytest.raises(EngineError, match="2 policies cannot share"):
        load_policy(settings(), str(quick_model), resolve_paths(tmp_path), lambda *_: None, policies=2)
