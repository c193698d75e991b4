"""A tiny policy that has seen tools being called, and calls the wrong one half of the time.

turns of the safe (environments_task.py) as questions and answers -> [build] -> a folder for `join --model`

As a real base model does, it knows what a call looks like and what an answer looks like. Which of them this
environment asks for, and when, it has to find out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import environments_task

from swarmnode.extensions.demonstration.tiny import RECIPE, TURN_END, Recipe, build_tiny
from swarmnode.extensions.demonstration.warmup import TrainingPhase
from swarmnode.types import Example, ExampleKey

TURNS = 3


@dataclass(frozen=True, slots=True)
class OneTurn:
    """A warm-up task: what the policy says in one of its turns, after all that was said before."""

    turn: int
    version: str = "1"

    @property
    def name(self) -> str:
        return f"turn{self.turn}"

    def examples(self, seed: int) -> Iterator[Example]:
        for index, row in enumerate(environments_task.examples(seed)):
            said = turns(row["name"], row["word"], row["backwards"])
            if self.turn < len(said):
                before = "".join(f"{one}{TURN_END}\n{seen}\n" for one, seen in said[: self.turn])
                key = ExampleKey(self.name, self.version, seed, index)
                yield Example(key, row["prompt"] + before, {"answer": said[self.turn][0]})

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        return [{"correct": float(text == example.columns["answer"])} for text in completions]


def turns(name: str, word: str, backwards: bool) -> list[tuple[str, str]]:
    """What the best policy says and what it sees, turn by turn."""
    asked = [(f"look: {name}", word)]
    if backwards:
        asked.append((f"flip: {word}", word[::-1]))
    return [*asked, (asked[-1][1], "")]


def recipe() -> Recipe:
    sure = TrainingPhase("learning to call tools", 500, muon_lr=8e-3, adamw_lr=5e-3, ramp_steps=40)
    unsure = TrainingPhase(
        "unlearning certainty", 60, muon_lr=2e-3, adamw_lr=1e-3, ramp_steps=10, mismatched_percent=45
    )
    return replace(RECIPE, phases=(sure, unsure))


def build(folder: Path) -> Path:
    """The policy's folder."""
    return build_tiny(folder, recipe=recipe(), tasks=[OneTurn(turn) for turn in range(TURNS)])
