"""What skipping stages costs per token and buys per second: a tiny LLaMA, trained whole through a pipeline.

    python benchmarks/pipeline_training.py [--quick] [--json FILE]

Six stages of one layer each, real StageWorkers in one process (LocalPipeline), every parameter trained on
generated text. Micro-batches take the paths of real plans: those that the scheduler makes for 20 nodes with
measured cloud links (instances/geo20_skip33.json) and 15 micro-batches an iteration. A training step has
4 micro-batches, on the paths of 4 of the plan's agents in turn, and counts as one iteration of the plan, as
many seconds long as the simulator says. The gradient of a stage is divided by the tokens that visited it.

full             every micro-batch through all six stages: the baseline of every claim
full, in time    the same, its learning rate brought down by the time that "skip 33 %" ends
skip 25 %        iterations of five and of four stages take turns
skip 33 %, 50 %  four stages, three stages
+ tenth full     as 33 %, but every tenth iteration is one of the full pipeline

Perplexity per byte on held-out text. "half": three of six stages, the mean over all ten choices (stage 0 is
always there, order is kept). Claims: `ppl_cost_*` is perplexity at full depth over the full pipeline's minus
one, after equally many tokens; `half_depth_ratio_*` that at half depth over that at full depth of the same
model; `loss_at_time_ratio` perplexity of skip 33 % at its end over that of "full, in time";
`overtaken_at_share`: when the full pipeline's curve passes that of skip 33 % for good, in the time that it
trains (1: never). The curve flatters skipping where its learning rate is down already and the other's is not:
that is what "full, in time" is for.
"""

import copy
import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import arguments, middle, report
from pipeline_curves import Outcome, Point, as_figures, overtaken_at_share
from pipeline_local import LocalPipeline
from pipeline_study import find_full, seconds_for
from pipeline_text import END_TOKEN_ID, VOCABULARY, documents, encode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from swarmnode.extensions.pipeline.feeds.text_feed import TextFeed, TextSettings, TextSource
from swarmnode.extensions.pipeline.scheduling.instance import Instance, load_instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan, violations
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.training.packing import MicroBatch

INSTANCE = Path(__file__).parent / "instances" / "geo20_skip33.json"
STAGES = 6
MICRO_BATCHES = 15
"""Of an iteration of the plans."""
TENTH = 10

LEARNING_RATE = 4e-3
WARM_UP_STEPS = 20
DECAY_SHARE = 0.3
"""Of the steps, the last ones: the rate goes down linearly. Before that it is constant, so that curves can be
compared at any time, and "full, in time" is a branch of "full"."""
MAX_NORM = 1.0
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Effort:
    steps: int
    seeds: int
    """Of full and skip 33 %; the others have one."""
    plan_steps: int
    micro_batches: int
    """Of a training step."""
    sequences: int
    """Of a micro-batch."""
    evaluated: int
    """Held-out micro-batches, for the tables."""
    look_every: int
    """Steps between two points of the curve."""
    documents: int
    width: int = 64
    sequence_tokens: int = 48


FULL = Effort(700, 3, 6000, micro_batches=4, sequences=4, evaluated=24, look_every=25, documents=20_000)
QUICK = Effort(16, 1, 300, micro_batches=3, sequences=3, evaluated=3, look_every=8, documents=500, width=32)


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    claim: str
    """How claims call it."""
    lengths: tuple[int, ...]
    """Stages that micro-batches visit, by iterations in turn."""

    def length(self, step: int) -> int:
        return self.lengths[step % len(self.lengths)]


FULL_PIPELINE = Variant("full", "full", (STAGES,))
IN_TIME = "full, in time"
SKIP33 = Variant("skip 33 %", "skip33", (4,))
VARIANTS = (
    FULL_PIPELINE,
    SKIP33,
    Variant("skip 50 %", "skip50", (3,)),
    Variant("skip 33 % + tenth full", "skip33_tenth_full", (*(4,) * (TENTH - 1), STAGES)),
    Variant("skip 25 %", "skip25", (5, 4)),
)


def main() -> None:
    options = arguments(__doc__ or "")
    transformers_logging.disable_progress_bar()
    effort = QUICK if options.quick else FULL
    bench = Bench(effort)
    outcomes: list[Outcome] = []
    # The first seed of all variants first: a run that is stopped has compared something.
    for seed in range(effort.seeds):
        for variant in VARIANTS if seed == 0 else (FULL_PIPELINE, SKIP33):
            for outcome in bench.trained(variant, seed):
                outcomes.append(outcome)
                show(outcome)
    claims, spread = claimed(outcomes)
    figures = {
        "iteration_s": {str(length): round(seconds, 3) for length, seconds in bench.iteration_s.items()},
        "runs": [as_figures(outcome) for outcome in outcomes],
    }
    conclude(claims)
    report("pipeline_training", claims, spread, options.json, extra=figures)


class DividedText(TextSource):
    """A text of which a share is never learned from: of two equal sequences never one only."""

    def __init__(self, *text: Any) -> None:
        super().__init__(*text)
        digests = [hashlib.sha256(self._sequence(number)).digest() for number in self._learned]
        last = sorted(digests)[round(HELD_OUT_SHARE * len(digests)) - 1]
        self._heldout = [number for number, digest in enumerate(digests) if digest <= last]
        self._learned = [number for number, digest in enumerate(digests) if digest > last]

    def heldout(self) -> list[MicroBatch]:
        size = self.settings.batch_sequences
        return [self._batch(self._heldout[at : at + size]) for at in range(0, len(self._heldout), size)]


class Bench:
    """The text, the plans and the seeds' first models: what all variants share."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        settings = TextSettings(effort.sequence_tokens, effort.sequences)
        self.source = DividedText(documents(effort.documents), encode, END_TOKEN_ID, settings)
        self._heldout = self.source.heldout()[: effort.evaluated]
        self.plans = plans(SearchBudget(steps=effort.plan_steps))
        self.iteration_s = {length: seconds_for(plan, MICRO_BATCHES) for length, plan in self.plans.items()}
        for length, plan in self.plans.items():
            print(f"{length} stages: {self.iteration_s[length]:6.2f} s, {len(plan.paths)} agents")

    def simulated_s(self, variant: Variant, steps: int) -> float:
        return sum(self.iteration_s[variant.length(step)] for step in range(steps))

    def trained(self, variant: Variant, seed: int) -> Iterator[Outcome]:
        """The variant's run; of the full pipeline, its short branch too."""
        steps, run = self.effort.steps, Run(self, variant, seed)
        if variant is FULL_PIPELINE:
            short = max(1, int(steps * self.simulated_s(SKIP33, steps) / self.simulated_s(variant, steps)))
            run.train(until=short - int(short * DECAY_SHARE), steps=steps)
            branch = run.branch(IN_TIME)
            branch.train(until=short, steps=short)
            yield branch.finished()
        run.train(until=steps, steps=steps)
        yield run.finished()

    def perplexity(
        self, pipeline: LocalPipeline, paths: Sequence[StagePath], batches: int | None = None
    ) -> float:
        """Per byte, of the mean loss over held-out text and paths."""
        found = [
            pipeline.logprobs(batch, path).logprobs_N for path in paths for batch in self._heldout[:batches]
        ]
        return exp(-torch.cat(found).mean().item())


class Run:
    """One model on its way."""

    def __init__(self, bench: Bench, variant: Variant, seed: int) -> None:
        self._bench, self._variant, self._seed = bench, variant, seed
        self._pipeline = first_pipeline(bench.effort.width, seed)
        self._optimizers = [
            torch.optim.AdamW(
                worker.model.trainable().values(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
            )
            for worker in self._pipeline.workers
        ]
        self._paths = list(paths_of_steps(bench, variant, seed))
        self._step, self._tokens, self._simulated_s, self._cpu_s = 0, 0, 0.0, 0.0
        self.outcome = Outcome(variant.name, seed, STAGES)

    def branch(self, name: str) -> "Run":
        """Another run from here on, under another name."""
        twin = copy.copy(self)
        moved = (self._pipeline, self._optimizers, self.outcome)
        # All at once: the optimizers hold the pipeline's parameters.
        twin._pipeline, twin._optimizers, twin.outcome = copy.deepcopy(moved)
        twin.outcome.name = name
        return twin

    def train(self, until: int, steps: int) -> None:
        """Up to step `until` of a training of `steps`, which decide when the learning rate goes down."""
        while self._step < until:
            started_s = time.process_time()
            self._train_step(learning_rate(self._step, steps))
            self._cpu_s += time.process_time() - started_s
            self._simulated_s += self._bench.iteration_s[self._variant.length(self._step)]
            self._step += 1
            if self._step % self._bench.effort.look_every == 0 or self._step == steps:
                self._look()

    def finished(self) -> Outcome:
        for count in range(STAGES // 2, STAGES + 1):
            paths = [(0, *others) for others in combinations(range(1, STAGES), count - 1)]
            self.outcome.depths[count] = self._bench.perplexity(self._pipeline, paths)
        return self.outcome

    def _train_step(self, rate: float) -> None:
        feed = TextFeed(self._bench.source, f"seed {self._seed}", self._step)
        for agent, path in enumerate(self._paths[self._step]):
            inputs = feed.take(agent, 0, path)
            assert inputs is not None  # Text does not run out.
            self._pipeline.accumulate(inputs, feed.objective)
            self._tokens += inputs.tokens
        gradients = [summed.of_step(1) for summed in self._pipeline.take_gradients()]
        for worker, optimizer, gradient in zip(
            self._pipeline.workers, self._optimizers, gradients, strict=True
        ):
            optimizer.param_groups[0]["lr"] = rate
            worker.apply(gradient, optimizer, max_norm=MAX_NORM)

    def _look(self) -> None:
        perplexity = self._bench.perplexity(self._pipeline, [self._pipeline.full_path], batches=8)
        self.outcome.curve.append(Point(self._tokens, self._simulated_s, self._cpu_s, perplexity))


def learning_rate(step: int, steps: int) -> float:
    decay = max(1, int(steps * DECAY_SHARE))
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS, (steps - step) / decay)


def first_pipeline(width: int, seed: int) -> LocalPipeline:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=STAGES,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_TOKEN_ID,
    )
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return LocalPipeline.load(
            Path(folder), range(1, STAGES + 1), StageSettings(trainable="full"), activations="kept"
        )


def plans(budget: SearchBudget) -> dict[int, Plan]:
    """By path length, on the instance's own stage map; each checked against every rule."""
    instance = replace(load_instance(INSTANCE), waves=1)
    found = {STAGES: find_full(instance, MICRO_BATCHES, 0, budget)}
    for length in (5, 4, 3):
        found[length] = planned(replace(instance, path_length=length), budget)
    for plan in found.values():
        if broken := violations(plan):
            raise SystemExit(f"a plan breaks its rules: {broken}")
    return found


def planned(instance: Instance, budget: SearchBudget) -> Plan:
    return schedule(instance, seed=0, budget=budget).plan


def paths_of_steps(bench: Bench, variant: Variant, seed: int) -> Iterator[list[StagePath]]:
    """By step, those of its micro-batches."""
    agents = {length: turns(plan, seed) for length, plan in bench.plans.items()}
    for step in range(bench.effort.steps):
        yield list(islice(agents[variant.length(step)], bench.effort.micro_batches))


def turns(plan: Plan, seed: int) -> Iterator[StagePath]:
    """The agents' paths without end: all of them once in an order by chance, then again in another."""
    chance = Random(seed)
    while True:
        agents = list(range(len(plan.paths)))
        chance.shuffle(agents)
        yield from map(plan.stages, agents)


def claimed(outcomes: Sequence[Outcome]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Claims and their spread over the seeds, each seed compared with its own baseline."""
    by_run = {(outcome.name, outcome.seed): outcome for outcome in outcomes}
    seeds = sorted({outcome.seed for outcome in outcomes})
    found: dict[str, list[float]] = {}
    for seed in seeds:
        full, in_time = by_run[FULL_PIPELINE.name, seed], by_run[IN_TIME, seed]
        for variant in VARIANTS:
            if (variant.name, seed) not in by_run:
                continue
            run = by_run[variant.name, seed]
            row = {
                f"half_depth_ratio_{variant.claim}": run.half_depth_ratio,
                f"ppl_cost_{variant.claim}": run.perplexity / full.perplexity - 1,
                f"time_ratio_{variant.claim}": run.curve[-1].simulated_s / full.curve[-1].simulated_s,
                f"cpu_ratio_{variant.claim}": run.curve[-1].cpu_s / full.curve[-1].cpu_s,
            }
            for claim, value in row.items():
                if variant is not FULL_PIPELINE or claim.startswith("half"):
                    found.setdefault(claim, []).append(value)
        skip = by_run[SKIP33.name, seed]
        found.setdefault("ppl_full", []).append(full.perplexity)
        found.setdefault("loss_at_time_ratio", []).append(skip.perplexity / in_time.perplexity)
        found.setdefault("overtaken_at_share", []).append(overtaken_at_share(skip, full))
    claims = {claim: middle(values)[0] for claim, values in found.items()}
    return claims, {claim: (min(values), max(values)) for claim, values in found.items()}


def show(outcome: Outcome) -> None:
    last, depths = outcome.curve[-1], sorted(outcome.depths.items(), reverse=True)
    row = "  ".join(f"{count}/{STAGES} {value:6.3f}" for count, value in depths)
    print(
        f"{outcome.name:22s} seed {outcome.seed}  {row}  half {outcome.half_depth_ratio - 1:+7.1%}  "
        f"{last.tokens / 1000:5.0f} k tokens, {last.simulated_s / 3600:5.2f} h, {last.cpu_s:4.0f} CPU s",
        flush=True,
    )


def conclude(claims: Mapping[str, float]) -> None:
    print(f"\nperplexity of the full pipeline: {claims['ppl_full']:.3f}; against it, after as many tokens:")
    for variant in VARIANTS[1:]:
        cost, seconds, cpu = (
            claims[f"{what}_{variant.claim}"] for what in ("ppl_cost", "time_ratio", "cpu_ratio")
        )
        print(
            f"{variant.name:22s} {cost:+6.1%} perplexity, {seconds:5.1%} of the time, {cpu:5.1%} of the CPU"
        )
    ratio, passed = claims["loss_at_time_ratio"], claims["overtaken_at_share"]
    print(
        f"after as much time skip 33 % has {abs(ratio - 1):.1%} {'lower' if ratio < 1 else 'higher'} "
        f"perplexity; its curve is passed for good after {passed:.0%} of the full pipeline's training"
    )


if __name__ == "__main__":
    main()
