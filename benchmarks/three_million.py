"""Specialists of three million parameters: what they learn from each other, against the same nodes alone.

[four policies that know two tasks each] -> sapo_run.py, rule by rule -> held-out reward at the end

The shape is Qwen3's: four layers of width 256, 27 times the tiny policy. Nodes, exchange and clock are those
of sapo.py: real learners and real exchanges in lock-step, on a network in memory. `book` is the rule that is
shipped. `alone` shares nothing, and counts with the better of two learning rates by held-out reward, where
`book` has one; `own_book` shares nothing, and replays what it found itself.

    python benchmarks/three_million.py [--quick] [--json FILE]

The policies are built once, into the folder where nodes keep theirs: two minutes of one core, the longest
part of a first run. Runs are begun for eight minutes, what is claimed first. The spread is that of the nodes.
--quick: policies that were taught nothing, and two rounds. It shows that all parts run; its figures mean
nothing.
"""

import time

from common import BUDGET_S, arguments, machine, report
from sapo_models import models_of
from sapo_plan import Outcome, Run
from sapo_store import outcomes
from sapo_swarms import SWARMS
from sapo_table import Table, markdown

RUNS = (("book", 2e-3), ("alone", 2e-3), ("alone", 1e-3), ("own_book", 2e-3))
"""Rules and learning rates: what is claimed comes first."""

AGAINST = ("alone", "own_book")


def main() -> None:
    options = arguments(__doc__ or "")
    until_s = time.monotonic() + BUDGET_S
    name = "untaught" if options.quick else "three_million"
    swarm = SWARMS[name]
    if options.quick:
        print("--quick: these policies were taught nothing, and the figures mean nothing", flush=True)
    print(f"on {machine()['cpu']}; what the nodes start from:", flush=True)
    models = models_of(swarm)
    print(f"{', '.join(path.name for path in models)}, built in {time.process_time():.0f} CPU s", flush=True)
    runs = [Run(name, rule, rate, 0, swarm.rounds) for rule, rate in RUNS]
    found = outcomes(
        runs[:2] if options.quick else runs,
        fresh=True,
        any_code=False,
        until_s=until_s,
        workers=2,
        show=lambda line: print(line, flush=True),
    )
    table = Table(found)
    if not options.quick:
        print(markdown(table), flush=True)
    best = best_of(found)
    if "book" not in best:
        raise SystemExit("there was no time for a run: the policies are built now, call it again")
    ours = best["book"]
    gaps = {rule: gaps_of(ours, best[rule]) for rule in AGAINST if rule in best}
    report(
        "three_million",
        {
            "book_last": ours.last,
            **{f"{rule}_last": best[rule].last for rule in gaps},
            **{f"three_million_minus_{rule}": ours.last - best[rule].last for rule in gaps},
        },
        {f"three_million_minus_{rule}": (min(nodes), max(nodes)) for rule, nodes in gaps.items()},
        options.json,
        {"quick": options.quick, "rows": table.as_json()},
    )


def best_of(found: dict[Run, Outcome]) -> dict[str, Outcome]:
    """Returns the outcome of each rule at the learning rate with the highest held-out reward."""
    ordered = sorted(found.items(), key=lambda pair: pair[1].last)
    return {run.rule: outcome for run, outcome in ordered}


def gaps_of(ours: Outcome, theirs: Outcome) -> list[float]:
    """Returns held-out reward of the one over that of the other, node by node."""
    return [one - other for one, other in zip(ours.held_out, theirs.held_out, strict=True)]


if __name__ == "__main__":
    main()
