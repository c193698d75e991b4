"""What an author can do to what a node learns: the same rounds from the same checkpoint, with it and without.

attacks.py -> [reward_drop] -> `swarmnode join` copies, `swarmnode eval` -> held-out reward

Every run continues a copy of one checkpoint beside the same honest node for the same number of rounds, and is
measured on the same held-out draws: 2048 of them, on which the standard error of a mean is about 0.01.
"""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from attackers.handle import Attacker
from attacks_swarm import ATTACKERS_PREFIX, VICTIMS_CORE, Swarm

EVAL_EXAMPLES = 256
"""Per task; there are eight."""
LONGEST_RUN_S = 280.0


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


class RewardRuns:
    """Runs from one checkpoint, which is made once."""

    def __init__(self, swarm: Swarm, folder: Path, model: Path, *, base_rounds: int, rounds: int) -> None:
        self._swarm = swarm
        self._folder = folder
        self._model = model
        self._base_rounds = base_rounds
        self._last_round = base_rounds + rounds
        self._runs = 0

    def make_base(self) -> None:
        self._run("base", self._base_rounds, None)

    def undisturbed(self) -> float:
        return self._measured(None)[0]

    def attacked_by(self, name: str) -> tuple[float, float]:
        """The reward, and the share of the external groups that were the attacker's."""
        return self._measured(name)

    def _measured(self, attack: str | None) -> tuple[float, float]:
        self._runs += 1
        home = f"run-{self._runs}"
        shutil.copytree(self._folder / "base", self._folder / home)
        share = self._run(home, self._last_round, attack)
        return self._reward(home), share

    def _run(self, home: str, rounds: int, attack: str | None) -> float:
        """Returns the attacker's share of the external groups."""
        honest = self._swarm.honest
        arguments = ("--rounds", str(rounds), "--seed", "3", honest.running().addresses[0])
        node = self._swarm.start(home, *arguments, prefix=VICTIMS_CORE)
        with ExitStack() as stack:
            if attack is not None:
                address = node.running().addresses[0]
                attacker = Attacker(attack, [address], seconds=LONGEST_RUN_S, prefix=ATTACKERS_PREFIX)
                stack.enter_context(attacker)
            node.wait(LONGEST_RUN_S)
        trained: dict[str, int] = node.summary()["external_groups_trained"]
        strangers = sum(trained.values()) - trained.get(honest.status()["peer_id"], 0)
        return strangers / max(1, sum(trained.values()))

    def _reward(self, home: str) -> float:
        command = [sys.executable, "-m", "swarmnode", "eval", "--home", str(self._folder / home), "--json"]
        options = ["--model", str(self._model), "--preset", "tiny"]
        examples = ["--set", f"tasks.eval_examples={EVAL_EXAMPLES}"]
        done = subprocess.run([*command, *options, *examples], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])["mean"]
