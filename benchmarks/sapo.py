"""What nodes learn from strangers: swarms in one process, rule by rule, against the same nodes alone.

N real learners with real exchanges on a network in memory, in lock-step -> cumulative and held-out reward

Swarms (sapo_swarms.py): `specialists` were taught everything and then made unsure of all but two tasks each;
`equals` have one start, in the preset as shipped; `strangers` were only ever taught two tasks each; `speeds`
differ by up to 8, `sizes` have two widths, and in `fresh` one node begins when the others have done 30
rounds. Rules (sapo_rules.py): `alone` (8/0), `alone_successes` (own failures left out), `filter` (8/0 with
over-sampling and zero-advantage filter, at equal answers), `sapo` as published, and the product's others.

Each rule has its best learning rate of GRID at seed 0, in each swarm, but where the preset is the claim.
Specialists that share nothing are also run for as many CPU seconds as those that share.
Means over seeds with 95 % intervals by t. Runs are kept in the cache folder, by everything that they depend
on: --fresh runs them again, --any-code takes those of other versions of the code, too.

    python benchmarks/sapo.py [--quick] [--json FILE] [--markdown FILE] [--picture FILE.svg]
                              [--libp2p] [--swarms equals,...] [--rules book,...] [--seeds 5] [--minutes 18]
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import machine, report
from sapo_claims import OURS, claims_of
from sapo_models import models_of
from sapo_picture import picture
from sapo_plan import Outcome, Run
from sapo_rules import RULES
from sapo_store import outcomes
from sapo_swarms import CLAIMED, SWARMS, rates_of
from sapo_table import Table, markdown

MINUTES = 17.0
"""No run is begun later than this; the longest takes about a minute."""

EQUAL_CPU = ("alone", "own_book")
"""Rules of nodes that share nothing, run once more for as many CPU seconds as the specialists that share."""

QUICK_RULES = ("alone", "sapo", "own_book", "book")
QUICK_ROUNDS = 16
QUICK_RATE = 2e-3


def main() -> None:
    options = arguments()
    until_s = time.monotonic() + 60 * options.minutes
    print(f"on {machine()['cpu']}", flush=True)
    pairs = [(swarm, rule) for swarm in swarms_of(options) for rule in rules_of(swarm, options)]
    for swarm in dict(pairs):
        print(f"{swarm} starts from {', '.join(path.name for path in models_of(SWARMS[swarm]))}", flush=True)
    known = gathered([run for pair in pairs for run in tried(*pair, options)], options, until_s)
    tuned = Table(known)
    more = [run for pair in pairs if tuned.rates(*pair) for run in repeated(*pair, tuned, options)]
    known |= gathered(more, options, until_s)
    table = Table(known)
    longer = [run for swarm, rule in pairs if swarm == "specialists" for run in as_long(rule, table)]
    show(table, Table(gathered(longer, options, until_s)), options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one swarm, short, one learning rate, two seeds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves as SVG")
    parser.add_argument("--swarms", type=names_in(SWARMS), help="these only, joined by commas")
    parser.add_argument("--rules", type=names_in(RULES), help="these only, joined by commas")
    parser.add_argument("--seeds", type=int, help="how many, from 0 on (3; with --quick 2)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no run later than this")
    parser.add_argument("--libp2p", action="store_true", help="one row more, of real processes")
    parser.add_argument("--rates", type=numbers, help="of the learning rates these only, joined by commas")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each on a core")
    parser.add_argument("--fresh", action="store_true", help="run again what is known")
    parser.add_argument("--any-code", action="store_true", help="take what other versions of the code found")
    return parser.parse_args()


def names_in(known: dict[str, Any]) -> Any:
    """What reads names of these, joined by commas."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return found

    return names


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def swarms_of(options: argparse.Namespace) -> Sequence[str]:
    found = options.swarms or (("specialists",) if options.quick else tuple(CLAIMED))
    return [*found, "processes"] if options.libp2p else found


def rules_of(swarm: str, options: argparse.Namespace) -> Sequence[str]:
    if swarm == "processes":
        return ("book",)
    return options.rules or (QUICK_RULES if options.quick else CLAIMED.get(swarm, ("alone", "book")))


def tried(swarm: str, rule: str, options: argparse.Namespace) -> list[Run]:
    """The runs at seed 0 that the best learning rate is found by."""
    rates = (QUICK_RATE,) if options.quick else rates_of(swarm, rule)
    if options.rates and set(rates) > set(options.rates):
        rates = options.rates
    return [Run(swarm, rule, rate, 0, rounds_of(swarm, options)) for rate in rates]


def repeated(swarm: str, rule: str, table: Table, options: argparse.Namespace) -> list[Run]:
    """The other seeds, at that learning rate."""
    seeds = options.seeds or (2 if options.quick else 3)
    best = table.best_rate(swarm, rule)
    return [Run(swarm, rule, best, seed, rounds_of(swarm, options)) for seed in range(1, seeds)]


def as_long(rule: str, table: Table) -> list[Run]:
    """Returns runs of nodes that share nothing, with the rounds that take them the CPU seconds of those that
    share: what a round costs is known from the runs of the table."""
    if rule not in EQUAL_CPU:
        return []
    ours, theirs = (table.tuned("specialists", one) for one in (OURS, rule))
    rate = table.best_rate("specialists", rule) if theirs else None

    def rounds(seed: int) -> int:
        return math.ceil(len(theirs[seed].rewards[0]) * ours[seed].cpu_s / theirs[seed].cpu_s)

    return [Run("specialists", rule, rate, seed, rounds(seed)) for seed in theirs if seed in ours]


def rounds_of(swarm: str, options: argparse.Namespace) -> int:
    return QUICK_ROUNDS if options.quick else SWARMS[swarm].rounds


def gathered(runs: Sequence[Run], options: argparse.Namespace, until_s: float) -> dict[Run, Outcome]:
    return outcomes(
        runs,
        fresh=options.fresh,
        any_code=options.any_code,
        until_s=until_s,
        workers=options.workers,
        show=lambda line: print(line, flush=True),
    )


def show(table: Table, longer: Table, options: argparse.Namespace) -> None:
    text = markdown(table)
    print(text, flush=True)
    if list(longer.rows()):
        print(f"alone, for as many CPU seconds as `{OURS}`:\n{markdown(longer)}", flush=True)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if options.picture is not None:
        options.picture.write_text(picture(table))
    claims = claims_of(table, longer)
    report(
        "sapo",
        {name: found.mean for name, found in claims.items()},
        {name: (found.low, found.high) for name, found in claims.items() if found.half < float("inf")},
        options.json,
        {"rows": table.as_json(), "equal_cpu": longer.as_json()},
    )


if __name__ == "__main__":
    main()
