"""What partial rollouts gain over waiting for all: trained responses per CPU second, on a real engine.

A round trains on N responses, 8 to a prompt; lengths are forced and long-tailed (lognormal, sigma 0.9, median
40, at most 330 tokens, half of the variance shared within a group). After each round the policy changes. The
gain of a mode is what `sync` pays for a response over what the mode pays. Swapping the policy costs all alike
and is reported apart. All modes take turns on one engine, in blocks of rounds: between its blocks a
mode is parked, and what resuming costs `default` falls into a round that is not measured.

`april` is the published scheduler; its policy has changed when it resumes, so keys and values are computed
again. `default` refills the engine and keeps them. Nothing is seeded: on vLLM that costs extra. What could be
gained at most, with and without prompts: partial_ceiling.py.

python benchmarks/partial.py [--engine vllm|embedded] [--quick] [--json FILE]
"""

import argparse
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from common import arguments, interleaved, middle, parts, ratios, report
from partial_ceiling import Step, StepRecorder, ceilings
from transformers import Qwen2Config, Qwen2ForCausalLM

from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Engine, PolicyUpdate, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.types import Example, ExampleKey

VOCAB = 99
PROMPT_TOKENS = 24
GROUP = 8
MEDIAN_TOKENS = 40
SIGMA = 0.9
LONGEST = 330
SHARED_VARIANCE = 0.5
SLOTS = 640
MAX_LENGTH = 384
KV_BYTES = 1 << 30
MAX_LAG = 8
"""Of "default". `april` bounds nothing, as published."""
NO_BOUND = 1 << 20
LORA_RANK = 8
POLICIES = 4
"""Different adapters, taken in turn."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds_per_block: Mapping[int, int]
    """By N: single rounds of few responses differ much."""
    modes: tuple[str, ...]
    warmup_rounds: int
    blocks: int


# The two that the goals are about come one after the other: a machine that others use changes its pace.
FULL = Plan({64: 12, 128: 8, 256: 5}, ("sync", "default", "april 2"), 6, 8)
QUICK = Plan({32: 1}, ("sync", "default", "april 2"), 1, 1)


def main() -> None:
    which = engine_option()
    options = arguments("trained responses per CPU second of partial rollouts against waiting for all")
    plan = QUICK if options.quick else FULL
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    figures: dict[str, Any] = {"engine": which}
    with tempfile.TemporaryDirectory() as folder:
        built, adapters = build_engine(which, Path(folder))
        engine = StepRecorder(built)
        for responses, share in parts(list(plan.rounds_per_block)):
            figures[str(responses)] = measure(engine, adapters, responses, plan, claims, spread, share)
        engine.close()
    report("partial", claims, spread, options.json, extra=figures)


def engine_option() -> str:
    """Read `--engine`, and take it off the command line before the options of every benchmark are read."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    found, sys.argv[1:] = parser.parse_known_args()
    return found.engine


def measure(
    engine: StepRecorder,
    adapters: Sequence[PolicyUpdate],
    responses: int,
    plan: Plan,
    claims: dict[str, float],
    spread: dict[str, tuple[float, float]],
    share: float,
) -> dict[str, Any]:
    """All modes at one N. Fills in claims; returns the figures beside them."""
    modes = {name: Mode(name, engine, adapters, responses) for name in plan.modes}
    for mode in modes.values():
        mode.block(plan.warmup_rounds)
        mode.forget_measurements()
    found = interleaved(
        {
            name: lambda mode=mode: mode.block(plan.rounds_per_block[responses])
            for name, mode in modes.items()
        },
        plan.blocks,
        share,
    )
    gains = {name: middle(ratios(found["sync"], found[name])) for name in modes}
    sync = modes["sync"]
    limits = ceilings(
        sync.steps,
        mean=sync.tokens / sync.responses,
        longest=fmean(sync.longest),
        round_requests=responses,
        concurrency=modes["default"].rollouts.stats().concurrency,
    )
    claims[f"default_gain_{responses}"], spread[f"default_gain_{responses}"] = gains["default"]
    claims[f"april_gain_{responses}"], spread[f"april_gain_{responses}"] = gains["april 2"]
    claims[f"ceiling_{responses}"] = limits["ceiling at C = N"]
    claims[f"ceiling_with_prompts_{responses}"] = limits["ceiling with prompts at C used"]
    print(f"N = {responses}: " + ", ".join(f"{name} {value:.4g}" for name, value in limits.items()))
    figures: dict[str, Any] = {"ceiling": limits}
    for name, mode in modes.items():
        gain, (low, high) = gains[name]
        figures[name] = {"gain": gain, **mode.figures(modes["sync"])}
        described = ", ".join(f"{key} {value:.3g}" for key, value in figures[name].items() if key != "gain")
        print(f"  {name:10s} {gain:.2f}x ({low:.2f}-{high:.2f}): {described}", flush=True)
    for name in ("ceiling at C used", "ceiling with prompts at C used"):
        figures[f"share of {name}"] = gains["default"][0] / limits[name]
        print(f"  default has {figures[f'share of {name}']:.3f} of the {name}", flush=True)
    return figures


@dataclass
class Mode:
    """One scheduler, its stream of examples, its policies, and what it has shown so far."""

    name: str
    engine: StepRecorder
    adapters: Sequence[PolicyUpdate]
    round_responses: int
    version: int = 0
    cpu_s: float = 0.0
    swap_cpu_s: float = 0.0
    swaps: int = 0
    responses: int = 0
    generated_tokens: int = 0
    tokens: int = 0
    """Of responses trained on."""
    off_policy_tokens: int = 0
    age_tokens: int = 0
    max_age: int = 0
    reprefilled_tokens: int = 0
    longest: list[int] = field(default_factory=list[int])
    """Of each round."""
    steps: list[Step] = field(default_factory=list[Step])

    def __post_init__(self) -> None:
        self.examples = self._stream()
        self.lengths: dict[int, list[int]] = {}
        kind, _, factor = self.name.partition(" ")
        settings = PartialSettings(
            mode=cast(Any, "refill" if kind == "default" else kind),
            groups=self.round_responses // GROUP,
            group_size=GROUP,
            max_lag=MAX_LAG if kind == "default" else NO_BOUND,
            over_provision=float(factor or 1),
        )
        self.rollouts = PartialRollouts(
            cast(Engine, self.engine),
            cast(Renderer, Prompts()),
            settings,
            SamplingParams(LONGEST),
            seed=None,
            sampling_of=self._sampling,
            clock=time.process_time,
        )

    def forget_measurements(self) -> None:
        """What came so far was warming up. What the scheduler knows stays."""
        self.cpu_s = self.swap_cpu_s = 0.0
        self.swaps = self.responses = self.generated_tokens = self.tokens = self.off_policy_tokens = (
            self.age_tokens
        ) = 0
        self.max_age = self.reprefilled_tokens = 0
        self.longest, self.steps = [], []

    def block(self, rounds: int) -> float:
        """CPU seconds for a trained response, over some rounds, swaps of the policy apart."""
        # Another mode had the engine: go back to our own policy, and let what resumes do so unmeasured. All
        # modes do, so that they stay at the same examples.
        self.engine.set_policy(self._policy())
        list(self.rollouts.round(self.examples))
        self._swap()
        spent = 0.0
        for _ in range(rounds):
            spent += self._measured_round()
            self._swap()
        self.rollouts.park()
        return spent / (rounds * self.round_responses)

    def figures(self, sync: "Mode") -> dict[str, float | None]:
        """What a gain is paid with, and what it hides."""
        now = self.rollouts.stats()
        swapped = (sync.cpu_s + sync.swap_cpu_s) / (self.cpu_s + self.swap_cpu_s)
        return {
            "gain in all": sync.cpu_s / sync.responses / (self.cpu_s / self.responses),
            "gain in tokens": self.generated_tokens / self.cpu_s / (sync.generated_tokens / sync.cpu_s),
            "tokens per CPU s": self.generated_tokens / self.cpu_s,
            "off-policy share": self.off_policy_tokens / self.tokens,
            "mean age": self.age_tokens / self.tokens,
            "max age": self.max_age,
            "re-prefilled tokens per response": self.reprefilled_tokens / self.responses,
            "idle share": now.idle_share,
            "mean length trained": self.tokens / self.responses,
            "mean length produced": now.mean_tokens_produced,
            "dropped": now.dropped_stale,
            "swap CPU ms": 1e3 * self.swap_cpu_s / self.swaps,
            "gain with swaps": swapped * self.responses / sync.responses,
        }

    def _measured_round(self) -> float:
        before, started = self.engine.stats(), time.process_time()
        with self.engine.recording(self.steps):
            found = list(self.rollouts.round(self.examples))
        spent, after = time.process_time() - started, self.engine.stats()
        self.cpu_s += spent
        self.generated_tokens += after.generated_tokens - before.generated_tokens
        self.reprefilled_tokens += after.reprefilled_tokens - before.reprefilled_tokens
        self._count(found)
        return spent

    def _count(self, found: list[Answered]) -> None:
        completions = [completion for group in found for completion in group.completions]
        self.responses += len(completions)
        self.tokens += sum(len(completion.token_ids) for completion in completions)
        self.longest.append(max(len(completion.token_ids) for completion in completions))
        for span in itertools.chain.from_iterable(completion.spans for completion in completions):
            age, tokens = self.version - span.version, span.end - span.start
            self.off_policy_tokens += tokens * (age > 0)
            self.age_tokens += tokens * age
            self.max_age = max(self.max_age, age)

    def _swap(self) -> None:
        self.version += 1
        started = time.process_time()
        self.rollouts.set_policy(self._policy())
        self.swap_cpu_s += time.process_time() - started
        self.swaps += 1

    def _policy(self) -> PolicyUpdate:
        return replace(self.adapters[self.version % len(self.adapters)], version=self.version)

    def _stream(self) -> Iterator[Example]:
        """The same for every mode: examples, and the lengths of their completions."""
        rng = random.Random(3)
        for index in itertools.count():
            shared = SHARED_VARIANCE**0.5 * rng.gauss(0, 1)
            own = [(1 - SHARED_VARIANCE) ** 0.5 * rng.gauss(0, 1) for _ in range(GROUP)]
            tokens = [round(MEDIAN_TOKENS * math.exp(SIGMA * (shared + z))) for z in own]
            self.lengths[index] = [min(LONGEST, max(1, length)) for length in tokens]
            yield Example(ExampleKey("forced", "1", 0, index), str(index))

    def _sampling(self, example: Example, place: int) -> SamplingParams:
        return SamplingParams(self.lengths[example.key.index][place], ignore_eos=True)


class Prompts:
    """Prompts of random tokens, one for each text; completions are not read."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        rng = random.Random(text)
        return tuple(rng.randrange(1, VOCAB) for _ in range(PROMPT_TOKENS))

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def build_engine(which: str, folder: Path) -> tuple[Engine, list[PolicyUpdate]]:
    """A Qwen2 of about 3M random parameters, and LoRA adapters for all its linear layers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    adapters = [random_adapter(model) for _ in range(POLICIES)]
    if which == "embedded":
        return EmbeddedEngine(model.bfloat16(), (0,), max_slots=SLOTS, max_length=MAX_LENGTH), adapters
    from swarmnode.extensions.vllm.vllm_engine import VllmEngine

    model.save_pretrained(folder)
    engine = VllmEngine(
        str(folder),
        model,
        (0,),
        max_slots=SLOTS,
        max_length=MAX_LENGTH,
        lora_rank=LORA_RANK,
        dtype="bfloat16",
        weights="merged",
        kv_bytes=KV_BYTES,
    )
    return engine, adapters


def random_adapter(model: torch.nn.Module) -> PolicyUpdate:
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers"):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.02 * torch.randn(LORA_RANK, module.in_features)
            tensors[f"{prefix}.lora_B.weight"] = 0.02 * torch.randn(module.out_features, LORA_RANK)
    return PolicyUpdate(0, tensors, scaling=2.0)


if __name__ == "__main__":
    main()
