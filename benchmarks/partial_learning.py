"""Does a policy learn as much from partial rollouts as from waiting? Reward after equal CPU seconds.

    python benchmarks/partial_learning.py [--quick] [--json FILE]

After `go x=` the policy writes as many letters as a lognormal draw forces it to. Two learners per seed start
from the same tiny policy: `sync` waits for every answer of a round, `default` refills, keeps and corrects
(truncated importance sampling). They take turns in one process: whoever has used less CPU time goes next,
until both have used the same. Generation, scoring and training count, evaluation does not. Two tasks, because
the answer depends on how much a policy moves per step:

    vowels     paid for each vowel, at a learning rate of 3e-4: stale rollouts are nearly as good as new ones
    alphabet   paid for each letter that follows the one before, from almost no reward, at 1e-3: they are not

Claims: rewards on held-out prompts, worst seed, and the smallest difference. --quick: one seed, vowels.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Literal

from common import arguments, report

from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.tasks.task import draw_held_out, draw_train, score_strictly
from swarmnode.training.evaluation import collect
from swarmnode.training.records import TrainReport
from swarmnode.training.trainer import Trainer
from swarmnode.types import Example, ExampleKey, RolloutGroup

GROUPS, GROUP_SIZE, MAX_LAG = 8, 4, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MEDIAN_TOKENS, SIGMA, LONGEST = 30, 1.2, 480
"""Of the lengths. The longest is about eight times the mean, as answers that reason are."""
HELD_OUT, HELD_OUT_TOKENS = 48, 64


def share_of_vowels(text: str) -> float:
    """
    >>> share_of_vowels("abba")
    0.5
    """
    return sum(letter in "aeiou" for letter in text) / len(text) if text else 0.0


def share_in_order(text: str) -> float:
    """The share of characters that are the next letter after the one before.

    >>> share_in_order("abcx"), share_in_order("za")
    (0.5, 0.5)
    """
    following = {a: b for a, b in zip(LETTERS, LETTERS[1:] + LETTERS[:1], strict=True)}
    right = sum(following.get(a) == b for a, b in pairwise(text))
    return right / len(text) if text else 0.0


@dataclass(frozen=True, slots=True)
class Writing:
    """A task without right answers: every letter counts."""

    name: str
    reward: Callable[[str], float]
    learning_rate: float
    cpu_s: float
    """How long each learner learns."""
    version: str = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        rng = random.Random(seed)
        for index in count():
            start = "".join(rng.choice(LETTERS) for _ in range(3))
            yield Example(ExampleKey(self.name, self.version, seed, index), f"go {start}=")

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        return [{"reward": self.reward(text)} for text in completions]


VOWELS = Writing("vowels", share_of_vowels, learning_rate=3e-4, cpu_s=10.0)
ALPHABET = Writing("alphabet", share_in_order, learning_rate=1e-3, cpu_s=20.0)


def forced_length(example: Example, place: int) -> SamplingParams:
    """Exactly as many tokens as the draw says: no end of text ends an answer."""
    rng = random.Random(f"{example.key}/{place}")
    length = round(MEDIAN_TOKENS * rng.lognormvariate(0.0, SIGMA))
    return SamplingParams(max_tokens=min(LONGEST, max(2, length)), ignore_eos=True)


class Learner:
    """A policy that generates, scores and trains in turn, and counts its CPU seconds."""

    def __init__(self, task: Writing, model: Path, mode: Literal["sync", "refill"], seed: int) -> None:
        base = load_base_model(str(model), PolicyConfig())
        self.cpu_s = 0.0
        self.rounds = 0
        self.reports: list[TrainReport] = []
        self._policy = Policy(base, PolicyConfig(), seed)
        self._renderer = Renderer(base.tokenizer, base.eos_token_ids)
        self._engine = EmbeddedEngine(base.model, base.eos_token_ids, 2 * GROUPS * GROUP_SIZE)
        self._task = task
        self._examples = draw_train(self._task, seed)
        settings = PartialSettings(mode, groups=GROUPS, group_size=GROUP_SIZE, max_lag=MAX_LAG)
        self._rollouts = PartialRollouts(
            self._engine, self._renderer, settings, SamplingParams(1), seed=seed, sampling_of=forced_length
        )
        self._trainer = Trainer(
            self._policy,
            TrainingConfig(learning_rate=task.learning_rate, sequences_per_step=GROUPS * GROUP_SIZE),
            temperature=1.0,
            max_tokens=LONGEST,
            seed=seed,
            render=self._renderer.prompt_ids,
        )

    def round(self) -> None:
        started = time.process_time()
        groups = [self._scored(answered) for answered in self._rollouts.round(self._examples)]
        self.reports.append(self._trainer.train(groups, []))
        self._rollouts.set_policy(self._policy.update())
        self.rounds += 1
        self.cpu_s += time.process_time() - started

    def held_out_reward(self) -> float:
        self._rollouts.park()
        examples = list(islice(draw_held_out(self._task, 0), HELD_OUT))
        sampling = SamplingParams(HELD_OUT_TOKENS, ignore_eos=True)
        found = collect(self._engine, self._renderer, examples, 1, sampling, seed=0)
        return fmean(self._task.reward(answered.completions[0].text) for answered in found)

    def _scored(self, answered: Answered) -> RolloutGroup:
        texts = [completion.text for completion in answered.completions]
        scores = score_strictly(self._task, answered.example, texts)
        return RolloutGroup(answered.example, answered.completions, scores, "me", self._policy.version)


def main() -> None:
    options = arguments(__doc__ or "")
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    with TemporaryDirectory() as folder:
        model = build_tiny(Path(folder))
        for task in (VOWELS,) if options.quick else (VOWELS, ALPHABET):
            rewards = compare(task, model, (0,) if options.quick else (0, 1, 2))
            pairs = zip(rewards["default"], rewards["sync"], strict=True)
            rewards["default_minus_sync"] = [ours - theirs for ours, theirs in pairs]
            for name, values in rewards.items():
                claims[f"{task.name}_{name}"] = min(values)
                spread[f"{task.name}_{name}"] = (min(values), max(values))
    report("partial_learning", claims, spread, options.json)


def compare(task: Writing, model: Path, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Held-out rewards by seed: before, and of both learners after the same CPU time."""
    rewards: dict[str, list[float]] = {"before": [], "sync": [], "default": []}
    for seed in seeds:
        learners = {
            "sync": Learner(task, model, "sync", seed),
            "default": Learner(task, model, "refill", seed),
        }
        before = learners["sync"].held_out_reward()
        rewards["before"].append(before)
        while (behind := min(learners.values(), key=lambda one: one.cpu_s)).cpu_s < task.cpu_s:
            behind.round()
        for name, learner in learners.items():
            rewards[name].append(learner.held_out_reward())
            print(f"{task.name} seed {seed} {name}: {story(learner, before, rewards[name][-1])}", flush=True)
    return rewards


def story(learner: Learner, before: float, after: float) -> str:
    last = learner.reports[-1]
    return (
        f"{before:.3f} -> {after:.3f} in {learner.rounds} rounds, {learner.cpu_s:.1f} CPU s; last round:"
        f" off-policy {last.off_policy_share or 0:.0%}, oldest token {last.max_age} versions,"
        f" effective sample size {last.effective_sample_size or 0:.2f}"
    )


if __name__ == "__main__":
    main()
