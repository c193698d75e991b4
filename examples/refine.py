"""Parallel-distill-refine (PDR): several drafts, what is worth keeping of them, and an answer made from that.

One episode is the whole of it, so the policy learns to draft what helps it later. It is rewarded for the end.
"""

import swarmnode as sn

AGAIN = "Solve it again, in another way."
DISTILL = "Sum up in a few lines: where do your drafts agree, and which step is doubtful?"
REFINE = "Now give the answer, and nothing else."


class Refining:
    exchangeable, most_turns, drafts = True, 5, 3

    def reset(self, answer):
        self.answer, self.turn = answer, 0
        return ""

    def step(self, said):
        self.turn += 1
        say = [AGAIN] * (self.drafts - 1) + [DISTILL, REFINE, ""]
        over = self.turn == len(say)
        return say[self.turn - 1], float(over and said.strip() == self.answer), over, {}


ROWS = [{"prompt": f"What is {n} * {n + 7}?\n", "answer": str(n * (n + 7))} for n in range(11, 99)]

if __name__ == "__main__":
    print(sn.run(ROWS, environment=Refining, rounds=20))
