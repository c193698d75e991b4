"""Questions without answers: what most completions of a group say is taken for right (majority vote)."""

import swarmnode as sn

QUESTIONS = [f"What is {n} times {n + 1}? Answer in \\boxed{{}}." for n in range(2, 100)]

if __name__ == "__main__":
    sn.run(QUESTIONS, "majority_vote", rounds=20)
    print(sn.evaluate(QUESTIONS, "majority_vote", samples=16))
