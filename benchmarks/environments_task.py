"""A safe with two tools: look up what is kept under a name, and turn a word round.

benchmarks/environments.py -> --task environments_task.py -> Safe (reset and its two tools), reward

`get bq` asks for the word under bq, `back bq` for the word backwards. Neither is in the prompt: who does
not call `look` first can only guess.
"""

import hashlib

exchangeable = True


def examples(seed):
    for index in range(512):
        digits = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
        kind, name = ("get", "back")[digits[0] % 2], letters(digits[1:3], 20)
        word = letters(digits[3:6], 20)
        yield {"prompt": f"{kind} {name}", "name": name, "word": word, "backwards": kind == "back"}


def letters(digits, among):
    return "".join(chr(ord("a") + digit % among) for digit in digits)


class Safe:
    """One question about a safe."""

    def reset(self, name, word, backwards, **_):
        self.name, self.word, self.backwards = name, word, backwards

    def look(self, name: str) -> str:
        """Tell the word that is kept under a name.

        Args:
            name: Two letters.
        """
        return self.word if name == self.name else "no"

    def flip(self, word: str) -> str:
        """Turn a word round.

        Args:
            word: The word.
        """
        return word[::-1]


environment = Safe


def reward(completions, word, backwards, **_):
    wanted = [text[::-1] if turned else text for text, turned in zip(word, backwards, strict=True)]
    return [
        float(said[-1]["content"].strip() == text) for said, text in zip(completions, wanted, strict=True)
    ]
