"""Seconds of an iteration of a real pipeline: as predicted, and against the same without skipping.

plans of our scheduler -> 8 processes with a p2pd each (pipeline_process.py) -> iterations in turn -> claims

The nodes are those of instances/geo8_skip25.json: 8 cloud regions with their links, speeds and slots, in a
tenth of their time. Tensors, gradients, averaging and optimizer steps are real, of a tiny LLaMA; how long a
hop and a piece of work take is emulated. A link has a fixed delay and a bandwidth, which its messages share;
the simulator knows no sharing, so what that costs is in the difference. `--delays`: all of a hop is delay.

skip33   6 stages, 4 visited, as on the published map of 20 nodes; 8 hold them as 2+2+1+1+1+1. The claim.
skip25   4 stages of 2 nodes, 3 visited: the instance as published. skip50: 2 of the 4 visited.
full     every micro-batch through all stages, as many micro-batches an iteration as its rival. 6 stages have
         room for 3 of them at a time, where skipping has room for 6; 4 stages for 6, as with skipping.

All plans are the best of searches with equal budgets on the given stage map and on one of our own, what
shared links may cost added; every one is checked against every rule. The pipelines run in turn in the same
processes, each with a model of its own. An iteration lasts from the first micro-batch's start to the last
one's return; what follows (averaging, optimizer step, news of it), which no plan predicts, is told apart as
`closing_s`. Where this machine was too busy for the emulation, an iteration is measured again and counted as
disturbed. Claims:

measured_vs_predicted         the iteration of skip33 or its full pipeline that is farthest from predicted
measured_vs_predicted_median  the median of all of them, both without regard to sign
skip_vs_full                  share of the time saved, median over rounds; _whole: closing included

python benchmarks/pipeline_run.py [--delays] [--quick] [--json FILE]
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from common import arguments, middle, report
from pipeline_process import Part, Processes, Setup, first_model, most_waits_s
from pipeline_study import find, find_full
from transformers.utils.logging import disable_progress_bar

from swarmnode.extensions.pipeline.scheduling.instance import Instance, agents, load_instance
from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort
from swarmnode.extensions.pipeline.scheduling.plan import Plan, violations
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

INSTANCE = Path(__file__).parent / "instances" / "geo8_skip25.json"
DISTURBED_SHARE = 0.02
"""Of an iteration's time. The emulation says nothing where pieces of work took longer than they were to by
more than this together, or where a node's threads waited for a core for more than this."""
TRIES = 3
"""At an iteration, where this machine was too busy for the emulation."""
SIX_STAGES = ((2, 7), (4, 3), (6,), (1,), (5,), (0,))
"""The published pairs, those of the last two stages taken apart."""


@dataclass(frozen=True, slots=True)
class Effort:
    rivals: tuple[str, ...]
    rounds: int
    scale: float
    plan: SearchBudget
    placing: PlacementEffort
    seeds: int
    """Searches of each kind: both pipelines get the best of as many."""


FULL = Effort(
    ("skip33", "skip25", "skip50"), 4, 0.1, SearchBudget(steps=5_000),
    PlacementEffort(starts=24, swaps=200, steps=5_000), seeds=3,
)  # fmt: skip
QUICK = Effort(
    ("skip33",), 1, 0.06, SearchBudget(steps=2_000),
    PlacementEffort(starts=12, swaps=200, steps=2_000), seeds=1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Iteration:
    """As all nodes together saw it, in real seconds."""

    seconds: float
    whole_s: float
    """Until all have stepped."""
    overruns: int
    overrun_s: float
    waited_s: float
    """For a core: a node's threads together, mean of the nodes. Each would have a machine of its own."""
    tasks: int
    retried: int
    loss: float
    """A token."""
    cpu_s: float
    machine_busy: float
    """Share of all cores that was used, by whomever."""

    @property
    def disturbed_s(self) -> float:
        return max(self.overrun_s, self.waited_s)


@dataclass(slots=True)
class Pipeline:
    """A plan and what was measured of it."""

    name: str
    plan: Plan
    predicted_s: float
    """Real seconds."""
    iterations: list[Iteration] = field(default_factory=list[Iteration])
    disturbed: list[Iteration] = field(default_factory=list[Iteration])
    """Those that were measured again, since the emulation broke down."""

    @property
    def ratios(self) -> list[float]:
        return [iteration.seconds / self.predicted_s for iteration in self.iterations]


def main() -> None:
    delays = own_options().delays
    options = arguments("seconds of a pipeline iteration, measured and predicted, with and without skipping")
    disable_progress_bar()
    effort = QUICK if options.quick else FULL
    pipelines = planned(effort)
    with tempfile.TemporaryDirectory() as folder:
        model, identities = Path(folder) / "model", Path(folder) / "keys"
        identities.mkdir()
        first_model().save_pretrained(model)
        plans = tuple(pipeline.plan for pipeline in pipelines.values())
        setup = Setup(plans, model, identities, effort.scale, bandwidth=not delays)
        with Processes(setup) as nodes:
            for round_ in range(effort.rounds):
                for run, pipeline in enumerate(pipelines.values()):
                    measure(nodes, run, pipeline)
                    show(round_, pipeline)
    claims, spread = claimed(pipelines, effort)
    figures = {name: figures_of(pipeline, effort) for name, pipeline in pipelines.items()}
    conclude(pipelines, claims, effort)
    further = {"links": "delay" if delays else "bandwidth", "scale": effort.scale, "pipelines": figures}
    report("pipeline_run", claims, spread, options.json, extra=further)


def own_options() -> argparse.Namespace:
    """Read `--delays`, and take it off the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--delays", action="store_true")
    found, sys.argv[1:] = parser.parse_known_args()
    return found


def planned(effort: Effort) -> dict[str, Pipeline]:
    """By name, each skipping pipeline behind the full one that it is compared with."""
    given = load_instance(INSTANCE)
    instances = {
        "skip33": replace(given, stages=SIX_STAGES, path_length=4),
        "skip25": given,
        "skip50": replace(given, path_length=2),
    }
    found: dict[str, Pipeline] = {}
    for name in effort.rivals:
        instance = instances[name]
        full = full_name(instance)
        if full not in found:
            found[full] = checked(full, best_full(instance, effort), effort)
        found[name] = checked(name, best_skip(instance, effort), effort)
        if found[name].plan.micro_batches != found[full].plan.micro_batches:
            raise SystemExit(f"{name} and {full} have unequal numbers of micro-batches")
    return found


def full_name(instance: Instance) -> str:
    return f"full{len(instance.stages)}"


def best_skip(instance: Instance, effort: Effort) -> Plan:
    searches = [(seed, placing) for seed in range(effort.seeds) for placing in (None, effort.placing)]
    return fastest([find(instance, seed, effort.plan, placing) for seed, placing in searches])


def best_full(instance: Instance, effort: Effort) -> Plan:
    """On the given map and on one of its own, both also with the data nodes that suit it best."""
    micro_batches = len(agents(instance)) * instance.waves
    whole = replace(instance, path_length=len(instance.stages))
    whole = replace(whole, waves=micro_batches // len(agents(whole)))
    candidates: list[Plan] = []
    for seed in range(effort.seeds):
        own = find(whole, seed, effort.plan, effort.placing)
        candidates.append(own)
        for each in (instance, own.instance):
            candidates.append(find_full(each, micro_batches, seed, effort.plan))
    return fastest(candidates)


def fastest(plans: Sequence[Plan]) -> Plan:
    """What shared links may cost is added: the simulator does not know it."""
    return min(plans, key=lambda plan: simulate(plan).makespan_s + most_waits_s(plan))


def checked(name: str, plan: Plan, effort: Effort) -> Pipeline:
    if broken := violations(plan):
        raise SystemExit(f"the plan of {name} breaks its rules: {broken}")
    makespan_s = simulate(plan).makespan_s
    print(
        f"{name:7s} {makespan_s:6.1f} s of {plan.micro_batches} micro-batches, {len(plan.paths)} at a time, "
        f"links wait up to {most_waits_s(plan):.1f} s, "
        f"stages {' '.join('+'.join(map(str, nodes)) for nodes in plan.instance.stages)}",
        flush=True,
    )
    return Pipeline(name, plan, makespan_s * effort.scale)


def measure(nodes: Processes, run: int, pipeline: Pipeline) -> None:
    """One more iteration. Of several tries that are all disturbed, the least disturbed counts."""
    tried: list[Iteration] = []
    while len(tried) < TRIES:
        psutil.cpu_percent()
        parts = nodes.iterate(run)
        tried.append(iteration_of(parts, psutil.cpu_percent() / 100))
        if tried[-1].disturbed_s <= DISTURBED_SHARE * pipeline.predicted_s:
            break
    tried.sort(key=lambda each: each.disturbed_s)
    pipeline.iterations.append(tried[0])
    pipeline.disturbed += tried[1:]


def iteration_of(parts: Sequence[Part], machine_busy: float) -> Iteration:
    data = [(part.began_s, part.report) for part in parts if part.report is not None]
    began_s = min(began_s for began_s, _ in data)
    reports = [each for _, each in data]
    if any(each.given_up or not each.stepped for each in reports):
        raise SystemExit(f"an iteration was not as planned: {reports}")
    return Iteration(
        seconds=max(began + each.makespan_s for began, each in data) - began_s,
        whole_s=max(part.stepped_s for part in parts) - began_s,
        overruns=sum(part.overruns for part in parts),
        overrun_s=sum(part.overrun_s for part in parts),
        waited_s=mean(part.waited_s for part in parts),
        tasks=sum(part.tasks for part in parts),
        retried=sum(each.retried for each in reports),
        loss=sum(each.loss for each in reports) / sum(each.tokens for each in reports),
        cpu_s=sum(part.cpu_s for part in parts),
        machine_busy=machine_busy,
    )


def show(round_: int, pipeline: Pipeline) -> None:
    last = pipeline.iterations[-1]
    print(
        f"round {round_}  {pipeline.name:7s} {last.seconds:6.2f} s, {pipeline.ratios[-1] - 1:+6.1%}; "
        f"closed {last.whole_s - last.seconds:.2f} s later, loss {last.loss:.2f}, "
        f"overruns {last.overruns} of {last.tasks} ({last.overrun_s * 1e3:.0f} ms), "
        f"waited {last.waited_s * 1e3:.0f} ms for a core, "
        f"{last.cpu_s:.1f} CPU s, cores {last.machine_busy:.0%} busy",
        flush=True,
    )


Claims = tuple[dict[str, float], dict[str, tuple[float, float]]]


def claimed(pipelines: Mapping[str, Pipeline], effort: Effort) -> Claims:
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    for name in effort.rivals:
        skip, full = pipelines[name], pipelines[full_name(pipelines[name].plan.instance)]
        suffix = "" if name == effort.rivals[0] else f"_{name}"
        errors = [abs(ratio - 1) for ratio in (*skip.ratios, *full.ratios)]
        pairs = list(zip(skip.iterations, full.iterations, strict=True))
        values = {
            f"measured_vs_predicted{suffix}": [max(errors)],
            f"measured_vs_predicted_median{suffix}": errors,
            f"skip_vs_full{suffix}": [1 - ours.seconds / theirs.seconds for ours, theirs in pairs],
            f"skip_vs_full_whole{suffix}": [1 - ours.whole_s / theirs.whole_s for ours, theirs in pairs],
            f"skip_vs_full_planned{suffix}": [1 - skip.predicted_s / full.predicted_s],
        }
        claims |= {claim: median(found) for claim, found in values.items()}
        spread |= {claim: (min(found), max(found)) for claim, found in values.items()}
    return claims, spread


def figures_of(pipeline: Pipeline, effort: Effort) -> dict[str, Any]:
    seconds, (low_s, high_s) = middle([each.seconds for each in pipeline.iterations])
    runs = pipeline.iterations
    figures = {
        "planned_s": pipeline.predicted_s / effort.scale,
        "predicted_s": pipeline.predicted_s,
        "measured_s": seconds,
        "quartiles_s": (low_s, high_s),
        "worst_ratio": max(pipeline.ratios),
        "closing_s": median(each.whole_s - each.seconds for each in runs),
        "disturbed": len(pipeline.disturbed),
        "overruns": sum(each.overruns for each in runs),
        "overrun_s": sum(each.overrun_s for each in runs),
        "waited_s": sum(each.waited_s for each in runs),
        "tasks": sum(each.tasks for each in runs),
        "retried": sum(each.retried for each in runs),
        "cpu_s": median(each.cpu_s for each in runs),
        "machine_busy": median(each.machine_busy for each in runs),
    }
    rounded = {key: _rounded(value) for key, value in figures.items()}
    return rounded | {
        "micro_batches": pipeline.plan.micro_batches,
        "in_flight": len(pipeline.plan.paths),
        "stages": pipeline.plan.instance.stages,
        "loss": [_rounded(each.loss) for each in runs],
    }


def _rounded(value: float | tuple[float, ...]) -> Any:
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}")


def conclude(pipelines: Mapping[str, Pipeline], claims: Mapping[str, float], effort: Effort) -> None:
    for name in effort.rivals:
        suffix = "" if name == effort.rivals[0] else f"_{name}"
        full = full_name(pipelines[name].plan.instance)
        saved, whole, promised = (claims[f"skip_vs_full{of}{suffix}"] for of in ("", "_whole", "_planned"))
        worst = claims[f"measured_vs_predicted{suffix}"]
        print(
            f"{name}: {saved:.1%} below {full} (planned {promised:.1%}; {whole:.1%} with closing), "
            f"at worst {worst:.1%} from predicted"
        )


if __name__ == "__main__":
    main()
