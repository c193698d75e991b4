"""What strangers can do to a node: every attack that worked on it once, against real nodes and real daemons.

    python benchmarks/attacks.py [--quick] [--json FILE] [--only NAME]

A victim and an honest node train on each other's groups (tiny policy, loopback); each attacker is a process
with daemons of its own. For each attack the victim's rounds per second are measured just before, during and
just after it, in the same run. Claims: the worst ratio of those during it to the mean of the others; restarts
of either daemon that no memory watchdog asked for; the most memory of node and daemon above the undisturbed
peak; and what a liar takes off the held-out reward, against runs from the same checkpoint without it.

The victim has a core to itself (attacks_swarm.py). `control_load` keeps the core beside the honest node busy
and attacks nobody: what it costs is the machine's doing. A row below 0.85 is measured twice more, and the
median of the three counts. `cpu` is the same ratio by the victim's own CPU seconds, for comparison.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from attackers.handle import Attacker
from attacks_reward import Drop, RewardRuns
from attacks_swarm import ATTACKERS_PREFIX, Swarm, Window
from common import machine, report

from swarmnode.model.tiny import build_tiny

ATTACKS = (
    "ecdsa_author",
    "short_provider",
    "junk_gossip",
    "slow_bodies",
    "bodies_that_never_come",
    "crowd",
    "finish_lies",
    "too_long_bodies",
    "longer_bodies",
    "half_open",
    "oversized_gossip",
    "provider_flood",
    "subscribe_flood",
)
"""Those that leave a daemon large come last."""
QUICK_ATTACKS = (
    "ecdsa_author",
    "junk_gossip",
    "slow_bodies",
    "crowd",
    "finish_lies",
    "too_long_bodies",
    "half_open",
    "subscribe_flood",
)
CONTROL = "control_load"
DOUBTFUL_RATIO = 0.85
MEASURED_AGAIN_WITHIN_S = 150.0
"""Of the start: later there would be no time left for it."""
TAKEN_BEFORE_KILL = 4
"""Groups of one author that the node has trained on; most of the forty grow stale, as one author is paced."""

KEPT_AFTER_S = 15.0
"""What a node knows of others is on its disk after ten seconds."""
FORGOTTEN_S = 125.0
"""GossipSub takes a message for a new one after two minutes."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one measurement. An attack is under way for `lead_s` before it counts."""

    settle_s: float
    quiet_s: float
    lead_s: float
    attack_s: float
    base_rounds: int
    rounds: int
    repeats: int


FULL = Timing(1.0, 4.0, 2.0, 7.0, base_rounds=40, rounds=50, repeats=3)
QUICK = Timing(1.0, 3.0, 1.0, 4.0, base_rounds=30, rounds=30, repeats=3)


@dataclass(frozen=True, slots=True)
class Row:
    """What one attack did. None: it does not apply."""

    name: str
    quiet: float
    """Rounds per second before and after the attack, their mean."""
    under: float
    cpu_ratio: float | None
    restarts: int
    by_watchdog: int
    memory_mib: float
    """Above the undisturbed peak."""
    connected_after: bool | None

    @property
    def ratio(self) -> float:
        return self.under / self.quiet if self.quiet else 0.0


class Measuring:
    """Attacks a swarm and reads it."""

    def __init__(self, swarm: Swarm, timing: Timing) -> None:
        self._swarm = swarm
        self._timing = timing
        self.undisturbed = self._quiet_before = self._quiet()

    def attack(self, name: str) -> Row:
        """One attack, between two windows without one."""
        timing, restarts_before = self._timing, self._swarm.restarts()
        began = time.time()
        seconds = timing.lead_s + timing.attack_s
        with Attacker(name, self._swarm.addresses, seconds=seconds, prefix=ATTACKERS_PREFIX) as attacker:
            attacker.wait_for("ready")
            time.sleep(timing.lead_s)
            since = time.time()
            time.sleep(timing.attack_s)
            until = time.time()
            done = attacker.done()
        return self._row(name, since, until, began, restarts_before, done["connected_after"])

    def told(self, name: str, act: Callable[[], None]) -> Row:
        """Something that is done at once, by an attacker that runs already."""
        timing, restarts_before = self._timing, self._swarm.restarts()
        since = time.time()
        act()
        time.sleep(max(0.0, since + timing.attack_s - time.time()))
        return self._row(name, since, time.time(), since, restarts_before, None)

    def _quiet(self) -> Window:
        time.sleep(self._timing.settle_s)
        since = time.time()
        time.sleep(self._timing.quiet_s)
        return self._read(since, time.time())

    def _read(self, since: float, until: float) -> Window:
        # The round under way at the end counts by its share, which is known once it is over.
        round = self._swarm.victim.status()["progress"]["round"]
        self._swarm.victim.until_round(round + 1)
        return self._swarm.window(since, until)

    def _row(
        self,
        name: str,
        since: float,
        until: float,
        began: float,
        restarts_before: tuple[int, int],
        connected_after: bool | None,
    ) -> Row:
        under = self._read(since, until)
        watchdog, others = (
            after - earlier for after, earlier in zip(self._swarm.restarts(), restarts_before, strict=True)
        )
        peak_mib = self._swarm.window(began, time.time()).peak_mib
        # On a machine that others use too, one window says little; the next attack shares the later one.
        before, self._quiet_before = self._quiet_before, self._quiet()
        around = (before, self._quiet_before)
        quiets = [each.rounds_per_cpu_s for each in around if each.rounds_per_cpu_s is not None]
        own, quiet = under.rounds_per_cpu_s, fmean(quiets) if quiets else None
        return Row(
            name,
            fmean(each.rounds_per_s for each in around),
            under.rounds_per_s,
            own / quiet if own is not None and quiet else None,
            others,
            watchdog,
            peak_mib - self.undisturbed.peak_mib,
            connected_after,
        )


def measure(measuring: Measuring, names: Sequence[str], *, again: bool) -> list[list[Row]]:
    """The rows of each attack, one or three of them."""
    began = time.monotonic()
    found: list[list[Row]] = []
    for name in names:
        rows = [measuring.attack(name)]
        late = time.monotonic() > began + MEASURED_AGAIN_WITHIN_S
        if again and rows[0].ratio < DOUBTFUL_RATIO and not late and name != CONTROL:
            rows += [measuring.attack(name) for _ in range(2)]
        found.append(rows)
        for row in rows:
            show(row)
    return found


def measure_with_replay(swarm: Swarm, measuring: Measuring, names: Sequence[str]) -> list[list[Row]]:
    """All that, and at its end what the victim said meanwhile is said once more to the honest node."""

    def charged() -> int:
        return swarm.honest.status()["exchange"]["dropped"].get("rate_limited", 0)

    with Attacker("replay_victim", swarm.addresses, seconds=900) as recorder:

        def replay() -> None:
            recorder.tell("again")
            recorder.wait_for("replayed")

        recorder.wait_for("ready")
        recorded_from = time.monotonic()
        rows = measure(measuring, names, again=True)
        time.sleep(max(0.0, recorded_from + FORGOTTEN_S - time.monotonic()))
        before = charged()
        row = measuring.told("replay_victim", replay)
        show(row)
        print(f"  of the victim's own headers {charged() - before} were charged to it as too many")
    return [*rows, [row]]


def replay_after_kill(swarm: Swarm) -> int:
    """How many of forty old groups a node takes again after SIGKILL."""
    saving = ("--set", "node.checkpoint_every=2", "--seed", "5")  # the later of two options counts

    def accepted() -> int:
        return node.status()["exchange"]["accepted"]

    node = swarm.start("killed", *saving)
    address = node.running().addresses[0]
    with Attacker("replay_own", [address], seconds=120, prefix=ATTACKERS_PREFIX) as attacker:
        attacker.wait_for("announced")
        node.until(lambda: accepted() >= TAKEN_BEFORE_KILL)
        time.sleep(KEPT_AFTER_S)
        node.vanish()
        node = swarm.start("killed", *saving)
        node.until_round(1)
        attacker.tell("again")
        attacker.wait_for("replayed")
        attacker.tell("go on")
        attacker.wait_for("new")
        node.until(lambda: accepted() > 0)
        node.until_round(node.status()["progress"]["round"] + 3)
        taken = accepted() - 1
    node.end()
    return max(0, taken)


def reward_drop(swarm: Swarm, folder: Path, model: Path, timing: Timing) -> Drop:
    runs = RewardRuns(swarm, folder, model, base_rounds=timing.base_rounds, rounds=timing.rounds)
    runs.make_base()
    undisturbed = [runs.undisturbed() for _ in range(timing.repeats)]
    attacked = [runs.attacked_by("finish_lies") for _ in range(timing.repeats)]
    return Drop(tuple(undisturbed), tuple(r for r, _ in attacked), median(share for _, share in attacked))


HEAD = (
    f"{'attack':24} {'quiet':>7} {'under':>7} {'ratio':>6} {'cpu':>6} {'restarts':>9} {'memory':>9}  "
    "connected after"
)


def show(row: Row) -> None:
    cpu = "-" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}"
    connected = {None: "-", True: "yes", False: "no"}[row.connected_after]
    watchdog = f"+{row.by_watchdog}w" if row.by_watchdog else ""
    print(
        f"{row.name:24} {row.quiet:7.2f} {row.under:7.2f} {row.ratio:6.2f} {cpu:>6} "
        f"{f'{row.restarts}{watchdog}':>9} {row.memory_mib:5.0f} MiB  {connected}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter windows, one pair of reward runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--only", action="append", choices=ATTACKS, help="these attacks, nothing else")
    options = parser.parse_args()
    quick = options.quick
    timing = QUICK if quick else FULL
    names = options.only or (QUICK_ATTACKS if quick else (CONTROL, *ATTACKS))
    print(machine()["cpu"], flush=True)
    extra: dict[str, Any] = {}
    drop = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = build_tiny(folder / "models")
        with Swarm(folder, model) as swarm:
            measuring = Measuring(swarm, timing)
            print(
                f"undisturbed: {measuring.undisturbed.rounds_per_s:.2f} rounds/s, "
                f"{measuring.undisturbed.peak_mib:.0f} MiB of node and daemon\n{HEAD}",
                flush=True,
            )
            if quick or options.only:
                rows = measure(measuring, names, again=not quick)
            else:
                rows = measure_with_replay(swarm, measuring, names)
            swarm.victim.end()
            if not quick and not options.only:
                extra["replayed_after_kill"] = replay_after_kill(swarm)
                print(f"of 40 old groups, {extra['replayed_after_kill']} were taken again after SIGKILL")
            if not options.only:
                drop = reward_drop(swarm, folder, model, timing)
                print(
                    f"held-out reward after {timing.rounds} rounds more: undisturbed {drop.undisturbed}, "
                    f"beside a liar {drop.attacked}, whose share of the external groups was "
                    f"{drop.strangers_share:.2f}"
                )
    finish(rows, drop, extra, options.json)


def finish(rows: list[list[Row]], drop: Drop | None, extra: dict[str, Any], path: Path | None) -> None:
    counted = [each for each in rows if each[0].name != CONTROL]
    ratios = [median(row.ratio for row in each) for each in counted]
    singles = [row for each in counted for row in each]
    claims = {
        "worst_rounds_ratio": min(ratios),
        "restarts": sum(row.restarts for row in singles),
        "worst_memory_mb": max(row.memory_mib for row in singles),
    }
    spread = {
        "worst_rounds_ratio": (min(ratios), max(ratios)),
        "restarts": (0, max(row.restarts for row in singles)),
        "worst_memory_mb": (min(row.memory_mib for row in singles), claims["worst_memory_mb"]),
    }
    if drop is not None:
        claims["worst_reward_drop"] = drop.mean
        spread["worst_reward_drop"] = drop.spread
    extra["by_attack"] = {
        each[0].name: {
            "ratios": [round(row.ratio, 3) for row in each],
            "restarts": sum(row.restarts for row in each),
            "by_watchdog": sum(row.by_watchdog for row in each),
            "memory_mib": round(max(row.memory_mib for row in each)),
            "connected_after": each[0].connected_after,
        }
        for each in rows
    }
    report("attacks", claims, spread, path, extra)


if __name__ == "__main__":
    main()
