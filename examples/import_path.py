"""A task that is a class, by its import path: of an installed package, or of a file as here."""

import swarmnode as sn
from swarmnode.types import Example, ExampleKey


class Doubles:
    name, version = "doubles", "1"

    def examples(self, seed):
        for index in range(1000):
            key = ExampleKey(self.name, self.version, seed, index)
            yield Example(key, f"Double {seed % 100 + index}.", {"answer": str(2 * (seed % 100 + index))})

    def score(self, example, completions):
        return [{"right": float(text.strip() == example.columns["answer"])} for text in completions]


if __name__ == "__main__":
    print(sn.run(f"{__file__}:Doubles", rounds=20))
