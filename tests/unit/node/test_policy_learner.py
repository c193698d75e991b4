"""The learning half of a node on a tiny policy: rounds, overlap, interruption, resume."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.errors import CheckpointError, TaskError
from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.node.catching_up import RoundMix
from swarmnode.node.learner import Overlap, RoundRollouts
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.node.rollout_learner import partial_settings
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Output
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.tasks.drawing import curriculum
from swarmnode.tasks.drawing.curriculum import level_of
from swarmnode.training.checkpoints.checkpoint import Measure, Snapshot, Waiting, take_snapshot
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters, read_state
from swarmnode.training.rules.mending.mending import ForeignAnswer, MendedAnswer, mend
from swarmnode.training.trainer import Trainer
from swarmnode.types import Example, ExampleKey, Scores
from tests.own_rules import TRUSTING

SETTINGS = [
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "training.learning_rate=1e-2",
]
ALONE = Overlap(on=False, sleep=False, reason="as set")
Make = Callable[..., PolicyLearner]


class Odd:
    """Questions of one letter more each; an answer is right when its length is odd, which is luck."""

    name = "odd"
    version = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        for index in range(1000):
            yield Example(ExampleKey(self.name, self.version, seed, index), f"say {seed % 1000} {index}=")

    def score(self, example: Example, completions: Sequence[str]) -> list[Scores]:
        return [{"odd": float(len(text) % 2)} for text in completions]


@pytest.fixture
def make(quick_model: Path, tmp_path: Path) -> Make:
    """A learner over the checkpoints of this test; each call is a new start of the node."""

    def build(
        *settings: str,
        overlap: Overlap = ALONE,
        engine_kind: type[EmbeddedEngine] = EmbeddedEngine,
        home: str = "checkpoints",
    ) -> PolicyLearner:
        config: Config = load_config(environ={}, assignments=[*SETTINGS, *settings]).config
        base = load_base_model(str(quick_model), config.policy)
        slots = min(8, config.rollout.slots)
        engine = engine_kind(base.model, base.eos_token_ids, max_slots=slots, max_length=96)
        store = CheckpointStore(tmp_path / home / "quick")
        return PolicyLearner(
            config,
            Policy(base, config.policy, seed=0),
            engine,
            Renderer(base.tokenizer, base.eos_token_ids),
            {"odd": Odd()},
            store,
            author="me",
            seed=3,
            overlap=overlap,
        )

    return build


def keys(learner: PolicyLearner, number: int) -> list[ExampleKey]:
    return [group.example.key for group in learner.rollouts(number).groups]


def test_a_round_has_whole_scored_groups_and_says_how_they_were_generated(make: Make) -> None:
    rollouts = make("rollout.mode='sync'").rollouts(1)
    assert rollouts.complete and len(rollouts.groups) == 4
    for group in rollouts.groups:
        assert len(group.completions) == len(group.scores) == 4
        assert (group.author, group.policy_version) == ("me", 0)
        assert all(completion.logprobs for completion in group.completions)
    generation = rollouts.generation
    assert (generation.engine, generation.mode) == ("embedded", "sync")
    assert (generation.running, generation.groups_in_flight) == (0, 0)


def test_a_reward_that_fails_costs_its_groups_until_it_has_failed_too_often(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, judged = Odd.score, list[Example]()

    def fails_after_one(self: Odd, example: Example, completions: Sequence[str]) -> list[Scores]:
        judged.append(example)
        if len(judged) > 1:
            raise TaskError("reward odd failed")
        return score(self, example, completions)

    monkeypatch.setattr(Odd, "score", fails_after_one)
    learner = make("tasks.max_failures=2")
    with pytest.raises(TaskError, match="given up after 2 groups in a row"):
        learner.rollouts(1)
    learner.close()
    judged.clear()
    rollouts = make("tasks.max_failures=99").rollouts(1)
    scored = [group for group in rollouts.groups if None not in group.rewards]
    assert (len(rollouts.groups), len(scored), rollouts.generation.unjudged_groups) == (4, 1, 3)
    assert rollouts.generation.score_wait_s > 0


@pytest.mark.parametrize("mode", ["sync", "refill", "april"])
def test_dynamic_sampling_asks_on_until_enough_groups_have_a_gradient(make: Make, mode: str) -> None:
    """Of two answers, half of all pairs are equally good or bad."""
    pairs = ("rollout.group_size=2", f"rollout.mode='{mode}'")
    once = make(*pairs).rollouts(1).groups
    assert len(once) == 4 and sum(group.has_gradient for group in once) < 4
    learner = make(*pairs, "rollout.dynamic_sampling=8")
    groups = [*learner.rollouts(1).groups, *learner.rollouts(2).groups]
    assert sum(group.has_gradient for group in groups) >= 8
    asked = [group.example.key for group in groups]
    assert len(set(asked)) == len(asked), "no example is asked twice"


def versions(rollouts: RoundRollouts) -> set[int]:
    return {span.version for group in rollouts.groups for one in group.completions for span in one.spans}


def test_a_new_policy_generates_from_when_it_is_taken_over(make: Make) -> None:
    learner = make("rollout.mode='sync'")
    learner.train(learner.rollouts(1).groups, [])
    trained = learner.policy_version
    assert trained > 0
    assert versions(learner.rollouts(2)) == {0}, "training is over, but nobody has said so"
    learner.use_newest_policy()
    assert versions(learner.rollouts(3)) == {trained}


def test_the_mix_of_a_round_reaches_sampling_trainer_and_rule_until_it_is_taken_back(make: Make) -> None:
    learner = make()

    def in_force() -> tuple[float, float, int | None, int | None]:
        trainer, rule = learner._trainer, learner._rule
        return trainer.rate_share, trainer.kept_share, rule.replayed, rule.step_answers

    learner.catch_up(RoundMix(1, 8, 2, rate=0.5, kept=0.25))
    assert in_force() == (0.5, 0.25, 8, 2)
    assert len(learner.rollouts(1).groups) == 1
    learner.catch_up(RoundMix(2, None, None, rate=0.5))
    assert in_force() == (0.5, 1.0, None, None)
    learner.catch_up(None)
    assert in_force() == (1.0, 1.0, None, None)
    assert len(learner.rollouts(2).groups) == learner._config.rollout.groups


def test_no_example_is_asked_twice_over_rounds_and_restarts(make: Make) -> None:
    first = make()
    seen = keys(first, 1) + keys(first, 2)
    first.save(Counters(round=2)).result()
    again = make()
    assert again.resume() is not None
    seen += keys(again, 3)
    assert len(seen) == len(set(seen)) == 12


def test_groups_generated_ahead_of_training_are_in_the_checkpoint_and_come_first_after_it(
    make: Make,
) -> None:
    settings = ("rollout.mode='refill'",)
    ahead_of_training = Overlap(on=True, sleep=False, reason="as set")
    first = make(*settings, overlap=ahead_of_training)
    now, ahead = first.rollouts(1), keys(first, 2)
    first.train(now.groups, [])
    assert first.policy_version > 0
    first.save(Counters(round=1)).result()
    again = make(*settings, overlap=ahead_of_training)
    resumed = again.resume()
    assert resumed is not None and resumed.counters.round == 1
    again.use_newest_policy()
    assert set(keys(again, 2)) == set(ahead), "they were complete and nobody had trained on them"


class Alarm(EmbeddedEngine):
    """Calls `ring` after so many steps."""

    ring: Callable[[], None] = staticmethod(lambda: None)
    steps_left = -1

    def step(self) -> Sequence[Output]:
        self.steps_left -= 1
        if self.steps_left == 0:
            self.ring()
        return super().step()


def test_an_interrupted_round_loses_nothing(make: Make) -> None:
    slowly = ("rollout.mode='refill'", "rollout.slots=2", "rollout.max_tokens=40", "rollout.groups=3")
    cut = make(*slowly, engine_kind=Alarm)
    first = keys(cut, 1)
    engine = cut.engine
    assert isinstance(engine, Alarm)
    engine.ring, engine.steps_left = cut.interrupt, 10
    interrupted = cut.rollouts(2)
    assert not interrupted.complete and interrupted.groups == ()
    cut.save(Counters(round=1)).result()

    again = make(*slowly)
    again.resume()
    rollouts = again.rollouts(2)
    assert rollouts.generation.resumed > 0, "a completion goes on behind the tokens it had"
    assert len({*first, *(group.example.key for group in rollouts.groups)}) == 6
    steady = make(*slowly, home="steady")
    assert keys(steady, 1) == first
    assert set(keys(steady, 2)) == {group.example.key for group in rollouts.groups}


def test_an_evaluation_between_rounds_does_not_disturb_what_is_in_flight(make: Make) -> None:
    learner = make()
    seen = keys(learner, 1)
    evaluation = learner.evaluate()
    assert evaluation is not None and evaluation.mean is not None
    seen += keys(learner, 2)
    assert len(set(seen)) == 8


def test_right_answers_of_strangers_go_through_the_mender_unless_the_rule_does_without(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def counted(answers: Sequence[ForeignAnswer], **others: Any) -> list[MendedAnswer]:
        seen.extend(answers)
        return mend(answers, **others)

    monkeypatch.setattr("swarmnode.training.rules.mending.mender.mend", counted)
    learner = make()
    own = learner.rollouts(1).groups
    strange = [replace(group, author="stranger") for group in own]
    report = learner.train(own, strange)
    assert learner.mender is not None
    assert report.mended + report.refused <= len(seen) > 0
    unmended = make(f"exchange.rule={TRUSTING}", home="other")
    report = unmended.train(own, strange)
    assert unmended.mender is None and report.mended == report.refused == 0


def test_a_resumed_node_forgets_what_strangers_said_of_a_task_that_stays_at_home(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting = f"exchange.rule={TRUSTING}"
    before = make(trusting)
    own = before.rollouts(1).groups
    before.train(own[:2], [replace(group, author="stranger") for group in own[2:]])
    assert before.train(own[:2], []).book_foreign > 0
    before.save(Counters(round=1)).result()
    still = make(trusting)
    still.resume()
    assert still.train(own[:2], []).book_foreign > 0
    monkeypatch.setattr(Odd, "exchangeable", False, raising=False)
    at_home = make(trusting)
    at_home.resume()
    report = at_home.train(own[:2], [])
    assert report.book_foreign == 0 and report.book > 0


def test_an_engine_that_sleeps_while_training_goes_on_afterwards(make: Make) -> None:
    learner = make(overlap=Overlap(on=False, sleep=True, reason="no room"))
    learner.train(learner.rollouts(1).groups, [])
    learner.use_newest_policy()
    assert learner.rollouts(2).complete


def test_a_learner_that_gave_its_memory_back_goes_on_with_what_was_under_way(make: Make) -> None:
    learner, other = make(), make()
    learner.rollouts(1)
    learner.rest()
    other.rollouts(1)
    assert keys(learner, 2) == keys(other, 2)


def test_saving_does_not_wait_for_the_disk_and_keeps_the_moment_it_began(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_goes_on, write = threading.Event(), CheckpointStore.write

    def slowly(store: CheckpointStore, snapshot: Snapshot) -> str:
        assert disk_goes_on.wait(60)
        return write(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "write", slowly)
    learner = make("rollout.mode='sync'")
    keys(learner, 1)
    written = learner.save(Counters(round=1))
    second = keys(learner, 2)
    assert not written.done()
    disk_goes_on.set()
    learner.close()
    assert written.result() == "round-00000001"
    again = make("rollout.mode='sync'")
    resumed = again.resume()
    assert resumed is not None
    assert keys(again, 2) == second


def test_unfinished_rollouts_that_cannot_be_read_are_an_error_with_advice(
    make: Make, quick_model: Path, tmp_path: Path
) -> None:
    learner = make()
    config = load_config(environ={}, assignments=SETTINGS).config
    policy = Policy(load_base_model(str(quick_model), config.policy), config.policy, seed=0)
    trainer = Trainer(
        policy, config.training, temperature=1.0, max_tokens=16, seed=0, render=lambda prompt: (1,)
    )
    rubbish = Waiting(rollouts=b"rubbish")
    CheckpointStore(tmp_path / "checkpoints" / "quick").write(
        take_snapshot(policy, trainer.optimizer, Counters(round=1), rubbish, 0)
    )
    with pytest.raises(CheckpointError, match="cannot read") as caught:
        learner.resume()
    assert "--fresh" in caught.value.hint


def test_on_a_shared_engine_a_round_is_in_flight_and_no_step_is_measured() -> None:
    rollout = load_config(environ={}, assignments=SETTINGS).config.rollout
    assert partial_settings(rollout, 0).concurrency is None
    assert partial_settings(rollout, 0, alone=False).concurrency == 16


def test_what_a_judge_logs_is_said_in_the_name_of_the_policy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ContextVar("name", default="nobody")
    said: set[str] = set()
    score = Odd.score

    def listening(task: Odd, example: Example, completions: Sequence[str]) -> list[Scores]:
        said.add(name.get())
        return score(task, example, completions)

    monkeypatch.setattr(Odd, "score", listening)
    name.set("policy 1")
    make("rollout.mode='sync'").rollouts(1)
    assert said == {"policy 1"}


def test_a_checkpoint_says_what_its_reward_was_measured_on(make: Make, tmp_path: Path) -> None:
    learner = make("tasks.eval_examples=4")
    learner.save(Counters(round=1, reward_last=0.5, evaluated_round=1)).result()
    (folder,) = tmp_path.rglob("round-00000001")
    assert read_state(folder).measure == Measure(("odd",), 4)


def test_the_level_of_a_task_moves_with_its_pass_rate_and_goes_on_where_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def right(task: Odd, example: Example, completions: Sequence[str]) -> list[Scores]:
        return [{"right": float(level_of(example.key.seed, 0, 3) < 2)} for _ in completions]

    def asked(learner: PolicyLearner, number: int) -> set[int]:
        return {level_of(key.seed, key.index, 3) for key in keys(learner, number)}

    monkeypatch.setattr(Odd, "score", right)
    monkeypatch.setattr(Odd, "levels", 3, raising=False)
    monkeypatch.setattr(curriculum, "ENOUGH_ANSWERS", 32)
    steady = make("rollout.mode='sync'")
    levels = [asked(steady, number) for number in range(1, 9)]
    # Two rounds are 32 answers: all right at levels 0 and 1, all wrong at level 2.
    assert levels == [{0}, {0}, {1}, {1}, {2}, {2}, {1}, {1}]
    cut = make("rollout.mode='sync'", home="cut")
    assert [asked(cut, number) for number in (1, 2, 3)] == levels[:3]
    cut.save(Counters(round=3)).result()
    again = make("rollout.mode='sync'", home="cut")
    assert again.resume() is not None
    assert [asked(again, number) for number in (4, 5, 6)] == levels[3:6]


def test_rollouts_of_a_version_that_dealt_budgets_are_read(make: Make) -> None:
    first, second = make(), make()
    first.rollouts(1)
    state = msgspec.msgpack.decode(first._waiting(Counters(round=0)).rollouts)
    second._restore_rollouts(msgspec.msgpack.encode({**state, "pass_rates": {"odd": [1.0, 2.0, 0.0, 1.0]}}))
    assert second._examples.place == first._examples.place
