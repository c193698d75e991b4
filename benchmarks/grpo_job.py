"""What both sides of benchmarks/grpo.py are given, and how they are asked for a few steps at a time.

grpo.py -> job as JSON, then a number of steps per line -> [grpo_job] -> grpo_ours.py | grpo_trl.py

Nothing of swarmnode and nothing of TRL is imported here: each side runs in its own environment.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Job:
    """One model and one size of step."""

    model: str
    """Folder of a saved transformers model with its tokenizer."""
    prompts: int
    """Prompts per step."""
    group: int
    """Completions per prompt."""
    max_tokens: int
    rank: int
    learning_rate: float
    steps: int
    """Most steps that will be asked for."""
    steps_per_turn: int = 1
    """One after another, as in training: the first after a pause finds cold caches."""
    dtype: str = "float32"
    """What the base model is loaded in and computes in: float32 or bfloat16."""
    tuned: bool = True
    """False: precision and gradient checkpointing as either side chooses them where nothing is set."""
    prompt_letters: int = 4
    kernels: bool = True
    """False: our side without its C kernels."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def job_from_command_line() -> Job:
    return Job(**json.loads(sys.argv[1]))


def prompts(job: Job) -> Iterator[str]:
    """Different questions of the kind the tiny policy knows, for all steps."""
    rng = random.Random(0)
    for _ in range(job.prompts * job.steps):
        yield f"rev {''.join(rng.choices(LETTERS, k=job.prompt_letters))}="


def reward(text: str) -> float:
    """The share of vowels: any text has one, so every step has a gradient to take."""
    return sum(letter in "aeiou" for letter in text) / len(text) if text else 0.0


class Turns:
    """Waits for a line on standard input before every few steps, and reports what those took."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._steps = self._left = 0
        self._tokens = 0
        self._started = 0.0

    def wait(self) -> bool:
        """Until the next step may begin; False when there will be none."""
        if not self._left:
            asked = sys.stdin.readline().strip()
            if not asked:
                return False
            self._steps = self._left = int(asked)
            self._tokens = 0
            self._started = time.process_time()
        self._left -= 1
        return True

    def sampled(self, tokens: int) -> None:
        """Completion tokens of this step, more of them."""
        self._tokens += tokens

    def done(self) -> None:
        """A step has ended."""
        if self._left:
            return
        used = time.process_time() - self._started
        answer = {"cpu_s": used, "samples": self._samples * self._steps, "tokens": self._tokens}
        print(f"STEP {json.dumps(answer)}", flush=True)
