"""What both sides of benchmarks/grpo.py are given, and how they are asked for one step at a time.

grpo.py -> job as JSON, then a line per step -> [grpo_job] -> grpo_ours.py | grpo_trl.py

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
    dtype: str = "float32"
    """Of the base model and what it computes in: float32 or bfloat16."""
    tuned: bool = True
    """TRL only: as a person would set it who wants speed, instead of as it comes (see grpo_trl.py)."""
    prompt_letters: int = 4

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
    """Waits for a line on standard input before each step, and reports what the step took."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._tokens = 0
        self._started = 0.0

    def wait(self) -> bool:
        """Until the next step is asked for; False when there will be none."""
        go_on = bool(sys.stdin.readline().strip())
        self._started = time.process_time()
        self._tokens = 0
        return go_on

    def sampled(self, tokens: int) -> None:
        """Completion tokens of this step, more of them."""
        self._tokens += tokens

    def done(self) -> None:
        used = time.process_time() - self._started
        answer = {"cpu_s": used, "samples": self._samples, "tokens": self._tokens}
        print(f"STEP {json.dumps(answer)}", flush=True)
