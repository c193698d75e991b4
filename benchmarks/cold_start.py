"""Whether the first rounds learn what they are told: lengths of answers, small updates, weights with top-p.

trained_length_ratio: mean length of the answers that rounds 1 to 5 of `refill` train on, over that of all
    that is asked, averaged over cold starts. Lengths are those of partial.py; the engine is a fake one with a
    clock of its own. Beside it: without turns, later rounds, and responses per second of the engine's clock.
update_lost_share: the largest share, over 1, 3 and 10 optimizer steps from the default learning rate, of the
    change of the logits that a policy merged into bfloat16 weights does not have. Beside it: rounding to
    nearest, stochastic rounding, what is wrong with the logits, entries that equal the base, time of a merge.
top_p_weight_error: the largest |importance weight - 1| of a token sampled with top-p 0.9 at temperatures 0.8
    and 1.2, engine and trainer having the same weights in float32. Beside it: prox over the whole vocabulary.

python benchmarks/cold_start.py [--quick] [--json FILE]
"""

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, cast

import torch
from common import arguments, cpu_seconds, machine, report
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.rollout.decode.adapters.adapter import LoraPair, lost_share, merged_weight
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Output, PolicyUpdate, Request, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.testing.fake_engine import FakeEngine
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample
from swarmnode.types import Example, ExampleKey

GROUPS, GROUP = 8, 8
MEDIAN_TOKENS, SIGMA, LONGEST = 40, 0.9, 330
EARLY_ROUNDS = 5
VOCAB = 512
STEPS = (1, 3, 10)
TOP_P, TEMPERATURES = 0.9, (0.8, 1.2)


def main() -> None:
    options = arguments("lengths, updates and weights of the first rounds")
    starts, rounds = (6, 12) if options.quick else (16, 40)
    print(f"on {machine()['cpu']}")
    lengths = {
        name: cold_starts(in_turn, starts, rounds) for name, in_turn in (("turns", True), ("free", False))
    }
    for name, found in lengths.items():
        print(f"  {name:6s}" + ", ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
    updates = lost_updates(256 if options.quick else 512)
    weights = top_p_weights(8 if options.quick else 32)
    print("  top-p " + ", ".join(f"{key} {value:.2e}" for key, value in weights.items()), flush=True)
    ours = [row["logits lost"] for (_, way), row in updates.items() if way == "stretched"]
    claims = {
        "trained_length_ratio": lengths["turns"]["rounds 1-5"],
        "update_lost_share": max(map(abs, ours)),
        "top_p_weight_error": weights["largest"],
    }
    extra = {
        "lengths": lengths,
        "updates": {f"{s} {w}": row for (s, w), row in updates.items()},
        "top_p": weights,
    }
    report("cold_start", claims, {}, options.json, extra=extra)


@dataclass
class Prompts:
    """The length of each answer is what its request allows; texts are not read."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return (1, 2, 3)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def cold_starts(in_turn: bool, starts: int, rounds: int) -> dict[str, float]:
    """Ratios to what is asked; one of the starts goes on for `rounds`."""
    early = [cold_start(seed, EARLY_ROUNDS, in_turn) for seed in range(starts)]
    # The same seeds: what the first rounds would train on if all were waited for is the control variate.
    long = [cold_start(seed, rounds, in_turn) for seed in range(2)]
    later = {
        f"rounds {first + 1}-{first + 6}": fmean(fmean(one[0][first : first + 6]) for one in long)
        / population()
        for first in range(EARLY_ROUNDS, rounds - 5, 12)
    }
    asked = fmean(asked for one in early for asked in one[1])
    return {
        "rounds 1-5": fmean(length for one in early for length in one[0]) / asked,
        **{f"round {n + 1}": fmean(one[0][n] for one in early) / asked for n in range(EARLY_ROUNDS)},
        **later,
        "responses/s in rounds 1-5": fmean(EARLY_ROUNDS * GROUPS * GROUP / sum(one[2]) for one in early),
        "responses/s later": fmean((rounds - 8) * GROUPS * GROUP / sum(one[2][8:]) for one in long),
    }


def population() -> float:
    draw = random.Random(0)
    return fmean(forced(draw.gauss(0, 1)) for _ in range(100_000))


def forced(z: float) -> int:
    return min(LONGEST, max(1, round(MEDIAN_TOKENS * math.exp(SIGMA * z))))


def cold_start(seed: int, rounds: int, in_turn: bool) -> tuple[list[float], list[float], list[float]]:
    """Mean length trained, mean length drawn, and seconds, of each round."""
    draw, lengths = random.Random(seed), dict[int, list[int]]()

    def stream() -> Iterator[Example]:
        for index in itertools.count():
            shared = draw.gauss(0, 1)
            lengths[index] = [forced(0.5**0.5 * (shared + draw.gauss(0, 1))) for _ in range(GROUP)]
            yield Example(ExampleKey("forced", "1", 0, index), str(index))

    engine = FakeEngine(
        lambda request: (1,) * request.sampling.max_tokens, 640, step_s=lambda n: 0.032 + 0.001 * n
    )
    rollouts = PartialRollouts(
        engine,
        cast(Renderer, Prompts()),
        PartialSettings("refill", GROUPS, GROUP, max_lag=8, in_turn=in_turn),
        SamplingParams(LONGEST),
        seed=None,
        sampling_of=lambda example, place: SamplingParams(lengths[example.key.index][place], ignore_eos=True),
        clock=lambda: engine.stepped_s,
    )
    examples, trained, seconds = stream(), list[float](), list[float]()
    for version in range(1, rounds + 1):
        started = engine.stepped_s
        found = [len(c.token_ids) for group in rollouts.round(examples) for c in group.completions]
        trained.append(fmean(found))
        seconds.append(engine.stepped_s - started)
        rollouts.set_policy(PolicyUpdate(version, {}, 1.0))
    drawn = [
        fmean(lengths[round_ * GROUPS + n][place] for n in range(GROUPS) for place in range(GROUP))
        for round_ in range(rounds)
    ]
    return trained, drawn, seconds


def model_of(hidden: int) -> Qwen2ForCausalLM:
    set_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


Way = Callable[[Tensor, LoraPair], Tensor]


def to_nearest(base: Tensor, pair: LoraPair) -> Tensor:
    return (base + pair.delta()).bfloat16()


def by_chance(base: Tensor, pair: LoraPair) -> Tensor:
    bits = (base + pair.delta()).view(torch.int32)
    return ((bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -(1 << 16)).view(
        torch.float32
    )


def stretched(base: Tensor, pair: LoraPair) -> Tensor:
    return merged_weight(base, pair, torch.bfloat16)


WAYS: dict[str, Way] = {"to nearest": to_nearest, "by chance": by_chance, "stretched": stretched}


def lost_updates(hidden: int) -> dict[tuple[int, str], dict[str, float]]:
    """By optimizer steps and way of merging. The products are in float32: of interest are the weights."""
    base = model_of(hidden).bfloat16().float()
    loaded = LoadedModel("random", copy.deepcopy(base), cast(Any, None), "fingerprint")
    settings = PolicyConfig()
    policy = Policy(loaded, settings, seed=0)
    optimizer = torch.optim.AdamW(
        policy.trainable().values(), lr=TrainingConfig().learning_rate, weight_decay=0
    )
    ids_BT, credit_B1 = torch.randint(VOCAB, (16, 48)), torch.randn(16, 1)
    found: dict[tuple[int, str], dict[str, float]] = {}
    for step in range(1, max(STEPS) + 1):
        logits = policy.model(input_ids=ids_BT).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        optimizer.zero_grad()
        (-credit_B1 * chosen).mean().backward()
        optimizer.step()
        if step in STEPS:
            for way, row in measured_ways(base, policy, ids_BT):
                found[step, way] = row
                text = ", ".join(f"{key} {value:.3f}" for key, value in row.items())
                print(f"  after {step:2d} steps, {way:10s} {text}", flush=True)
    return found


@torch.no_grad()
def measured_ways(
    base: Qwen2ForCausalLM, policy: Policy, ids_BT: Tensor
) -> Iterator[tuple[str, dict[str, float]]]:
    factors = {name: tensor.detach() for name, tensor in policy.trainable().items()}
    pairs = {
        name.removeprefix("base_model.model.").split(".lora_A.")[0]: LoraPair(
            a, factors[name.replace("lora_A", "lora_B")], policy.scaling
        )
        for name, a in factors.items()
        if "lora_A" in name
    }

    def logits_with(way: Way) -> tuple[Tensor, Qwen2ForCausalLM]:
        model = copy.deepcopy(base)
        for name, pair in pairs.items():
            weight = model.get_submodule(name).weight
            weight.copy_(way(weight, pair))
        return model(input_ids=ids_BT).logits.double(), model

    before = base(input_ids=ids_BT).logits.double()
    exact = logits_with(lambda weight, pair: weight + pair.delta())[0]
    for name, way in WAYS.items():
        logits, model = logits_with(way)
        weights = [(base.get_submodule(n).weight, model.get_submodule(n).weight, p) for n, p in pairs.items()]
        yield (
            name,
            {
                "logits lost": lost_share(before, exact - before, logits),
                "logits wrong": float((logits - exact).norm() / (exact - before).norm()),
                "weights lost": fmean(lost_share(w, p.delta(), m) for w, m, p in weights),
                "entries equal": fmean(float((w == m).float().mean()) for w, m, _ in weights),
                "CPU ms": 1e3 * median(_merging_s(way, weights) for _ in range(3)),
            },
        )


def _merging_s(way: Way, weights: Sequence[tuple[Tensor, Tensor, LoraPair]]) -> float:
    return cpu_seconds(lambda: [way(base, pair) for base, _, pair in weights])


def top_p_weights(answers: int) -> dict[str, float]:
    """|weight - 1| over the tokens of both temperatures."""
    errors: list[Tensor] = []
    full: list[Tensor] = []
    for temperature in TEMPERATURES:
        model = model_of(128)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(6)
        engine = EmbeddedEngine(copy.deepcopy(model), (), max_slots=answers, max_length=256)
        prompts = {
            str(i): tuple(random.Random(i).randrange(1, VOCAB) for _ in range(12)) for i in range(answers)
        }
        engine.submit(
            Request(name, ids, SamplingParams(128, temperature, TOP_P, seed=int(name)))
            for name, ids in prompts.items()
        )
        outputs: list[Output] = []
        while len(outputs) < answers:
            outputs += engine.step()
        samples = [
            TrainingSample(prompts[o.request_id], o.token_ids, 1.0, o.logprobs, o.spans) for o in outputs
        ]
        policy = Policy(LoadedModel("random", model, cast(Any, None), "fingerprint"), PolicyConfig(), seed=0)
        for top_p, into in ((TOP_P, errors), (1.0, full)):
            forward = Forward(policy, TrainingConfig(), temperature=temperature, top_p=top_p)
            with torch.no_grad():
                for batch in forward.batches(samples):
                    log_ratio_N = forward.logprobs(batch).logprobs_N - batch.own.logprobs_M
                    into.append(log_ratio_N.expm1().abs())
    ours, whole = torch.cat(errors), torch.cat(full)
    return {
        "largest": float(ours.max()),
        "mean": float(ours.mean()),
        "tokens": float(len(ours)),
        "over the whole vocabulary, largest": float(whole.max()),
        "over the whole vocabulary, mean": float(whole.mean()),
    }


if __name__ == "__main__":
    main()
