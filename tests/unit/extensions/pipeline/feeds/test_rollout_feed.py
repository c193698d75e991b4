"""A data node's groups as micro-batches: each along its path, with the gradients of a single machine."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.pipeline_local import LocalPipeline
from swarmnode.extensions.pipeline.feeds.rollout_feed import (
    PathSamples,
    RolloutFeed,
    nearest_path,
    weight_of,
)
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.model.policy import Policy
from swarmnode.registry import SEAMS
from swarmnode.settings.config import Config, RolloutConfig, TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.losses import loss_of
from swarmnode.training.packing import TrainingSample, completion_tokens
from swarmnode.training.records import TrainReport
from swarmnode.training.round import MeasuredRound, RoundOfPolicy
from swarmnode.training.trainer import train_together
from swarmnode.types import one_span
from tests.own_losses import OWN_LOSSES
from tests.unit.extensions.pipeline.tiny_models import (
    CPU,
    SETTINGS,
    batches,
    nudge,
    samples,
    saved,
    single_machine,
    tiny_config,
    tiny_model,
)  # fmt: skip

TEMPERATURE = 0.9
VERSION = 2
MAX_TOKENS = 16
WHOLE = (0, 1, 2)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def pipeline(model: Any, tmp_path_factory: pytest.TempPathFactory) -> LocalPipeline:
    """Three stages of the nudged adapter; its weights stay as they are."""
    folder = saved(model, tmp_path_factory.mktemp("model"))
    found = LocalPipeline.load(folder, [1, 3, 6], SETTINGS, packs=try_cut(tiny_config()))
    for worker in found.workers:
        nudge(worker.model.trainable())
    return found


def config_of(**settings: Any) -> TrainingConfig:
    return TrainingConfig(**{"grad_clip": 1e9, **settings})


def feed_of(
    groups: Sequence[PathSamples],
    paths: Sequence[StagePath] = (WHOLE,),
    *,
    config: TrainingConfig | None = None,
    **changes: Any,
) -> RolloutFeed:
    given: dict[str, Any] = {
        "waves": 8,
        "version": VERSION,
        "micro_batch_tokens": 16,
        "device": CPU,
        "packed": True,
        "seed": 3,
        "choose_path": lambda prompt: WHOLE,
        **changes,
    }
    rollout = RolloutConfig(temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    settings = Config(rollout=rollout, training=config or config_of())
    return RolloutFeed(groups, dict(enumerate(paths)), given.pop("waves"), settings, **given)


def drive(pipeline: LocalPipeline, feed: RolloutFeed, paths: Sequence[StagePath], waves: int = 8) -> int:
    """What a data node and its members do in an iteration, up to the gradients. Returns the weight."""
    weight = 0
    for wave in range(waves):
        for agent, path in enumerate(paths):
            inputs = feed.take(agent, wave, path)
            if inputs is not None:
                pipeline.accumulate(inputs, feed.objective)
                weight += inputs.tokens
    return weight


def mean_gradients(pipeline: LocalPipeline) -> dict[str, Tensor]:
    """As the members of every stage compute them: sums of gradients over sums of weights."""
    return {name: t for one in pipeline.take_gradients() for name, t in one.of_step(1).items()}


def trained_alone(
    policy: Policy, config: TrainingConfig, trained: Sequence[TrainingSample]
) -> tuple[dict[str, Tensor], TrainReport]:
    """One step of the node's own trainer: the gradient, read off a step of plain descent, and its report."""
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=1.0)
    forward = Forward(policy, config, temperature=TEMPERATURE)
    policy.version = VERSION
    alone = RoundOfPolicy(policy, optimizer, config, forward, MAX_TOKENS, [trained], MeasuredRound())
    (report,) = train_together([alone])
    return {name: before[name] - p.detach() for name, p in policy.trainable().items()}, report


def of_several_versions() -> list[TrainingSample]:
    """0, 1 and 2: with a lag of 1 at version 2 the oldest are left out. An environment wrote a token of the
    last ones."""
    return [
        replace(
            sample,
            spans=one_span(number // 2, len(sample.completion_ids)),
            given=((1, 2),) if number > 2 else (),
        )
        for number, sample in enumerate(samples())
    ]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss", [*SEAMS["loss"].ours, *OWN_LOSSES])
def test_a_step_of_each_loss_is_the_single_machines_gradient_and_report(
    model: Any, pipeline: LocalPipeline, loss: Any, packed: bool
) -> None:
    """In micro-batches of unlike sizes, so that a wrong weight would tell."""
    config = config_of(loss=loss)
    trained = of_several_versions()
    expected, alone = trained_alone(single_machine(model), config, trained)
    feed = feed_of([PathSamples(WHOLE, trained)], config=config, packed=packed)
    weight = drive(pipeline, feed, [WHOLE])
    found = mean_gradients(pipeline)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item(), msg=name
        )
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-3
    report = feed.report(weight=weight, grad_norm=alone.grad_norm)
    assert report.loss == pytest.approx(alone.loss, rel=1e-4)
    assert report.entropy == pytest.approx(alone.entropy, rel=1e-4)
    assert report.behaviour_kl == pytest.approx(alone.behaviour_kl, rel=1e-4)
    assert (report.tokens, report.optimizer_steps) == (alone.tokens, 1)
    assert (report.clipped_share, report.max_age) == (alone.clipped_share, alone.max_age)
    assert report.grad_norm == alone.grad_norm
    assert report.reference_kl is None


def test_a_loss_by_another_name_has_the_same_gradient_in_a_pipeline(pipeline: LocalPipeline) -> None:
    def gradients(loss: str) -> dict[str, Tensor]:
        drive(pipeline, feed_of([PathSamples(WHOLE, samples())], config=config_of(loss=loss)), [WHOLE])
        return mean_gradients(pipeline)

    torch.testing.assert_close(gradients("tests.own_losses:another_grpo"), gradients("grpo"), rtol=0, atol=0)


@pytest.mark.parametrize("loss", [*SEAMS["loss"].ours, *OWN_LOSSES])
def test_a_micro_batch_weighs_what_its_loss_is_a_mean_over(loss: Any) -> None:
    batch = batches(packed=True)[0]
    answers, tokens = len(batch.completion_lengths), len(batch.targets_N)
    assert answers < tokens
    over_answers = loss_of(loss).mean_over != "tokens"
    assert weight_of(batch, config_of(loss=loss)) == (answers if over_answers else tokens)
    feed = feed_of([PathSamples(WHOLE, samples())], config=config_of(loss=loss))
    taken = [feed.take(0, wave, WHOLE) for wave in range(8)]
    weight = sum(inputs.tokens for inputs in taken if inputs is not None)
    assert weight == (len(samples()) if over_answers else completion_tokens(samples()))


@pytest.mark.parametrize(
    ("wanted", "paths", "nearest"),
    [
        ((0, 1, 3), [(0, 2, 3), (0, 1, 3)], (0, 1, 3)),
        ((0, 1, 3), [(0, 2), (0, 3, 2), (0, 1, 2, 3)], (0, 1, 2, 3)),  # most of the wanted stages
        ((0, 1), [(0, 1, 2, 3), (0, 1, 3)], (0, 1, 3)),  # then fewest others
        ((0,), [(0, 3), (0, 2)], (0, 2)),  # then the smallest, wherever it stands
        ((0, 5, 6), [(0, 2), (0,)], (0,)),
    ],
)
def test_a_path_that_is_gone_is_replaced_by_the_most_similar_one(
    wanted: StagePath, paths: list[StagePath], nearest: StagePath
) -> None:
    assert nearest_path(wanted, paths) == nearest == nearest_path(wanted, paths[::-1])


def halves() -> tuple[list[TrainingSample], list[TrainingSample]]:
    return samples()[:2], samples()[2:]


def test_groups_are_trained_along_the_paths_that_sampled_them(pipeline: LocalPipeline) -> None:
    first, second = halves()
    paths = [(0, 1), (0, 2)]
    feed = feed_of([PathSamples((0, 1), first), PathSamples((0, 2), second)], paths)
    assert feed.left_out == 0
    drive(pipeline, feed, paths)
    _, middle, last = pipeline.take_gradients()
    assert (middle.tokens, last.tokens) == (completion_tokens(first), completion_tokens(second))


def test_an_agent_gets_what_was_sampled_along_its_path_and_nothing_else() -> None:
    first, _ = halves()
    feed = feed_of([PathSamples((0, 1), first)], [(0, 2), (0, 1)], micro_batch_tokens=1000)
    assert feed.take(0, 0, (0, 2)) is None
    taken = feed.take(1, 0, (0, 1))
    assert taken is not None and taken.path == (0, 1) and set(taken.batch.samples) == set(first)
    assert feed.take(1, 1, (0, 1)) is None


def test_a_group_whose_path_the_plan_does_not_have_any_more_takes_the_nearest() -> None:
    first, second = halves()
    feed = feed_of([PathSamples((0, 2, 3), first), PathSamples((0, 1), second)], [(0, 1), (0, 3)])
    taken = feed.take(1, 0, (0, 3))
    assert taken is not None and set(taken.batch.samples) <= set(first)


def test_a_strangers_group_is_trained_along_the_path_of_its_prompt() -> None:
    strangers = [replace(sample, behaviour_logprobs=None) for sample in halves()[0]]
    asked: list[tuple[int, ...]] = []

    def choose(prompt: Sequence[int]) -> StagePath:
        asked.append(tuple(prompt))
        return (0, 2)

    feed = feed_of([PathSamples((), strangers)], [(0, 1), (0, 2)], choose_path=choose)
    assert asked == [strangers[0].prompt_ids], "of a group once"
    taken = feed.take(1, 0, (0, 2))
    assert taken is not None and taken.path == (0, 2)
    assert feed.tokens == completion_tokens(strangers)


def test_strangers_tokens_are_no_part_of_what_is_measured_of_our_own(pipeline: LocalPipeline) -> None:
    strangers = [replace(sample, behaviour_logprobs=None) for sample in samples()]
    feed = feed_of([PathSamples((), strangers)])
    weight = drive(pipeline, feed, [WHOLE])
    assert all(t.isfinite().all() for t in mean_gradients(pipeline).values())
    report = feed.report(weight=weight, grad_norm=1.0)
    assert report.behaviour_kl is None and report.entropy is not None


def by_prompt() -> list[PathSamples]:
    return [PathSamples(WHOLE, [sample]) for sample in samples()]


def count_of(feed: RolloutFeed, agents: int = 1) -> int:
    return sum(feed.take(agent, wave, WHOLE) is not None for agent in range(agents) for wave in range(8))


def test_groups_beyond_the_plans_room_are_left_out_whole_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        roomy = feed_of(by_prompt())
    assert (roomy.left_out, roomy.tokens) == (0, completion_tokens(samples())) and not caplog.messages
    count = count_of(roomy)
    assert count > 2
    pairs = [PathSamples(WHOLE, samples()[:3]), PathSamples(WHOLE, samples()[3:])]
    with caplog.at_level(logging.WARNING):
        narrow = feed_of(pairs, waves=count - 1)
    assert narrow.left_out == 1
    assert "1 groups do not fit" in caplog.text and "rollout.groups" in caplog.text
    seen = [narrow.take(0, wave, WHOLE) for wave in range(8)]
    trained = {sample for inputs in seen if inputs is not None for sample in inputs.batch.samples}
    assert trained in [set(pair.samples) for pair in pairs], "all of a group, or nothing of it"
    assert narrow.tokens == completion_tokens(list(trained))


def test_each_agent_of_a_path_brings_its_own_room() -> None:
    one = feed_of(by_prompt(), waves=1)
    two = feed_of(by_prompt(), [WHOLE, (0, 1), WHOLE], waves=1)
    assert two.left_out < one.left_out
    assert count_of(one) == 1
    assert two.take(0, 0, WHOLE) is not None and two.take(2, 0, WHOLE) is not None
    assert two.take(1, 0, (0, 1)) is None


def test_which_groups_are_left_out_is_chance_that_can_be_repeated() -> None:
    def kept(**changes: Any) -> frozenset[TrainingSample]:
        feed = feed_of(by_prompt(), waves=1, **changes)
        taken = feed.take(0, 0, WHOLE)
        assert taken is not None
        return frozenset(taken.batch.samples)

    assert kept() == kept()
    assert len({kept(version=version) for version in range(12)}) > 2


def test_a_group_that_is_too_large_for_an_iteration_leaves_room_for_nobody_else_but_harms_none() -> None:
    feed = feed_of([PathSamples(WHOLE, samples())], waves=1)
    assert (feed.left_out, feed.tokens, count_of(feed)) == (1, 0, 0)


def test_an_agent_on_a_repaired_path_trains_what_was_meant_for_its_own() -> None:
    first, second = halves()
    groups = [PathSamples((0, 1, 2), first), PathSamples((0, 3), second)]
    feed = feed_of(groups, [(0, 1, 2), (0, 3)], micro_batch_tokens=1000)
    taken = feed.take(0, 0, (0, 2))
    assert taken is not None and set(taken.batch.samples) == set(first)
    assert taken.path == (0, 2), "along the stages that are left"
    assert feed.take(0, 1, (0, 3)) is None, "the others' are still the others'"
    taken = feed.take(1, 0, (0, 3))
    assert taken is not None and set(taken.batch.samples) == set(second)


def test_what_is_tried_again_is_measured_once(pipeline: LocalPipeline) -> None:
    feed = feed_of([PathSamples(WHOLE, samples())], micro_batch_tokens=1000)
    inputs = feed.take(0, 0, WHOLE)
    assert inputs is not None
    for _ in range(2):
        pipeline.accumulate(inputs, feed.objective)
    pipeline.take_gradients()
    report = feed.report(weight=inputs.tokens, grad_norm=0.5)
    again = feed_of([PathSamples(WHOLE, samples())], micro_batch_tokens=1000)
    weight = drive(pipeline, again, [WHOLE])
    pipeline.take_gradients()
    once = again.report(weight=weight, grad_norm=0.5)
    assert (report.loss, report.entropy) == (once.loss, once.entropy)
    assert report.loss is not None and math.isfinite(report.loss)


def test_where_no_step_was_taken_there_is_no_loss_but_the_groups_are_counted() -> None:
    measured = MeasuredRound()
    measured.groups["own", True] = 2
    feed = feed_of([PathSamples(WHOLE, samples())], measured=measured)
    report = feed.report(weight=0, grad_norm=None)
    assert (report.optimizer_steps, report.loss, report.grad_norm) == (0, None, None)
    assert (report.own_groups, report.tokens) == (2, completion_tokens(samples()))
    assert report.micro_batch_tokens == 16


def test_a_feed_without_groups_has_nothing_for_anybody() -> None:
    feed = feed_of([])
    assert feed.take(0, 0, WHOLE) is None
    assert (feed.tokens, feed.left_out) == (0, 0)
