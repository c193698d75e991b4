"""What an author can do to what a node learns: the same rounds from the same checkpoint, with it and without.

attacks.py -> [RewardRuns] -> `swarmnode join` copies, `swarmnode eval` -> held-out reward

Every run continues a copy of one checkpoint beside the same honest node for the same number of rounds, and is
measured on the same held-out draws: 2048 of them, on which the standard error of a mean is about 0.01. All
are measured together, at the end: beside a run that would take the core of the honest node. Nodes begin
where their imports have ended (tests/warm_start.py).
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from attackers.handle import Attacker
from attacks_swarm import ATTACKERS_PREFIX, OTHERS_CORE, VICTIMS_CORE, Swarm

from tests.warm_start import WarmProcess, WarmStart

EVAL_EXAMPLES = 256
"""Per task; there are eight."""
LONGEST_RUN_S = 280.0
LONGEST_EVALUATIONS_S = 120.0


@dataclass(frozen=True, slots=True)
class Drop:
    """Held-out rewards after equal rounds, run by run."""

    undisturbed: tuple[float, ...]
    attacked: tuple[float, ...]
    strangers_share: float
    """Of the external groups that the attacked runs trained on, the attacker's."""

    @property
    def mean(self) -> float:
        return fmean(self.undisturbed) - fmean(self.attacked)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest difference of a pair."""
        differences = [before - after for before in self.undisturbed for after in self.attacked]
        return min(differences), max(differences)


@dataclass(frozen=True, slots=True)
class Run:
    """One run that ended, not yet measured."""

    home: str
    strangers_share: float
    """Of the external groups that it trained on, the attacker's."""


class RewardRuns:
    """Runs from one checkpoint, which is made once."""

    def __init__(
        self, swarm: Swarm, folder: Path, model: Path, warm: WarmStart, *, base_rounds: int, rounds: int
    ) -> None:
        self._swarm = swarm
        self._folder = folder
        self._model = model
        self._warm = warm
        self._base_rounds = base_rounds
        self._last_round = base_rounds + rounds
        self._runs = 0

    def make_base(self) -> None:
        self._run("base", self._base_rounds, None)

    def run(self, attack: str | None) -> Run:
        """Continue a copy of the checkpoint, beside this attacker or none."""
        self._runs += 1
        home = f"run-{self._runs}"
        shutil.copytree(self._folder / "base", self._folder / home)
        return self._run(home, self._last_round, attack)

    def rewards(self, runs: Sequence[Run]) -> list[float]:
        """Return the held-out reward of each run, measured on both cores at once."""
        cores = (VICTIMS_CORE, OTHERS_CORE)
        started = [self._evaluate(run, cores[number % 2]) for number, run in enumerate(runs)]
        until_s = time.monotonic() + LONGEST_EVALUATIONS_S
        try:
            return [self._reward(run, process, until_s) for run, process in zip(runs, started, strict=True)]
        finally:
            for process in started:
                process.kill()

    def _run(self, home: str, rounds: int, attack: str | None) -> Run:
        honest = self._swarm.honest
        arguments = ("--rounds", str(rounds), "--seed", "3", honest.running().addresses[0])
        node = self._swarm.start(home, *arguments, warm=self._warm)
        _keep_on(node.process.pid, VICTIMS_CORE)
        with ExitStack() as stack:
            if attack is not None:
                address = node.running().addresses[0]
                attacker = Attacker(attack, [address], seconds=LONGEST_RUN_S, prefix=ATTACKERS_PREFIX)
                stack.enter_context(attacker)
            node.wait(LONGEST_RUN_S)
        trained: dict[str, int] = node.summary()["external_groups_trained"]
        strangers = sum(trained.values()) - trained.get(honest.status()["peer_id"], 0)
        return Run(home, strangers / max(1, sum(trained.values())))

    def _evaluate(self, run: Run, core: tuple[str, ...]) -> WarmProcess:
        home = self._folder / run.home
        command = ["eval", "--home", str(home), "--json", "--model", str(self._model), "--preset", "tiny"]
        examples = ["--set", f"tasks.eval_examples={EVAL_EXAMPLES}"]
        with (home / "eval.out").open("w") as out, (home / "eval.err").open("w") as err:
            process = self._warm.start([*command, *examples], out=out, err=err)
        _keep_on(process.pid, core)
        return process

    def _reward(self, run: Run, process: WarmProcess, until_s: float) -> float:
        code = process.wait(max(0.0, until_s - time.monotonic()))
        out, err = ((self._folder / run.home / name).read_text() for name in ("eval.out", "eval.err"))
        assert code == 0, err
        return json.loads(out.splitlines()[-1])["mean"]


def _keep_on(pid: int, core: tuple[str, ...]) -> None:
    """Keep a process that has just been forked on one core, with all that it starts."""
    if core:
        os.sched_setaffinity(pid, {int(core[-1])})
