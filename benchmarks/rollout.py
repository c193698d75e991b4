"""Tokens per CPU second of everything that can sample here: our engines, stock vLLM, transformers.

One thread, temperature 1, random weights (speed does not depend on what was learnt). On a model of 3 million
parameters, in float32 and bfloat16, plain and with a LoRA adapter, 64 answers of 128 tokens and answers of
long-tailed lengths in 64 slots; only tokens that were asked for count. Then the policy of `--model tiny`,
whose 24 new tokens each are the case that suits `generate` best.

Stock vLLM runs twice without an adapter, as it comes (`torch.compile`, inductor) and eager; what is claimed
against it is claimed against the faster. Where a CPU does not multiply bfloat16 its rows are left out.
--quick: 16 answers of 32 tokens in float32 and the smallest row of the tiny policy, once, and stock vLLM only
eager, so that no claim against it is printed.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from common import arguments, cpu_seconds, interleaved, middle, ratios, report
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from rollout_contenders import KV_BYTES, Contender, ContinuousBatching, Generate, Ours, Prompts, StockVllm
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from swarmnode.extensions.vllm.compat import missing_reason
from swarmnode.machine.hardware import cpu_has_bf16
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Engine, PolicyUpdate

SLOTS = 64
LONGEST = 330
MAX_LENGTH = 512
RANK = 8
PROMPT_TOKENS = 20
GROUP = 8
ROWS_PER_TYPE, TINY_ROWS = 4, 4

STOCK = ("stock vllm", "stock eager")

Rates = dict[str, list[float]]
"""Tokens per CPU second by contender, round by round."""


class Results:
    """Prints as it goes, and keeps what the report needs."""

    def __init__(self, repeats: int, rows: int) -> None:
        """`rows` will be measured, each in its share of the time."""
        self.repeats = repeats
        self.rows = rows
        self.row = 0
        self.claims: dict[str, float] = {}
        self.spread: dict[str, tuple[float, float]] = {}
        self.rates: dict[str, float] = {}

    def measure(
        self, row: str, contenders: Mapping[str, Contender], prompts: Prompts, lengths: Sequence[int]
    ) -> Rates:
        for contender in contenders.values():
            if isinstance(contender, Generate | ContinuousBatching):
                contender.sample(prompts[:4], [4] * 4)
            else:
                # Engines make themselves ready for every size of a batch that they meet for the first time.
                contender.sample(prompts, lengths)
        tokens = sum(lengths)
        self.row += 1
        found = interleaved(
            {
                name: lambda c=contender: tokens / cpu_seconds(lambda: c.sample(prompts, lengths))
                for name, contender in contenders.items()
            },
            self.repeats,
            self.row / self.rows,
        )
        for name, values in found.items():
            rate, (low, high) = middle(values)
            self.rates[f"{row}/{name}"] = rate
            print(f"{row:32} {name:12} {rate:8,.0f} tokens/CPU s ({low:,.0f}-{high:,.0f})", flush=True)
        return found

    def claim(self, name: str, rates: Rates, ours: str, *peers: str) -> None:
        """Claim a ratio against the fastest of the peers."""
        theirs = max(peers, key=lambda peer: middle(rates[peer])[0])
        value, (low, high) = middle(ratios(rates[ours], rates[theirs]))
        self.claims[name], self.spread[name] = value, (low, high)
        print(f"{'':32} {name}: {value:.2f}x ({low:.2f}-{high:.2f})", flush=True)


def main() -> None:
    options = arguments("tokens per CPU second of the rollout engines, of vLLM and of transformers")
    dtypes = ("float32", "bfloat16") if cpu_has_bf16() else ("float32",)
    if options.quick:
        results = Results(1, rows=2)
    else:
        results = Results(5, rows=ROWS_PER_TYPE * len(dtypes) + TINY_ROWS)
    disable_progress_bar()
    without_vllm = missing_reason()
    if without_vllm is not None:
        print(f"{without_vllm}: its rows and claims are left out")
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            glance(results, Path(folder), with_vllm=without_vllm is None)
        for dtype in () if options.quick else dtypes:
            compare_backends(results, dtype, Path(folder) / dtype, with_vllm=without_vllm is None)
    compare_tiny(results, quick=options.quick)
    report("rollout", results.claims, results.spread, options.json, extra={"tokens_per_cpu_s": results.rates})


def glance(results: Results, folder: Path, with_vllm: bool) -> None:
    """One short row: does each of them run, and roughly how fast."""
    base = small_model()
    base.save_pretrained(folder / "base")
    few = 16
    contenders: dict[str, Contender] = {
        "generate": Generate(base, few),
        "embedded": Ours(EmbeddedEngine(base, (), few, MAX_LENGTH)),
    }
    if with_vllm:
        contenders["stock eager"] = StockVllm(folder / "base", "float32", few, MAX_LENGTH)
    results.measure("fp32 plain equal, 16 x 32", contenders, random_prompts(few, 512), [32] * few)


def compare_backends(results: Results, dtype: str, folder: Path, with_vllm: bool) -> None:
    """All of them on one model in one type."""
    base = small_model().to(getattr(torch, dtype))
    base.save_pretrained(folder / "base")
    peft = get_peft_model(
        small_model().to(getattr(torch, dtype)),
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", init_lora_weights=False),
    ).eval()
    peft.save_pretrained(folder / "adapter")
    update = PolicyUpdate(1, get_peft_model_state_dict(peft), 2.0)
    equal, tailed = [128] * SLOTS, long_tailed_lengths(2 * SLOTS, LONGEST, median=40)
    short = "fp32" if dtype == "float32" else "bf16"

    plain = transformers_contenders(base) | {"embedded": Ours(EmbeddedEngine(base, (), SLOTS, MAX_LENGTH))}
    if with_vllm:
        plain |= vllm_plain(base, folder, dtype)
    rates = results.measure(f"{short} plain equal", plain, random_prompts(len(equal), 512), equal)
    if with_vllm:
        results.claim(f"embedded_vs_vllm_{short}", rates, "embedded", "vllm")
        results.claim(f"embedded_vs_stock_vllm_{short}", rates, "embedded", *STOCK)
        results.claim(f"vllm_vs_stock_{short}", rates, "vllm", *STOCK)
    rates = results.measure(f"{short} plain long-tailed", plain, random_prompts(len(tailed), 512), tailed)
    if dtype == "float32":
        results.claim("embedded_vs_generate_longtail", rates, "embedded", "generate")

    adapted = transformers_contenders(peft.get_base_model()) | {"embedded": Ours(with_policy(
        EmbeddedEngine(base, (), SLOTS, MAX_LENGTH), update
    ))}  # fmt: skip
    if with_vllm:
        adapted |= vllm_adapted(base, folder, dtype, update)
    rates = results.measure(f"{short} adapter equal", adapted, random_prompts(len(equal), 512), equal)
    if with_vllm and dtype == "bfloat16":
        results.claim("vllm_lora_vs_stock", rates, "vllm lora", "stock vllm")
    results.measure(f"{short} adapter long-tailed", adapted, random_prompts(len(tailed), 512), tailed)


def transformers_contenders(model: PreTrainedModel) -> dict[str, Contender]:
    return {
        "generate": Generate(model, SLOTS),
        "continuous": ContinuousBatching(model, SLOTS, MAX_LENGTH),
    }


def vllm_plain(base: PreTrainedModel, folder: Path, dtype: str) -> dict[str, Contender]:
    from swarmnode.extensions.vllm.vllm_engine import VllmEngine

    engine = VllmEngine(
        str(folder / "base"), base, (), SLOTS, MAX_LENGTH, lora_rank=RANK, dtype=dtype, kv_bytes=KV_BYTES
    )
    return {
        "vllm": Ours(engine),
        "stock vllm": StockVllm(folder / "base", dtype, SLOTS, MAX_LENGTH, compiled=True),
        "stock eager": StockVllm(folder / "base", dtype, SLOTS, MAX_LENGTH),
    }


def vllm_adapted(
    base: PreTrainedModel, folder: Path, dtype: str, update: PolicyUpdate
) -> dict[str, Contender]:
    from swarmnode.extensions.vllm.vllm_engine import VllmEngine

    found: dict[str, Contender] = {}
    for weights in ("merged", "lora"):
        engine = VllmEngine(
            str(folder / "base"), base, (), SLOTS, MAX_LENGTH,
            lora_rank=RANK, dtype=dtype, weights=weights, kv_bytes=KV_BYTES,
        )  # fmt: skip
        found[f"vllm {weights}"] = Ours(with_policy(engine, update))
    found["stock vllm"] = StockVllm(folder / "base", dtype, SLOTS, MAX_LENGTH, adapter=folder / "adapter")
    return found


def with_policy(engine: Engine, update: PolicyUpdate) -> Engine:
    engine.set_policy(update)
    return engine


def compare_tiny(results: Results, *, quick: bool) -> None:
    """Our engine and `generate` on the shape of `--model tiny`."""
    model = tiny_policy()
    for count in (64, 256):
        contenders = {"embedded": Ours(EmbeddedEngine(model, (), count)), "generate": Generate(model, count)}
        name = f"embedded_vs_generate_{count}"
        rates = results.measure(f"tiny {count} x 24", contenders, random_prompts(count, 258), [24] * count)
        results.claim(name, rates, "embedded", "generate")
        if quick:
            return

    groups = [prompt for prompt in random_prompts(256 // GROUP, 258) for _ in range(GROUP)]
    contenders = {"embedded": Ours(EmbeddedEngine(model, (), 256)), "generate": Generate(model, 256)}
    rates = results.measure("tiny groups of 8, 256 x 24", contenders, groups, [24] * 256)
    results.claim("groups_of_8_256", rates, "embedded", "generate")

    contenders = {"embedded": Ours(EmbeddedEngine(model, (), SLOTS)), "generate": Generate(model, SLOTS)}
    rates = results.measure("tiny long-tailed", contenders, groups, long_tailed_lengths(256, 192, median=20))
    results.claim("long_tail_64_slots", rates, "embedded", "generate")


def small_model() -> Qwen2ForCausalLM:
    """Three million parameters: large enough that arithmetic counts, small enough for one core."""
    return qwen2(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
    )


def tiny_policy() -> Qwen2ForCausalLM:
    return qwen2(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
    )


def qwen2(**sizes: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0)
    return Qwen2ForCausalLM(config).eval()


def random_prompts(count: int, vocab: int) -> list[tuple[int, ...]]:
    """All different: nothing to share between them."""
    rng = random.Random(0)
    return [tuple(rng.randrange(1, vocab) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def long_tailed_lengths(count: int, longest: int, median: int) -> list[int]:
    """Lognormal, as completions are: most end early, some run on."""
    rng = random.Random(1)
    return [min(longest, max(1, round(median * rng.lognormvariate(0, 0.9)))) for _ in range(count)]


if __name__ == "__main__":
    main()
