"""Micro-batches of rollouts for one iteration of a data node: each group is trained along its own path.

rollout groups -> samples (training/round.py) -> [RolloutFeed] -> iteration_driver.py -> TrainReport

The path is part of the policy, so a group is trained along the stages that sampled it, where the ratio to the
sampling policy starts at 1. If a plan no longer has that path, the group takes the most similar one, and the
weights of objective.py correct for the difference, as for tokens of an older version.

A feed is one optimizer step: the policy does not change between the first micro-batch and the last, so "prox"
is the policy itself and needs no separate forward pass.
"""

import logging
import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, policy_gradient
from swarmnode.extensions.pipeline.rollouts.routing import ChoosePath
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.settings.config import Config, TrainingConfig
from swarmnode.training.losses import LossOutput, StepSize, loss_of
from swarmnode.training.off_policy import MeasuredTokens
from swarmnode.training.packing import MicroBatch, TrainingSample, completion_tokens, micro_batches
from swarmnode.training.records import TrainReport
from swarmnode.training.round import MeasuredRound, StepSums

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PathSamples:
    """The samples of one group and the stages that sampled it. The path is empty for a stranger's group."""

    path: StagePath
    samples: Sequence[TrainingSample]


class RolloutFeed:
    """A `Feed` of rollouts: micro-batches of groups by path, and the loss for their training.

    >>> feed = RolloutFeed(groups, plan_paths, waves, config, version=3, ...) # doctest: +SKIP
    >>> report = await member.train(feed)                                     # doctest: +SKIP
    >>> feed.report(weight=report.weight, grad_norm=report.grad_norm)         # doctest: +SKIP
    """

    def __init__(
        self,
        groups: Iterable[PathSamples],
        paths: Mapping[int, StagePath],
        waves: int,
        config: Config,
        *,
        version: int,
        micro_batch_tokens: int,
        device: torch.device,
        packed: bool,
        seed: int,
        choose_path: ChoosePath,
        measured: MeasuredRound | None = None,
    ) -> None:
        """`paths`: the planned path of each own agent, which makes `waves` micro-batches. `choose_path`:
        returns the path for a prompt that no member here has sampled. `version`: of the policy. `seed`: for
        the random choice of groups to leave out if not all fit."""
        self._config, rollout = config.training, config.rollout
        self.objective = policy_gradient(
            StepSize(sequences=1, tokens=1, max_tokens=rollout.max_tokens),
            config.training,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            version=version,
            measure=self._measure,
        )
        """The loss, undivided: a sum over what is learned from."""
        self._micro_batch_tokens = micro_batch_tokens
        self._measured = measured or MeasuredRound()
        self._outputs: dict[int, tuple[MicroBatch, LossOutput, MeasuredTokens]] = {}
        """The last measurements of each micro-batch, by its id(). They keep it alive, so no id() occurs
        twice."""
        self.tokens = 0
        self._paths = paths
        by_path: defaultdict[StagePath, list[PathSamples]] = defaultdict(list)
        for group in groups:
            wanted = group.path or choose_path(group.samples[0].prompt_ids)
            path = nearest_path(wanted, list(paths.values()))
            by_path[path].append(group)
        self._waiting: dict[StagePath, deque[MicroBatch]] = {}
        self.left_out = 0
        """Number of groups that the plan has no room for in one iteration."""

        def pack(some: Sequence[PathSamples]) -> list[MicroBatch]:
            samples = [sample for group in some for sample in group.samples]
            return list(micro_batches(samples, micro_batch_tokens, device, packed=packed))

        chance = random.Random(f"{seed}/{version}")
        for path, mates in by_path.items():
            room = waves * sum(each == path for each in paths.values())
            kept, batches = groups_that_fit(mates, room, pack, chance)
            self._waiting[path] = deque(batches)
            self.left_out += len(mates) - len(kept)
            self.tokens += sum(completion_tokens(group.samples) for group in kept)
        if self.left_out:
            logger.warning(
                "%d groups do not fit into this iteration and are left out; raise rollout.groups,"
                " pipeline.slots or training.micro_batch_tokens, on all members alike",
                self.left_out,
            )

    def take(self, agent: int, wave: int, path: StagePath) -> LossInputs | None:
        """Return the next micro-batch for an agent, or None if there are no more.

        If a member was lost, the agent's path differs from the planned one. It still gets the micro-batch for
        the planned path.
        """
        waiting = self._waiting.get(self._paths[agent])
        if not waiting:
            return None
        batch = waiting.popleft()
        return LossInputs(batch, path, weight=weight_of(batch, self._config))

    def _measure(self, inputs: LossInputs, output: LossOutput, measured: MeasuredTokens) -> None:
        """Record the measurements of a micro-batch, once even if it is tried several times."""
        without_graph = replace(output, loss=output.loss.detach())
        self._outputs[id(inputs.batch)] = inputs.batch, without_graph, measured

    def report(self, *, weight: int, grad_norm: float | None) -> TrainReport:
        """Return the report of the step. `weight`: of all micro-batches in the step. `grad_norm`: of this
        stage, or None if no step was taken."""
        total = StepSums()
        for batch, output, measured in self._outputs.values():
            mean = replace(output, loss=output.loss / max(weight, 1))
            total.add(mean, len(batch.targets_N), measured)
        if grad_norm is not None:
            self._measured.steps.append(total)
            self._measured.norms.append(grad_norm)
        return self._measured.report(self.tokens, self._micro_batch_tokens, with_reference=False)


def weight_of(batch: MicroBatch, config: TrainingConfig) -> int:
    """Return the weight of a micro-batch in the loss's mean: the number of its answers or of their tokens."""
    answers, tokens = len(batch.completion_lengths), len(batch.targets_N)
    return loss_of(config.loss).counted(answers=answers, tokens=tokens)


def groups_that_fit(
    groups: Sequence[PathSamples],
    room: int,
    pack: Callable[[Sequence[PathSamples]], list[MicroBatch]],
    chance: random.Random,
) -> tuple[Sequence[PathSamples], list[MicroBatch]]:
    """Return as many groups as fit into `room` micro-batches, and those micro-batches.

    Whole groups are left out at random: leaving out short answers, or parts of a group, would bias what is
    learned.
    """
    batches = pack(groups)
    if len(batches) <= room:
        return groups, batches
    order = list(groups)
    chance.shuffle(order)
    kept = bisect_right(range(1, len(order)), room, key=lambda count: len(pack(order[:count])))
    return order[:kept], pack(order[:kept])


def nearest_path(wanted: StagePath, paths: Sequence[StagePath]) -> StagePath:
    """Return the path with most wanted stages; of several, the one with fewest others, then the smallest.

    >>> nearest_path((0, 1, 3), [(0, 2, 3), (0, 1, 2), (0, 1)])
    (0, 1)
    """
    return min(paths, key=lambda path: (-len(set(path) & set(wanted)), len(path), path))
