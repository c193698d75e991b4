"""Liars in a swarm: five honest specialists and three attackers, attack by attack, defence by defence.

ATTACKS (swarmnode/testing/attackers.py) x WORLDS x defences -> runs of sapo.py -> reward against alone

Worlds (sapo_worlds.py): `step`, whose policies need the steps that no judge reads, and `lax`, whose judge
takes anything before the answer. Defences: both as shipped; `mended` without measuring authors; `measured`
without mending; `open` without either (sapo_own_rules.py). The honest five alone, and among themselves with
nobody lying, are what is compared with. All at one learning rate; what is known of a run is kept
(sapo_store.py), so that the same command goes on where it was. By default, attacks that need no time to
unfold are compared over their first rounds only; `--table` is the whole of it, in hours.

    python benchmarks/liars.py [--quick] [--json FILE] [--markdown FILE] [--seeds 1] [--minutes 9]
                               [--attacks wrong_steps,...] [--worlds step,lax] [--table]
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from common import machine, report
from sapo import names_in
from sapo_claims import gain_kept
from sapo_models import models_of
from sapo_plan import Outcome, Run
from sapo_store import outcomes
from sapo_swarms import SWARMS, WORLDS
from sapo_table import ratio

from swarmnode.testing.attackers import ATTACKS

RATE = 2e-3
ROUNDS, SHORT_ROUNDS, QUICK_ROUNDS = 60, 24, 12

UNFOLDING = ("wrong_steps", "adaptive", "sleeper")
"""Attacks that are run for all rounds in any case."""

DEFENCES = {
    "both": "book",
    "mended": "book_unmeasured",
    "measured": "book_unmended",
    "open": "book_open",
}
"""Rules of sapo_rules.py by which defences they have."""

TOLD_APART = ("wrong_steps", "sprinkled")
"""Attacks that are run without each defence, too: one for either."""

LIES = [name for name in ATTACKS if name != "honest"]

Known = dict[Run, Outcome]


def main() -> None:
    options = arguments()
    until_s = time.monotonic() + 60 * options.minutes
    print(f"on {machine()['cpu']}", flush=True)
    runs = list(runs_of(options))
    for swarm in dict.fromkeys(run.swarm for run in runs):
        models_of(SWARMS[swarm])
    known = outcomes(
        runs,
        fresh=options.fresh,
        any_code=options.any_code,
        until_s=until_s,
        workers=options.workers,
        show=lambda line: print(line, flush=True),
    )
    text = markdown(known, options)
    print(text, flush=True)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    rows = [
        {
            "swarm": run.swarm,
            "rule": run.rule,
            "seed": run.seed,
            "cumulative": one.cumulative,
            "last": one.last,
        }
        for run, one in known.items()
    ]
    report("liars", claims(known, options), {}, options.json, {"rows": rows})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="wrong steps in one world, a few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    parser.add_argument("--attacks", type=names_in(dict(ATTACKS)), help="these only, joined by commas")
    parser.add_argument("--worlds", type=names_in(dict.fromkeys(WORLDS)), help="these only (step)")
    parser.add_argument(
        "--table", action="store_true", help="every attack for all rounds, and without each defence, too"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"of every run ({ROUNDS}, most attacks {SHORT_ROUNDS}; --quick {QUICK_ROUNDS})",
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 on")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no run later than this")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each on a core")
    parser.add_argument("--fresh", action="store_true", help="run again what is known")
    parser.add_argument("--any-code", action="store_true", help="take what other versions of the code found")
    options = parser.parse_args()
    options.attacks = options.attacks or (("wrong_steps",) if options.quick else tuple(LIES))
    options.worlds = options.worlds or ("step",)
    options.short = options.rounds or (ROUNDS if options.table else SHORT_ROUNDS)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.short = min(options.short, options.rounds)
    return options


def runs_of(options: argparse.Namespace) -> Iterable[Run]:
    """What is compared with first, then each attack as shipped, the longest first, then without defences."""
    attacks = sorted(options.attacks, key=lambda attack: attack not in UNFOLDING)
    for seed in range(options.seeds):
        for world in options.worlds:
            yield Run(f"five_{world}", "alone", RATE, seed, options.rounds)
            yield Run(f"five_{world}", "book", RATE, seed, options.rounds)
        for world in options.worlds:
            for attack in attacks:
                yield run_of(f"{attack}_{world}", "book", seed, options)
        for world in options.worlds:
            for attack in attacks:
                if options.quick or (attack not in TOLD_APART and not options.table):
                    continue
                for rule in list(DEFENCES.values())[1:]:
                    yield run_of(f"{attack}_{world}", rule, seed, options)


def run_of(swarm: str, rule: str, seed: int, options: argparse.Namespace) -> Run:
    """A run, with the rounds that it has here."""
    attack = SWARMS[swarm].attack if SWARMS[swarm].attackers else None
    rounds = options.rounds if attack is None or attack in UNFOLDING else options.short
    return Run(swarm, rule, RATE, seed, rounds)


def compared(
    known: Known, swarm: str, rule: str, options: argparse.Namespace
) -> Sequence[tuple[Outcome, Outcome, Outcome]]:
    """Attacked, among themselves, alone, over as many rounds: of each seed that has all three."""
    world, found = SWARMS[swarm].world, list[tuple[Outcome, Outcome, Outcome]]()
    for seed in range(options.seeds):
        wanted = [(swarm, rule), (f"five_{world}", "book"), (f"five_{world}", "alone")]
        runs = [run_of(*pair, seed, options) for pair in wanted]
        if all(run in known for run in runs):
            attacked, peaceful, alone = (begun(known[run], runs[0].rounds) for run in runs)
            found.append((attacked, peaceful, alone))
    return found


def begun(outcome: Outcome, rounds: int) -> Outcome:
    """What had come of a run after so many rounds."""
    rewards, answers = ([one[:rounds] for one in each] for each in (outcome.rewards, outcome.answers))
    return replace(outcome, rewards=rewards, answers=answers)


def claims(known: Known, options: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}
    if three := compared(known, "wrong_steps_step", "book", options):
        found["reasoned3of8_vs_alone"] = fmean(ratio(one, alone) for one, _, alone in three)
        found["reasoned3of8_gain_kept"] = fmean(gain_kept(*each) for each in three)
    if three := compared(known, "wrong_steps_step", "book_open", options):
        found["reasoned3of8_vs_alone_undefended"] = fmean(ratio(one, alone) for one, _, alone in three)
    under = {
        f"{attack}_{world}": compared(known, f"{attack}_{world}", "book", options)
        for world in options.worlds
        for attack in options.attacks
    }
    worst = [fmean(ratio(one, alone) for one, _, alone in three) for three in under.values() if three]
    if worst:
        found["worst_attack_vs_alone"] = min(worst)
        found["attacks"] = len(worst)
    return found


def markdown(known: Known, options: argparse.Namespace) -> str:
    """The table: cumulative reward of the honest by attack and defence, and that over alone."""
    lines = ["| world | attack | " + " | ".join(DEFENCES) + " |", "|---|---|" + "---|" * len(DEFENCES)]
    for world in options.worlds:
        swarm = f"five_{world}"
        for name, rule in (("nobody, each alone", "alone"), ("nobody, among themselves", "book")):
            lines.append(f"| {world} | {name} | {_cell(known, swarm, rule, options)} | | | |")
        for attack in options.attacks:
            cells = [_cell(known, f"{attack}_{world}", rule, options) for rule in DEFENCES.values()]
            rounds = run_of(f"{attack}_{world}", "book", 0, options).rounds
            lines.append(f"| {world} | {attack}, {rounds} rounds | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(known: Known, swarm: str, rule: str, options: argparse.Namespace) -> str:
    runs = [run_of(swarm, rule, seed, options) for seed in range(options.seeds)]
    found = [known[run] for run in runs if run in known]
    if not found:
        return ""
    three = compared(known, swarm, rule, options)
    against = f" ({fmean(ratio(one, alone) for one, _, alone in three):.2f})" if three else ""
    return f"{fmean(one.cumulative for one in found):.2f}{against}"


if __name__ == "__main__":
    main()
