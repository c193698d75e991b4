"""A pipeline whose members are killed and frozen while it learns: what a death costs in time and in learning.

Swarm (pipeline_swarm.py) <- Reaper (pipeline_deaths.py)
        \\-> records (pipeline_records.py) -> [claims]

python benchmarks/pipeline_churn.py [--quick] [--json FILE]

Real `swarmnode join --pipeline` processes hold three stages of a tiny model, all of whose weights are trained
on generated text. Every few iterations one of them gets a SIGKILL (its network daemon with it) at a moment
within an iteration, or is frozen for a while; a killed one comes back a few seconds later, under its own name
or as a newcomer. Each kind is hit equally often: data nodes, members of other stages, and the convener.

Beside it the same without deaths, several times: every run has other peer ids and so other text, which is the
spread that a curve has by chance. Losses are means over the last iterations; a distance above zero is a loss
above the undisturbed mean. Claims:
  deaths, freezes              SIGKILLs, SIGSTOPs
  restarts                     survivors that ended, and iterations that were run twice: must be 0
  loss_vs_seed_spread          (final loss - undisturbed mean) / undisturbed standard deviation
  loss_vs_seed_spread_tokens   the same against undisturbed losses after as many tokens
  curve_vs_seed_spread         the farthest that the whole curve is from the undisturbed mean, either way
  tokens_share                 tokens learned from, of the undisturbed median
  lost_s_per_death             wall time beyond the undisturbed median iteration, for each death or freeze
  longest_stall_s              the longest iteration, from one step to the next
  repaired, given_up           micro-batches that took another path; that never came back
  untold                       iterations that no data node lived to write down
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common import arguments, report
from pipeline_deaths import KINDS, Fates, How, Kind, Reaper, counts
from pipeline_records import Run, compared, read_steps, smoothed
from pipeline_swarm import POLL_S, Swarm, build_model, build_text

SEED = 1
"""Of who dies when. Peer ids are new in every run, and what is learned from with them."""
STALL_TIMEOUT_S = 300.0
"""Without a step for so long, the run has failed."""

KILLED: tuple[tuple[Kind, How], ...] = tuple((kind, "killed") for kind in KINDS)
FROZEN: tuple[tuple[Kind, How], ...] = tuple((kind, "frozen") for kind in KINDS)


@dataclass(frozen=True, slots=True)
class Shape:
    """How long a run is."""

    iterations: int
    fates: Fates
    members: int
    smoothed: int
    """Losses are means over so many iterations."""
    undisturbed: int
    """Runs without deaths."""


FULL = Shape(
    50, Fates((3, 4), first=3, most=50, deck=KILLED * 3 + FROZEN), members=6, smoothed=8, undisturbed=4
)
QUICK = Shape(
    8,
    Fates((2, 2), first=2, most=2, deck=(KILLED[0], FROZEN[1]), most_away=1, frozen_s=(5.0, 8.0)),
    members=4,
    smoothed=3,
    undisturbed=1,
)


def main() -> None:
    # The members end with us, also when it is a time limit that ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = arguments("what the deaths of members cost a pipeline, in time and in what it learns")
    shape = QUICK if options.quick else FULL
    kept = os.environ.get("CHURN_FOLDER")
    with ExitStack() as stack:
        folder = Path(kept) if kept else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, text = build_model(folder), build_text(folder / "text")
        calm: list[Run] = []
        churned: list[Run] = []
        # In the middle of the others, so that a machine that slows down does so for both.
        turns = [False] * (shape.undisturbed // 2) + [True] + [False] * ((shape.undisturbed + 1) // 2)
        for number, deadly in enumerate(turns, 1):
            print(f"run {number} of {len(turns)}, {'with' if deadly else 'without'} deaths", flush=True)
            found = run(folder / f"run-{number}", model, text, shape, seed=SEED, deadly=deadly)
            (churned if deadly else calm).append(found)
    tell(churned[0], calm, shape, options.json)


def run(folder: Path, model: Path, text: Path, shape: Shape, *, seed: int, deadly: bool) -> Run:
    """One run to its last iteration. Raises TimeoutError when no step is taken for long."""
    result = Run()
    folder.mkdir(parents=True)
    with Swarm(folder, model, text, shape.members) as swarm:
        swarm.start_all(shape.members)
        reaper = Reaper(swarm, result, shape.fates, shape.iterations, seed)
        moved_at_s = time.monotonic()
        while result.iterations < shape.iterations:
            before = result.iterations
            result.steps += [step for member in swarm.members for step in read_steps(member)]
            if deadly:
                reaper.turn(result.iterations)
            now_s = time.monotonic()
            if result.iterations > before:
                moved_at_s = now_s
                _say(result)
            elif now_s > moved_at_s + STALL_TIMEOUT_S:
                raise TimeoutError(f"no step for {STALL_TIMEOUT_S:.0f} s after {before} iterations")
            _note_ended(swarm, result)
            if len(result.ended) >= shape.members:
                raise RuntimeError("the pipeline has ended: " + "; ".join(result.ended))
            time.sleep(POLL_S)
        for member in swarm.living():
            if (status := member.status()) is not None:
                result.counts.update(counts(status))
    return result


def _note_ended(swarm: Swarm, result: Run) -> None:
    for member in swarm.members:
        code = member.process.poll()
        what = f"{member.home.name} ended with {code}"
        if code is not None and code != -signal.SIGKILL and what not in result.ended:
            print(f"  {what}: see {member.home / 'output.log'}", flush=True)
            result.ended.append(what)


def _say(result: Run) -> None:
    durations = result.durations()
    if not durations or (result.iterations % 5 and durations[-1] <= 5 * statistics.median(durations)):
        return
    print(
        f"  iteration {result.iterations}: loss {result.losses()[-1]:.3f} over {result.tokens()[-1]:.0f} "
        f"tokens of {result.data_nodes()[-1]} data nodes, {durations[-1]:.1f} s",
        flush=True,
    )


def tell(churned: Run, calm: Sequence[Run], shape: Shape, json_path: Path | None) -> None:
    found = compared(churned, calm, shape.smoothed)
    distances = (
        {
            "loss_vs_seed_spread": found.by_iteration,
            "loss_vs_seed_spread_tokens": found.by_tokens,
            "curve_vs_seed_spread": found.farthest,
        }
        if found is not None
        else {}
    )
    medians = [statistics.median(each.durations()) for each in calm]
    durations, hit = churned.durations(), len(churned.strikes)
    lost_s = [
        (sum(durations) - each * len(durations)) / hit
        for each in (statistics.median(medians), max(medians), min(medians))
    ]
    frozen = churned.struck["frozen"]
    report(
        "pipeline_churn",
        claims={
            "deaths": hit - frozen,
            "freezes": frozen,
            "restarts": len(churned.ended) + churned.repeated(),
            **distances,
            "tokens_share": sum(churned.tokens()) / statistics.median(sum(each.tokens()) for each in calm),
            "lost_s_per_death": lost_s[0],
            "longest_stall_s": max(durations),
            "iterations": churned.iterations,
            "untold": churned.untold(),
            **{name: churned.counts[name] for name in ("repaired", "given_up", "stragglers")},
        },
        spread={"lost_s_per_death": (lost_s[1], lost_s[2])},
        json_path=json_path,
        extra={
            "struck": dict(churned.struck),
            "strikes": churned.strikes,
            "struck_in": churned.struck_in,
            "ended": churned.ended,
            "with_deaths": _curve(churned, shape),
            "undisturbed": [_curve(each, shape) for each in calm],
        },
    )


def _curve(run_: Run, shape: Shape) -> dict[str, object]:
    """What may be looked at more closely, rounded."""
    return {
        "final_loss": round(smoothed(run_.losses(), shape.smoothed)[-1], 4),
        "losses": [round(each, 3) for each in run_.losses()],
        "tokens": [round(each) for each in run_.tokens()],
        "data_nodes": run_.data_nodes(),
        "iteration_s": [round(each, 2) for each in run_.durations()],
        "median_s": round(statistics.median(run_.durations()), 3),
    }


if __name__ == "__main__":
    main()
