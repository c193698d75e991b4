"""A learner without torch.

FakeTask -> [FakeLearner] -> node.py, as a real learner would be
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from copy import deepcopy

from swarmnode.errors import StorageError
from swarmnode.exchange.library.signed_group import Origin
from swarmnode.node.catching_up import RoundMix
from swarmnode.node.learner import Generation, Resumed, RoundRollouts
from swarmnode.node.workers import CheckpointWriter
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.task import score_strictly
from swarmnode.testing.fake_task import FakeTask
from swarmnode.training.records import Counters, Evaluation, TrainReport
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, one_span


class FakeLearner:
    """A `Learner` that answers right more often the more it has trained, and remembers all it was given.

    `disk` is the list its checkpoints go to: hand it to another FakeLearner and that one resumes.
    `full_disk` makes every save fail. While `disk_is_fast` is cleared, a save is under way until it is set;
    otherwise it is on the disk before anyone looks.
    """

    def __init__(
        self,
        author: str,
        *,
        seed: int = 0,
        groups: int = 4,
        group_size: int = 4,
        round_s: float = 0.0,
        disk: list[tuple[int, Counters]] | None = None,
        full_disk: bool = False,
    ) -> None:
        self.author = author
        self.trained: list[tuple[Sequence[RolloutGroup], Sequence[RolloutGroup]]] = []
        self.disk = [] if disk is None else disk
        self.full_disk = full_disk
        self.disk_is_fast = threading.Event()
        self.disk_is_fast.set()
        self._writer = CheckpointWriter(self._write)
        self._task = FakeTask()
        self._seed, self._groups, self._group_size, self._round_s = seed, groups, group_size, round_s
        self._version = 0
        self.generates_with = 0
        """The policy version that rollouts come from."""
        self.to_answer: list[ExampleKey] = []
        """Examples of others that it was told to answer, which it does not."""
        self.mixes: list[RoundMix | None] = []
        """Mixes that rounds were to be made of, as it was told."""
        self._interrupted = threading.Event()
        self.closed = False
        self.rests = 0
        """Times that it gave memory back."""

    @property
    def policy_version(self) -> int:
        return self._version

    def resume(self) -> Resumed | None:
        if not self.disk:
            return None
        self._version, counters = self.disk[-1]
        return Resumed(counters)

    def use_newest_policy(self) -> None:
        self.generates_with = self._version

    def rest(self) -> None:
        self.rests += 1

    def answer_too(self, examples: Sequence[ExampleKey]) -> None:
        self.to_answer += examples

    def catch_up(self, mix: RoundMix | None) -> None:
        self.mixes.append(mix)

    def origins(self) -> Mapping[Origin, int]:
        """It keeps whatever it was given."""
        return Counter((group.author, group.example.key) for _, others in self.trained for group in others)

    def rollouts(self, number: int) -> RoundRollouts:
        started = time.perf_counter()
        complete = not self._interrupted.wait(self._round_s)
        examples = draw_round([self._task], self._seed, number, self._groups)
        groups = tuple(self._answer(example) for example in examples) if complete else ()
        tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
        return RoundRollouts(groups, tokens, time.perf_counter() - started, complete, Generation())

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        self.trained.append((own, external))
        self._version += 1
        return TrainReport(
            own_groups=len(own),
            external_groups=len(external),
            optimizer_steps=1,
            loss=0.0,
        )

    def evaluate(self) -> Evaluation | None:
        return None if self._interrupted.is_set() else Evaluation({"sum": self._skill()}, self._skill())

    def save(self, counters: Counters) -> Future[str]:
        written = self._writer.submit((self._version, deepcopy(counters)))
        if self.disk_is_fast.is_set():
            wait([written])
        return written

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._writer.close()
        self.closed = True

    def _write(self, snapshot: tuple[int, Counters]) -> str:
        self.disk_is_fast.wait()
        if self.full_disk:
            raise StorageError("the disk is full", hint="free space")
        self.disk.append(snapshot)
        return f"round-{snapshot[1].round}"

    def _skill(self) -> float:
        return 1 - 0.5 ** (1 + self._version / 10)

    def _answer(self, example: Example) -> RolloutGroup:
        rng = random.Random(f"{self.author}:{example.key}")
        right, wrong = str(example.columns["answer"]), "0"
        # The first is right and the last is wrong, so that every group has a gradient.
        middle = [right if rng.random() < self._skill() else wrong for _ in range(self._group_size - 2)]
        texts = [right, *middle, wrong]
        completions = tuple(
            Completion(text, tuple(map(ord, text)), None, one_span(self._version, len(text)), "stop")
            for text in texts
        )
        scores = score_strictly(self._task, example, texts)
        return RolloutGroup(example, completions, scores, self.author, self._version)
