"""Forward and backward of a LoRA linear: `model/adapters/lora.py` against PEFT's forward, on the CPU.

One layer of hidden x hidden features, 4096 tokens, rank 16, CPU seconds of one thread, every side once per
round. `base` is the layer without an adapter: what is above it is the price of LoRA. A claim is the geometric
mean over the two widths of the ratios PEFT / ours, round by round. `default` is what PEFT makes by itself of
a bfloat16 model: float32 adapters on it. On a CPU that does not multiply bfloat16 only float32 is measured:
nobody would train in anything else there, and `policy.dtype = auto` does not.

Printed besides: four adapters with 1024 tokens each in one batch, against one run of PEFT per adapter (PEFT
refuses mixed batches in training), and the small widths of the tiny policy.
"""

import gc
from collections.abc import Callable, Sequence
from math import exp, log
from typing import Any

import common
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

from swarmnode.machine.hardware import cpu_has_bf16
from swarmnode.model.adapters.lora import LoraWeights, Segment, lora_linear, lora_linear_segments

TOKENS, RANK, ADAPTERS = 4096, 16, 4
WIDTHS = (512, 1024)
SMALL = ((500, 64), (4000, 64), (2000, 256))
"""(tokens, features): the tiny policy's layers, and those of the 3M-parameter one."""

KINDS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "default": (torch.bfloat16, torch.float32),
}
"""Type of base and activations, type of the adapters."""


def peft_layer(hidden: int, kind: str) -> Any:
    dtype, adapter_dtype = KINDS[kind]
    torch.manual_seed(0)
    base = nn.Linear(hidden, hidden, bias=False, dtype=dtype).requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False)
    layer = PeftLinear(base, "0", config=config, r=RANK, lora_alpha=2 * RANK)
    for i in range(1, ADAPTERS):
        layer.update_layer(str(i), RANK, lora_alpha=2 * RANK, config=config)
    for part in (layer.lora_A, layer.lora_B):
        part.to(adapter_dtype).requires_grad_(True)
    return layer


def weights(layer: Any) -> list[LoraWeights]:
    return [
        LoraWeights(layer.lora_A[str(i)].weight, layer.lora_B[str(i)].weight, layer.scaling[str(i)])
        for i in range(ADAPTERS)
    ]


def timed(forward: Callable[[], Tensor], gradient: Tensor, leaves: Sequence[Tensor]) -> Callable[[], float]:
    def measure() -> float:
        for leaf in leaves:
            leaf.grad = None
        return common.cpu_seconds(lambda: forward().backward(gradient))

    return measure


def measured(tokens: int, hidden: int, kind: str, repeats: int, share: float = 1.0) -> dict[str, list[float]]:
    layer, dtype = peft_layer(hidden, kind), KINDS[kind][0]
    x = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    gradient = torch.randn(1, tokens, hidden).to(dtype)
    base, adapters = layer.base_layer, weights(layer)
    share = tokens // ADAPTERS
    segments = tuple(Segment(i * share, (i + 1) * share, i) for i in range(ADAPTERS))
    parts = [part.detach().requires_grad_() for part in x.split(share, dim=1)]

    def peft_runs() -> float:
        spent = 0.0
        for i, (part, part_gradient) in enumerate(zip(parts, gradient.split(share, dim=1), strict=True)):
            layer.set_adapter(str(i))
            spent += timed(lambda part=part: layer(part), part_gradient, [part, *layer.parameters()])()
        layer.set_adapter("0")
        return spent

    leaves = [x, *layer.parameters()]
    variants = {
        "peft": timed(lambda: layer(x), gradient, leaves),
        "ours": timed(lambda: lora_linear(x, base.weight, None, adapters[0]), gradient, leaves),
        "base": timed(lambda: base(x), gradient, leaves),
        "peft_runs": peft_runs,
        "ours_mixed": timed(
            lambda: lora_linear_segments(x, base.weight, None, adapters, segments), gradient, leaves
        ),
    }
    common.interleaved(variants, 2)
    gc.collect()
    gc.disable()
    try:
        return common.interleaved(variants, repeats, share)
    finally:
        gc.enable()


def row(tokens: int, hidden: int, kind: str, found: dict[str, list[float]]) -> str:
    ms = {name: common.middle(seconds)[0] * 1e3 for name, seconds in found.items()}
    ratio, (low, high) = common.middle(common.ratios(found["peft"], found["ours"]))
    mixed, (mixed_low, mixed_high) = common.middle(common.ratios(found["peft_runs"], found["ours_mixed"]))
    return (
        f"{kind:8}{tokens:6}{hidden:7}{ms['base']:9.2f}{ms['peft']:9.2f}{ms['ours']:9.2f}"
        f"   {ratio:.2f} ({low:.2f}-{high:.2f}){ms['peft_runs']:12.2f}{ms['ours_mixed']:9.2f}"
        f"   {mixed:.2f} ({mixed_low:.2f}-{mixed_high:.2f})"
    )


def geometric_mean(columns: Sequence[Sequence[float]]) -> list[float]:
    return [exp(sum(map(log, values)) / len(values)) for values in zip(*columns, strict=True)]


def main() -> None:
    options = common.arguments(__doc__ or "")
    repeats = 7 if options.quick else 25
    print("CPU ms, medians; ratios PEFT / ours with quartiles; right: 4 adapters, 1/4 of the tokens each")
    print("kind    tokens  width     base     peft     ours   ratio              peft x4    mixed   ratio")
    claims, spread, table = {}, {}, {}
    kinds = [kind for kind, (dtype, _) in KINDS.items() if dtype == torch.float32 or cpu_has_bf16()]
    for kind, share in common.parts(kinds):
        ratios = []
        for hidden in WIDTHS:
            found = measured(TOKENS, hidden, kind, repeats, share)
            ratios.append(common.ratios(found["peft"], found["ours"]))
            table[f"{kind}_{hidden}"] = common.middle(ratios[-1])[0]
            table[f"mixed_{kind}_{hidden}"] = common.middle(
                common.ratios(found["peft_runs"], found["ours_mixed"])
            )[0]
            print(row(TOKENS, hidden, kind, found), flush=True)
        name = f"fused_vs_peft_{kind}"
        claims[name], spread[name] = common.middle(geometric_mean(ratios))
    for tokens, hidden in SMALL:
        print(row(tokens, hidden, "fp32", measured(tokens, hidden, "fp32", 10 * repeats)), flush=True)
    shapes = {name: round(value, 3) for name, value in table.items()}
    common.report("lora", claims, spread, options.json, {"ratios_by_shape": shapes})


if __name__ == "__main__":
    main()
