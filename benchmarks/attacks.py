"""What strangers can do to a node: every attack that worked on it once, against real nodes and real daemons.

    python benchmarks/attacks.py [--quick] [--json FILE] [--only NAME]

A victim and an honest node train on each other's groups (tiny policy, loopback); each attacker is a process
with daemons of its own. Each attack is made twice, and the victim's rounds per second are measured before and
after: quiet, attack, attack, quiet, and so on with the next. Claims: the worst ratio of those under attack to
those around it (`worst_rounds_ratio`), and the same by the CPU seconds of the victim and its daemon
(`worst_cpu_ratio`); restarts of either daemon that no memory watchdog asked for; the most memory of node and
daemon above the undisturbed peak; and what liars take off the held-out reward, against runs from the same
checkpoint without them: one that announces wrong answers as right, and one whose right answers are all to one
task. Those who reason wrongly towards right answers are not among them: see docs/trust.md.

The victim has a core to itself (attacks_swarm.py). Where others use that core, or where `control_load`, which
keeps the core beside the honest node busy and attacks nobody, changes the victim's pace, the machine cannot
tell what an attack costs: then `measurable` is false, `why` says it, the claims of pace are left out, and the
exit status is 3. An attack below 0.85 is made twice more.

It ends within ten minutes. What there was no time for is in `left_out`; the claims that need it are left out
too, and the exit status is 3.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NoReturn

from attackers.handle import Attacker
from attacks_reward import Drop, RewardRuns
from attacks_swarm import ATTACKERS_PREFIX, Swarm, Window, busy_share
from common import MODELS, TimeIsOver, at_most, elapsed_s, machine, parts, report

from swarmnode.extensions.demonstration.tiny import build_tiny
from tests.warm_start import WarmStart

ATTACKS = (
    "ecdsa_author",
    "short_provider",
    "junk_gossip",
    "slow_bodies",
    "bodies_that_never_come",
    "crowd",
    "page_flood",
    "serve_flood",
    "finish_lies",
    "too_long_bodies",
    "longer_bodies",
    "half_open",
    "oversized_gossip",
    "provider_flood",
    "subscribe_flood",
)
"""Those that leave a daemon large come last."""
QUICK_ATTACKS = ("junk_gossip", "crowd", "provider_flood")
CONTROL = "control_load"
DOUBTFUL_RATIO = 0.85
ATTACKS_WITHIN_S = 380.0
"""Of the start. An attack that is late is made once; later than this none is begun."""
OVER_AFTER_S = 570.0
"""Of the start: whatever is under way then is given up."""
MOST_OTHERS_SHARE = 0.1
"""Of the victim's core that others may use, in the median of the windows without an attack."""
MOST_CONTROL_ERROR = 0.1
"""By which `control_load` may change the victim's pace."""
MOST_BUSY_BEFORE = 0.25
"""Of the cores that this may use, before anything is begun: it would take nine minutes to learn the same."""
LOOK_BEFORE_S = 3.0
SERVE_LEAD_S = 9.0
"""Of `serve_flood` before it counts: guests of an engine that rested may have two seconds of it at once."""
STEADY_WITHIN, MOST_WARM_UP_WINDOWS = 0.05, 6
"""Of its pace, from one quiet window to the next; windows before the first attack that may differ by more."""
REWARD, KILLED = "reward", "replayed_after_kill"
NOT_MEASURABLE = 3
"""Exit status."""
LIARS = ("false_claims", "one_sided")
"""Whose answers the default rule reads: it asks its own judge about each and keeps the right ones."""
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


FULL = Timing(0.5, 3.5, 1.5, 4.5, base_rounds=40, rounds=50, repeats=2)
QUICK = Timing(0.5, 2.0, 1.0, 3.0, base_rounds=5, rounds=5, repeats=1)


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


@dataclass(frozen=True, slots=True)
class Under:
    """The victim under one attack."""

    window: Window
    restarts: int
    by_watchdog: int
    peak_mib: float
    connected_after: bool | None = None


@dataclass
class Findings:
    """What was measured so far."""

    rows: list[list[Row]] = field(default_factory=list[list[Row]])
    drops: dict[str, Drop] = field(default_factory=dict[str, Drop])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    others_shares: list[float | None] = field(default_factory=list[float | None])

    def left_out(self, names: Sequence[str], *, whole: bool) -> list[str]:
        """What was to be measured, and was not."""
        known = {each[0].name for each in self.rows}
        missing = [name for name in (*names, *(("replay_victim",) if whole else ())) if name not in known]
        if whole and not self.drops:
            missing.append(REWARD)
        if whole and KILLED not in self.extra:
            missing.append(KILLED)
        return missing


class Measuring:
    """Attacks a swarm and reads it."""

    def __init__(self, swarm: Swarm, timing: Timing) -> None:
        self._swarm = swarm
        self._timing = timing
        self.undisturbed = self._quiet_before = self._steady()
        self.others_shares = [self.undisturbed.others_share]
        self._restarts, self._looked_at = swarm.restarts(), time.time()

    def attack(self, name: str, times: int) -> list[Row]:
        """One attack, so many times, between two windows without one."""
        return self._rows(name, [self._attacked(name, last=left == 0) for left in reversed(range(times))])

    def told(self, name: str, act: Callable[[], None]) -> list[Row]:
        """Something that is done at once, by an attacker that runs already."""
        since = time.time()
        act()
        time.sleep(max(0.0, since + self._timing.attack_s - time.time()))
        return self._rows(name, [self._under(since)])

    def _attacked(self, name: str, *, last: bool) -> Under:
        timing, swarm = self._timing, self._swarm
        lead_s = SERVE_LEAD_S if name == "serve_flood" else timing.lead_s
        seconds = lead_s + timing.attack_s
        with (
            swarm.flooded_port(name) as port,
            Attacker(name, swarm.addresses, seconds=seconds, about=port, prefix=ATTACKERS_PREFIX) as attacker,
        ):
            with swarm.honest_held():
                attacker.wait_for("ready")
            time.sleep(lead_s)
            since = time.time()
            time.sleep(timing.attack_s)
            under = self._under(since)
            # Who is let stay is looked at for seconds: once is enough.
            return replace(under, connected_after=attacker.done()["connected_after"]) if last else under

    def _quiet(self) -> Window:
        time.sleep(self._timing.settle_s)
        since = time.time()
        time.sleep(self._timing.quiet_s)
        return self._read(since, time.time())

    def _steady(self) -> Window:
        """The first window whose pace is that of the one before. It falls while its book fills."""
        window = self._quiet()
        for _ in range(MOST_WARM_UP_WINDOWS):
            before, window = window, self._quiet()
            if abs(1 - window.rounds_per_s / before.rounds_per_s) < STEADY_WITHIN:
                break
        return window

    def _read(self, since: float, until: float) -> Window:
        # The round under way at the end counts by its share, which is known once it is over.
        round = self._swarm.victim.status()["progress"]["round"]
        self._swarm.victim.until_round(round + 1)
        return self._swarm.window(since, until)

    def _under(self, since: float) -> Under:
        """The window that ends now; restarts and memory since the one before, so that none is missed."""
        window = self._read(since, time.time())
        before, looked_at = self._restarts, self._looked_at
        self._restarts, self._looked_at = self._swarm.restarts(), time.time()
        watchdog, others = (after - earlier for after, earlier in zip(self._restarts, before, strict=True))
        peak_mib = self._swarm.window(looked_at, self._looked_at).peak_mib
        return Under(window, others, watchdog, peak_mib)

    def _rows(self, name: str, attacked: Sequence[Under]) -> list[Row]:
        # The next attack shares the later window.
        before, self._quiet_before = self._quiet_before, self._quiet()
        self.others_shares.append(self._quiet_before.others_share)
        around = (before, self._quiet_before)
        quiets = [each.rounds_per_cpu_s for each in around if each.rounds_per_cpu_s is not None]
        quiet = fmean(quiets) if quiets else None
        return [
            Row(
                name,
                fmean(each.rounds_per_s for each in around),
                under.window.rounds_per_s,
                own / quiet if (own := under.window.rounds_per_cpu_s) is not None and quiet else None,
                under.restarts,
                under.by_watchdog,
                under.peak_mib - self.undisturbed.peak_mib,
                under.connected_after,
            )
            for under in attacked
        ]


def measure(measuring: Measuring, names: Sequence[str], rows: list[list[Row]], *, times: int) -> None:
    """Add the rows of each attack to `rows`: as many as `times`, one where it is late, more where they are
    doubtful."""
    began_s = elapsed_s()
    for name, share in parts(names):
        if elapsed_s() > ATTACKS_WITHIN_S:
            return
        late = elapsed_s() > began_s + share * (ATTACKS_WITHIN_S - began_s)
        found = measuring.attack(name, 1 if late else times)
        if times > 1 and ratio_of(found) < DOUBTFUL_RATIO and elapsed_s() < ATTACKS_WITHIN_S:
            found += measuring.attack(name, times)
        rows.append(found)
        for row in found:
            show(row)


def ratio_of(rows: Sequence[Row]) -> float:
    """Pace under attack over that around it, all of an attack's windows together."""
    return sum(row.under for row in rows) / max(1e-9, sum(row.quiet for row in rows))


def cpu_ratio_of(rows: Sequence[Row]) -> float | None:
    found = [row.cpu_ratio for row in rows if row.cpu_ratio is not None]
    return fmean(found) if found else None


def why_not_measurable(others_shares: Sequence[float | None], rows: Sequence[Sequence[Row]]) -> str | None:
    """Why these windows cannot tell what an attack costs; None: they can.

    >>> why_not_measurable([0.02, 0.3, 0.4], [])
    "others used 30 % of the victim's core"
    """
    known = [share for share in others_shares if share is not None]
    if not known:
        return "the victim has no core to itself, or nobody tells what that is used for"
    if median(known) > MOST_OTHERS_SHARE:
        return f"others used {median(known):.0%} of the victim's core".replace("%", " %")
    for each in rows:
        if each[0].name == CONTROL and abs(1 - ratio_of(each)) > MOST_CONTROL_ERROR:
            return f"a busy process beside it, which attacks nobody, left {ratio_of(each):.2f} of its pace"
    return None


def measure_with_replay(
    swarm: Swarm, measuring: Measuring, names: Sequence[str], rows: list[list[Row]], *, times: int
) -> None:
    """All that, and at its end what the victim said meanwhile is said once more to the honest node."""

    def charged() -> int:
        return swarm.honest.status()["exchange"]["dropped"].get("rate_limited", 0)

    with Attacker("replay_victim", swarm.addresses, seconds=900) as recorder:

        def replay() -> None:
            recorder.tell("again")
            recorder.wait_for("replayed")

        recorder.wait_for("ready")
        recorded_from = time.monotonic()
        measure(measuring, names, rows, times=times)
        time.sleep(max(0.0, recorded_from + FORGOTTEN_S - time.monotonic()))
        before = charged()
        (row,) = replayed = measuring.told("replay_victim", replay)
        show(row)
        rows.append(replayed)
        print(f"  of the victim's own headers {charged() - before} were charged to it as too many")


def replay_after_kill(swarm: Swarm, warm: WarmStart) -> int:
    """How many of forty old groups a node takes again after SIGKILL."""
    saving = ("--set", "node.checkpoint_every=2", "--seed", "5")  # the later of two options counts

    def accepted() -> int:
        return node.status()["exchange"]["accepted"]

    node = swarm.start("killed", *saving, warm=warm)
    address = node.running().addresses[0]
    with Attacker("replay_own", [address], seconds=120, prefix=ATTACKERS_PREFIX) as attacker:
        attacker.wait_for("announced")
        node.until(lambda: accepted() >= TAKEN_BEFORE_KILL)
        time.sleep(KEPT_AFTER_S)
        node.vanish()
        node = swarm.start("killed", *saving, warm=warm)
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


def reward_drops(swarm: Swarm, folder: Path, model: Path, warm: WarmStart, timing: Timing) -> dict[str, Drop]:
    """What each liar takes, in runs by turns with such that nobody lies to."""
    runs = RewardRuns(swarm, folder, model, warm, base_rounds=timing.base_rounds, rounds=timing.rounds)
    runs.make_base()
    attacks = (None, *LIARS)
    made = [runs.run(attack) for _ in range(timing.repeats) for attack in attacks]
    swarm.honest.end()
    rewards = runs.rewards(made)
    undisturbed = tuple(rewards[:: len(attacks)])
    return {
        liar: Drop(
            undisturbed,
            tuple(rewards[place :: len(attacks)]),
            median(run.strangers_share for run in made[place :: len(attacks)]),
        )
        for place, liar in enumerate(LIARS, 1)
    }


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
    parser.add_argument("--quick", action="store_true", help="three attacks, once each, no runs of reward")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--only", action="append", choices=ATTACKS, help="these attacks, nothing else")
    options = parser.parse_args()
    quick = options.quick
    timing = QUICK if quick else FULL
    names = options.only or (QUICK_ATTACKS if quick else (CONTROL, *ATTACKS))
    print(machine()["cpu"], flush=True)
    busy = busy_share(LOOK_BEFORE_S)
    if busy > MOST_BUSY_BEFORE:
        why = f"others use {busy:.0%} of the cores before anything is begun".replace("%", " %")
        report("attacks", {}, {}, options.json, {"measurable": False, "why": why})
        give_up(why)
    found = Findings()
    whole = not quick and not options.only
    why = None
    try:
        with at_most(OVER_AFTER_S - elapsed_s()), tempfile.TemporaryDirectory() as temporary:
            find(found, Path(temporary), names, timing, whole=whole)
    except TimeIsOver:
        print(f"{OVER_AFTER_S:.0f} s are over", file=sys.stderr)
    finally:
        left_out = found.left_out(names, whole=whole)
        why = why_not_measurable(found.others_shares, found.rows)
        finish(found.rows, found.drops, found.extra, why, options.json, left_out)
    if left_out:
        print(f"there was no time for {', '.join(left_out)}", file=sys.stderr)
    if why is not None:
        give_up(why)
    if left_out:
        sys.exit(NOT_MEASURABLE)


def find(found: Findings, folder: Path, names: Sequence[str], timing: Timing, *, whole: bool) -> None:
    """Measure everything into `found`, what the claims are about first."""
    model = build_tiny(MODELS)
    # What was forked is ended before the process that forked it.
    with ExitStack() as stack, Swarm(folder, model) as swarm:
        measuring = Measuring(swarm, timing)
        found.others_shares = measuring.others_shares
        print(
            f"undisturbed: {measuring.undisturbed.rounds_per_s:.2f} rounds/s, "
            f"{measuring.undisturbed.peak_mib:.0f} MiB of node and daemon\n{HEAD}",
            flush=True,
        )
        if not whole:
            measure(measuring, names, found.rows, times=timing.repeats)
            return
        measure_with_replay(swarm, measuring, names, found.rows, times=timing.repeats)
        swarm.victim.end()
        warm = stack.enter_context(closing(WarmStart()))
        found.drops = reward_drops(swarm, folder, model, warm, timing)
        for liar, drop in found.drops.items():
            print(
                f"held-out reward after {timing.rounds} rounds more: undisturbed {drop.undisturbed}, "
                f"beside {liar} {drop.attacked}, whose share of the external groups was "
                f"{drop.strangers_share:.2f}",
                flush=True,
            )
        found.extra[KILLED] = replay_after_kill(swarm, warm)
        print(f"of 40 old groups, {found.extra[KILLED]} were taken again after SIGKILL")


def give_up(why: str) -> NoReturn:
    print(f"pace could not be measured: {why}; run it where nothing else runs", file=sys.stderr)
    sys.exit(NOT_MEASURABLE)


def finish(
    rows: list[list[Row]],
    drops: dict[str, Drop],
    extra: dict[str, Any],
    why: str | None,
    path: Path | None,
    left_out: Sequence[str] = (),
) -> None:
    counted = [each for each in rows if each[0].name != CONTROL]
    singles = [row for each in counted for row in each]
    figures: dict[str, list[float]] = {}
    # The worst of some attacks says nothing about the others.
    all_made = not set(left_out) - {REWARD, KILLED}
    if singles and all_made:
        figures["restarts"] = [sum(row.restarts for row in singles), 0, max(row.restarts for row in singles)]
        figures["worst_memory_mb"] = [f(row.memory_mib for row in singles) for f in (max, min, max)]
    if singles and all_made and why is None:
        ratios = [ratio_of(each) for each in counted]
        figures["worst_rounds_ratio"] = [min(ratios), min(ratios), max(ratios)]
        by_cpu = [found for each in counted if (found := cpu_ratio_of(each)) is not None]
        if by_cpu:
            figures["worst_cpu_ratio"] = [min(by_cpu), min(by_cpu), max(by_cpu)]
    if drops:
        worst = max(drops.values(), key=lambda drop: drop.mean)
        figures["worst_reward_drop"] = [worst.mean, *worst.spread]
    extra |= {
        "measurable": why is None,
        "why": why,
        "left_out": list(left_out),
        "seconds": round(elapsed_s()),
    }
    extra["reward_drops"] = {liar: round(drop.mean, 4) for liar, drop in drops.items()}
    extra["by_attack"] = {
        each[0].name: {
            "ratios": [round(row.ratio, 3) for row in each],
            "cpu_ratios": [row.cpu_ratio and round(row.cpu_ratio, 3) for row in each],
            "restarts": sum(row.restarts for row in each),
            "by_watchdog": sum(row.by_watchdog for row in each),
            "memory_mib": round(max(row.memory_mib for row in each)),
            "connected_after": each[-1].connected_after,
        }
        for each in rows
    }
    claims = {name: value for name, (value, _, _) in figures.items()}
    report("attacks", claims, {name: figure[1:] for name, figure in figures.items()}, path, extra)


if __name__ == "__main__":
    main()
