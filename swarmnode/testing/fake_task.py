"""A task without a model to answer it.

[FakeTask] -> FakeLearner, tests
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from swarmnode.types import Example, ExampleKey


class FakeTask:
    """Sums of two digits: endless, instant, judged by exact match."""

    name = "sum"
    version = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        rng = random.Random(seed)
        for index in range(4096):
            a, b = rng.randrange(1000), rng.randrange(1000)
            yield Example(
                ExampleKey(self.name, self.version, seed, index), f"{a}+{b}=", {"answer": str(a + b)}
            )

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        return [{"correct": float(text == example.columns["answer"])} for text in completions]
