"""Tokens per CPU second of the embedded engine against `generate` of transformers, for the tiny policy.

Both sample at temperature 1 with one thread, from the same random weights. The claims are for 24 new tokens
each: none stops early, which is the case that suits `generate` best. Beside them: groups of 8 per prompt
(the shape of GRPO), and lengths with a long tail.
"""

import random
from collections.abc import Callable, Sequence

import torch
from common import arguments, cpu_seconds, interleaved, middle, ratios, report
from transformers import Qwen2Config, Qwen2ForCausalLM

from swarmnode.rollout.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Request, SamplingParams

VOCAB = 258
PROMPT_TOKENS = 20
NEW_TOKENS = 24
GROUP = 8
LONGEST = 192


def main() -> None:
    options = arguments("tokens per CPU second of the embedded engine against transformers")
    repeats = 3 if options.quick else 15
    model = tiny_policy()
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    rates: dict[str, float] = {}

    def compare(claim: str, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
        ours(), theirs()
        found = interleaved({"embedded": ours, "generate": theirs}, repeats)
        for engine, values in found.items():
            rates[f"{claim}/{engine}"], (low, high) = middle(values)
            print(
                f"{claim} {engine}: {rates[f'{claim}/{engine}']:,.0f} tokens/CPU s ({low:,.0f}-{high:,.0f})"
            )
        claims[claim], spread[claim] = middle(ratios(found["embedded"], found["generate"]))
        print(f"{claim}: {claims[claim]:.2f}x ({spread[claim][0]:.2f}-{spread[claim][1]:.2f})", flush=True)

    for count in (64, 256):
        engine = EmbeddedEngine(model, (), max_slots=count)
        prompts = random_prompts(count)
        lengths = [NEW_TOKENS] * count
        compare(
            f"embedded_vs_generate_{count}",
            lambda e=engine, p=prompts, n=lengths: embedded_rate(e, p, n),
            lambda p=prompts, n=lengths: generate_rate(model, p, n),
        )

    groups = [prompt for prompt in random_prompts(256 // GROUP) for _ in range(GROUP)]
    engine = EmbeddedEngine(model, (), max_slots=256)
    compare(
        "groups_of_8_256",
        lambda: embedded_rate(engine, groups, [NEW_TOKENS] * 256),
        lambda: generate_rate(model, groups, [NEW_TOKENS] * 256),
    )

    lengths = long_tailed_lengths(256)
    tail_engine = EmbeddedEngine(model, (), max_slots=64)
    print(f"long tail: 256 answers, mean {sum(lengths) / 256:.0f} tokens, at most {max(lengths)}, 64 slots")
    compare(
        "long_tail_64_slots",
        lambda: embedded_rate(tail_engine, groups, lengths),
        lambda: generate_rate(model, groups, lengths, batch=64),
    )
    report("rollout", claims, spread, options.json, extra={"tokens_per_cpu_s": rates})


def tiny_policy() -> Qwen2ForCausalLM:
    """The shape of `--model tiny`, with random weights: speed does not depend on what it learnt."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def random_prompts(count: int) -> list[tuple[int, ...]]:
    """All different: nothing to share between them."""
    rng = random.Random(0)
    return [tuple(rng.randrange(1, VOCAB) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def long_tailed_lengths(count: int) -> list[int]:
    """Lognormal, as completions are: most end early, some run on."""
    rng = random.Random(1)
    return [min(LONGEST, max(1, round(rng.lognormvariate(3.0, 0.9)))) for _ in range(count)]


def embedded_rate(
    engine: EmbeddedEngine, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> float:
    requests = [
        Request(str(i), prompt, SamplingParams(length, seed=i))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    def work() -> None:
        engine.submit(requests)
        left = len(requests)
        while left:
            left -= len(engine.step())

    return sum(lengths) / cpu_seconds(work)


@torch.inference_mode()
def generate_rate(
    model: Qwen2ForCausalLM,
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    batch: int | None = None,
) -> float:
    """Batches of `batch` sequences. Each runs until its longest has ended; only tokens asked for count."""
    size = batch or len(prompts)

    def work() -> None:
        for start in range(0, len(prompts), size):
            ids = torch.tensor(prompts[start : start + size])
            new = max(lengths[start : start + size])
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
            )

    return sum(lengths) / cpu_seconds(work)


if __name__ == "__main__":
    main()
