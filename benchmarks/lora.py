"""Forward and backward of a LoRA linear: `model/adapters/lora.py` against PEFT's forward.

One layer, 4096 tokens, rank 16, every side once per round; on both sides the module is called as a model
calls it. `base` is the layer without an adapter: what is above it is the price of LoRA. `default` is what
PEFT makes by itself of a bfloat16 model: float32 adapters on it.

On a CPU: hidden x hidden features, CPU seconds of one thread. A claim is the geometric mean over the two
widths of the ratios PEFT / ours, round by round. On a CPU that does not multiply bfloat16 only float32 is
measured: nobody would train in anything else there, and `policy.dtype = auto` does not. Where torch sees a
CUDA card, that is measured instead, by its events, with the layers of the LoRAFusion paper and of
Qwen2.5-0.5B; `strict` is then PEFT's bfloat16 adapters against our float32 ones, which a node has.

Printed besides: four adapters with 1024 tokens each in one batch, against one run of PEFT per adapter (PEFT
refuses mixed batches in training), and the small widths of the tiny policy.
"""

import gc
from collections.abc import Callable, Sequence
from math import exp, log
from typing import Any

import common
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from swarmnode.machine.hardware import cpu_has_bf16
from swarmnode.model.adapters.lora_patch import FusedLora, RoutedTokens

TOKENS, RANK = 4096, 16
ADAPTERS = ("default", "1", "2", "3")
WIDTHS = (512, 1024)
SMALL = ((500, 64), (4000, 64), (2000, 256))
"""(tokens, features): the tiny policy's layers, and those of the 3M-parameter one."""

ON_A_CARD = ((4096, 4096), (5120, 5120), (8192, 8192), (896, 4864), (4864, 896), (896, 896), (896, 128))
"""(features in, out)."""

CALLS = 10
"""Calls between two events of a card: as in a model, it works on one while the next is started."""

KINDS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "default": (torch.bfloat16, torch.float32),
}
"""Type of base and activations, type of the adapters."""


def peft_model(features_in: int, features_out: int, kind: str, device: str) -> Any:
    dtype, adapter_dtype = KINDS[kind]
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(features_in, features_out, bias=False, dtype=dtype, device=device))
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, target_modules=["0"])
    model: Any = get_peft_model(base, config, autocast_adapter_dtype=False)
    for name in ADAPTERS[1:]:
        model.add_adapter(name, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    return model


def timed(forward: Callable[[], Tensor], gradient: Tensor, leaves: Sequence[Tensor]) -> Callable[[], float]:
    """Returns a measurement of forward and backward, in seconds."""

    def work() -> None:
        torch.autograd.grad(forward(), leaves, gradient, allow_unused=True)

    def on_a_card() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / CALLS

    return on_a_card if gradient.is_cuda else lambda: common.cpu_seconds(work)


def sides(
    tokens: int, features_in: int, features_out: int, kind: str, device: str = "cpu"
) -> dict[str, Callable[[], float]]:
    """Returns the measurements of one layer, by side."""
    dtype = KINDS[kind][0]
    theirs, ours = (peft_model(features_in, features_out, kind, device) for _ in range(2))
    fused = FusedLora(ours)
    x = torch.randn(1, tokens, features_in, device=device).to(dtype).requires_grad_()
    gradient = torch.randn(1, tokens, features_out, device=device).to(dtype)
    share = tokens // len(ADAPTERS)
    parts = [part.detach().requires_grad_() for part in x.split(share, dim=1)]
    gradients = gradient.split(share, dim=1)
    layer, own_layer = theirs.base_model.model[0], ours.base_model.model[0]

    def trained(layer: Any, name: str) -> list[Tensor]:
        return [layer.lora_A[name].weight, layer.lora_B[name].weight]

    def peft_runs() -> float:
        spent = 0.0
        for name, part, part_gradient in zip(ADAPTERS, parts, gradients, strict=True):
            layer.set_adapter(name)
            spent += timed(lambda part=part: layer(part), part_gradient, [part, *trained(layer, name)])()
        layer.set_adapter(ADAPTERS[0])
        return spent

    def mixed() -> float:
        with fused.route([RoutedTokens(name, share) for name in ADAPTERS]):
            return timed(lambda: own_layer(x), gradient, [x, *every])()

    ours.set_requires_grad(list(ADAPTERS))
    every = [weight for name in ADAPTERS for weight in trained(own_layer, name)]
    return {
        "peft": timed(lambda: layer(x), gradient, [x, *trained(layer, ADAPTERS[0])]),
        "ours": timed(lambda: own_layer(x), gradient, [x, *trained(own_layer, ADAPTERS[0])]),
        "base": timed(lambda: layer.base_layer(x), gradient, [x]),
        "peft_runs": peft_runs,
        "ours_mixed": mixed,
    }


def measured(
    variants: dict[str, Callable[[], float]], repeats: int, share: float = 1.0
) -> dict[str, list[float]]:
    common.interleaved(variants, 2)
    gc.collect()
    gc.disable()
    try:
        return common.interleaved(variants, repeats, share)
    finally:
        gc.enable()


def row(tokens: int, shape: str, kind: str, found: dict[str, list[float]]) -> str:
    ms = {name: common.middle(seconds)[0] * 1e3 for name, seconds in found.items()}
    ratio, (low, high) = common.middle(common.ratios(found["peft"], found["ours"]))
    mixed, (mixed_low, mixed_high) = common.middle(common.ratios(found["peft_runs"], found["ours_mixed"]))
    return (
        f"{kind:8}{tokens:6}{shape:>11}{ms['base']:9.3f}{ms['peft']:9.3f}{ms['ours']:9.3f}"
        f"   {ratio:.2f} ({low:.2f}-{high:.2f}){ms['peft_runs']:12.3f}{ms['ours_mixed']:9.3f}"
        f"   {mixed:.2f} ({mixed_low:.2f}-{mixed_high:.2f})"
    )


def geometric_mean(columns: Sequence[Sequence[float]]) -> list[float]:
    return [exp(sum(map(log, values)) / len(values)) for values in zip(*columns, strict=True)]


def on_a_cpu(repeats: int, json_path: Any) -> None:
    claims, spread, table = {}, {}, {}
    kinds = [kind for kind, (dtype, _) in KINDS.items() if dtype == torch.float32 or cpu_has_bf16()]
    for kind, share in common.parts(kinds):
        ratios = []
        for hidden in WIDTHS:
            found = measured(sides(TOKENS, hidden, hidden, kind), repeats, share)
            ratios.append(common.ratios(found["peft"], found["ours"]))
            table[f"{kind}_{hidden}"] = common.middle(ratios[-1])[0]
            table[f"mixed_{kind}_{hidden}"] = common.middle(
                common.ratios(found["peft_runs"], found["ours_mixed"])
            )[0]
            print(row(TOKENS, str(hidden), kind, found), flush=True)
        name = f"fused_vs_peft_{kind}"
        claims[name], spread[name] = common.middle(geometric_mean(ratios))
    for tokens, hidden in SMALL:
        found = measured(sides(tokens, hidden, hidden, "fp32"), 10 * repeats)
        print(row(tokens, str(hidden), "fp32", found), flush=True)
    shapes = {name: round(value, 3) for name, value in table.items()}
    common.report("lora", claims, spread, json_path, {"ratios_by_shape": shapes})


def on_a_card(repeats: int, json_path: Any) -> None:
    claims, spread = {}, {}
    for features_in, features_out in ON_A_CARD:
        shape = f"{features_in}x{features_out}"
        by_kind = {
            kind: sides(TOKENS, features_in, features_out, kind, "cuda") for kind in ("bf16", "default")
        }
        every = {f"{kind} {side}": run for kind, runs in by_kind.items() for side, run in runs.items()}
        found = measured(every, repeats)
        for kind, runs in by_kind.items():
            print(row(TOKENS, shape, kind, {side: found[f"{kind} {side}"] for side in runs}), flush=True)
        pairs = {"bf16": ("bf16", "bf16"), "default": ("default", "default"), "strict": ("bf16", "default")}
        for name, (theirs, ours) in pairs.items():
            claim = f"fused_vs_peft_{name}_{shape}"
            ratios = common.ratios(found[f"{theirs} peft"], found[f"{ours} ours"])
            claims[claim], spread[claim] = common.middle(ratios)
    common.report("lora", claims, spread, json_path, {"gpu": torch.cuda.get_device_name()})


def main() -> None:
    options = common.arguments(__doc__ or "")
    card = torch.cuda.is_available()
    where = "card" if card else "CPU"
    print(
        f"{where} ms, medians; ratios PEFT / ours with quartiles; right: 4 adapters, 1/4 of the tokens each"
    )
    print(
        "kind    tokens      shape     base     peft     ours   ratio              peft x4    mixed   ratio"
    )
    (on_a_card if card else on_a_cpu)(7 if options.quick else 25, options.json)


if __name__ == "__main__":
    main()
