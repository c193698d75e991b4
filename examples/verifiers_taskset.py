"""A taskset of verifiers 0.4 with its own rewards; this file is one: `pip install "verifiers>=0.4,<0.5"`."""

import verifiers.v1 as vf

import swarmnode as sn


class Word(vf.TaskData):
    answer: str


class Reverse(vf.Task[Word]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Words(vf.Taskset[Reverse, vf.TasksetConfig]):
    def load(self):
        for number in range(100):
            yield Reverse(Word(prompt=f"Reverse word{number}.", answer=f"word{number}"[::-1]))


__all__ = ["Words"]

if __name__ == "__main__":
    # The module's name; it is installed or lies in the folder that this is started in.
    print(sn.run("verifiers:owner/verifiers-taskset", rounds=20))
