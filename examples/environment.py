"""An environment as TRL has it: `reset` ends the question, methods are tools, `get_reward` is the reward."""

import random

import swarmnode as sn


class Guessing:
    exchangeable = True  # the same words are always answered alike, so peers can play an episode again

    def reset(self, seed):
        self.number, self.found = random.Random(seed).randrange(8), False
        return "Which number below 8 is it? Ask with guess: 3."

    def guess(self, number: int) -> str:
        """Compares a number with the one that is looked for.

        Args:
            number: What you guess.
        """
        self.found = self.found or number == self.number
        return "yes" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self):
        return float(self.found)


ROWS = [{"prompt": f"Game {number}.\n", "seed": number} for number in range(500)]

if __name__ == "__main__":
    print(sn.run(ROWS, environment=Guessing, rounds=20))
