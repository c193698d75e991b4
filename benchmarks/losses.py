"""Does every loss teach? The tiny policy, 40 rounds with each of the six, seeds 0, 1, 2.

    python benchmarks/losses.py [--quick] [--json FILE]
    python benchmarks/losses.py --golden          # writes tests/golden/losses.json anew

All run the same loop (our engine, the eight built-in tasks, the real trainer) with the settings of
`configs/tiny.toml`, but more optimizer steps a round. Only `training.loss` differs. The baseline is the
policy before its first round, on the same held-out draws. Seeds and losses take turns. Claims: the final
reward of the worst run of all, and of the worst seed of each loss; `curves` holds the rewards of every tenth
round. --quick: seed 0, 10 rounds.

The golden curves are of another, much smaller policy (`tests/golden/tabular.py`): `make test` runs it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from common import arguments, cpu_seconds, report

from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.registry import SEAMS
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.drawing.example_stream import ExampleStream
from swarmnode.tasks.task import draw_held_out, score_strictly
from swarmnode.training.evaluation import collect
from swarmnode.training.trainer import Trainer
from swarmnode.types import Example, RolloutGroup

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
ROUNDS, QUICK_ROUNDS, CURVE_EVERY = 40, 10, 10

GROUPS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE = 32, 8, 10, 3e-3
"""As in configs/tiny.toml."""
SEQUENCES_PER_STEP = 64
"""Several optimizer steps a round: on policy the clips have nothing to do, and half of the losses are one."""
HELD_OUT = 64
"""Examples per task."""

TASKS = {task.name: task for task in BUILTIN_TASKS}


@dataclass(slots=True)
class Run:
    """One loss with one seed."""

    curve: list[float]
    """Held-out reward before the first round and after every CURVE_EVERY."""
    cpu_s: float = 0.0
    clipped: float = 0.0
    """Mean share of tokens that the clip acted on, over rounds."""

    def __str__(self) -> str:
        story = " -> ".join(f"{reward:.3f}" for reward in self.curve)
        return f"{story} in {self.cpu_s:.1f} CPU s, {self.clipped:.1%} of the tokens clipped"


class Learner:
    """A policy that generates, scores and trains in turn."""

    def __init__(self, model: Path, loss: str, seed: int) -> None:
        base = load_base_model(str(model), PolicyConfig())
        self._policy = Policy(base, PolicyConfig(), seed)
        self._renderer = Renderer(base.tokenizer, base.eos_token_ids)
        self._engine = EmbeddedEngine(base.model, base.eos_token_ids, GROUPS * GROUP_SIZE)
        settings = PartialSettings("sync", groups=GROUPS, group_size=GROUP_SIZE, max_lag=0)
        sampling = SamplingParams(MAX_TOKENS)
        self._rollouts = PartialRollouts(self._engine, self._renderer, settings, sampling, seed=seed)
        self._examples = ExampleStream(BUILTIN_TASKS, seed, GROUPS)
        self._trainer = Trainer(
            self._policy,
            TrainingConfig(loss=loss, learning_rate=LEARNING_RATE, sequences_per_step=SEQUENCES_PER_STEP),
            temperature=1.0,
            max_tokens=MAX_TOKENS,
            seed=seed,
            render=self._renderer.prompt_ids,
        )
        self.clipped: list[float] = []

    def round(self) -> None:
        groups = [
            self._scored(answered.example, answered.completions)
            for answered in self._rollouts.round(self._examples)
        ]
        done = self._trainer.train(groups, [])
        self.clipped.append(done.clipped_share or 0.0)
        self._rollouts.set_policy(self._policy.update())

    def held_out_reward(self) -> float:
        examples = [e for task in BUILTIN_TASKS for e in islice(draw_held_out(task, 0), HELD_OUT)]
        found = collect(self._engine, self._renderer, examples, 1, SamplingParams(MAX_TOKENS), seed=0)
        rewards = [self._scored(one.example, one.completions).reward_mean for one in found]
        return round(fmean(reward for reward in rewards if reward is not None), 4)

    def _scored(self, example: Example, completions: Sequence[Any]) -> RolloutGroup:
        texts = [completion.text for completion in completions]
        scores = score_strictly(TASKS[example.key.task], example, texts)
        return RolloutGroup(example, tuple(completions), scores, "me", self._policy.version)


def main() -> None:
    options = arguments(__doc__ or "")
    seeds, rounds = ((0,), QUICK_ROUNDS) if options.quick else (SEEDS, ROUNDS)
    runs: dict[str, list[Run]] = {loss: [] for loss in SEAMS["loss"].ours}
    with TemporaryDirectory() as folder:
        model = build_tiny(Path(folder))
        for seed in seeds:
            for loss in SEAMS["loss"].ours:
                runs[loss].append(one := run(model, loss, seed, rounds))
                print(f"{loss} seed {seed}: {one}", flush=True)
    rewards = {f"reward_{loss}": [one.curve[-1] for one in found] for loss, found in runs.items()}
    rewards = {"worst_loss_reward": [reward for found in rewards.values() for reward in found], **rewards}
    report(
        "losses",
        {name: min(values) for name, values in rewards.items()},
        {name: (min(values), max(values)) for name, values in rewards.items()},
        options.json,
        {"rounds": rounds, "curves": {loss: [one.curve for one in found] for loss, found in runs.items()}},
    )


def run(model: Path, loss: str, seed: int, rounds: int) -> Run:
    learner = Learner(model, loss, seed)
    found = Run([learner.held_out_reward()])
    for number in range(1, rounds + 1):
        found.cpu_s += cpu_seconds(learner.round)
        if number % CURVE_EVERY == 0:
            found.curve.append(learner.held_out_reward())
    found.clipped = fmean(learner.clipped)
    return found


def write_golden() -> None:
    """The curves that tests/golden/test_losses_learn.py compares with."""
    sys.path.insert(0, str(ROOT))
    from tests.golden import tabular

    curves = {
        loss: [[round(reward, 4) for reward in tabular.learning_curve(loss, seed)] for seed in tabular.SEEDS]
        for loss in SEAMS["loss"].ours
    }
    head = {
        "command": "python benchmarks/losses.py --golden",
        "rounds": tabular.ROUNDS,
        "curve_every": tabular.CURVE_EVERY,
        "seeds": tabular.SEEDS,
    }
    lines = ",\n".join(f"    {json.dumps(loss)}: {json.dumps(found)}" for loss, found in curves.items())
    text = json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "curves": {{\n{lines}\n  }}\n}}\n'
    (ROOT / "tests" / "golden" / "losses.json").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    if sys.argv[1:] == ["--golden"]:
        write_golden()
    else:
        main()
