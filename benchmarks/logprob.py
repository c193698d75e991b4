"""What log-probabilities and entropies of 2048 tokens cost with a frozen head of 32768 tokens.

python benchmarks/logprob.py [--quick] [--json FILE]

Three sides compute both from the same hidden states (width 896), and the gradient of a sum of the
log-probabilities with respect to the hidden states:
  naive      logits in float32, log_softmax, gather; entropy from exp(log_softmax) without a gradient
  recompute  chunks of rows, computed again in the backward pass (our path for a head that is trained)
  ours       chunks of rows, the gradient of each row formed beside its probabilities: two products in all
Each measurement is a fresh process with one torch thread. Its first step is measured for memory: the peak of
the resident set above what it is before, as the kernel counts it, so temporaries inside of operations and
buffers of the matrix library are in. The steps after it are measured for CPU time. Rounds are interleaved.

`memory_vs_naive` and `time_vs_naive` are ours / naive in float32, `_bf16` with a head in bf16, on CPUs that
multiply it: others take minutes for a single step of any side. `leanest` is the least that plain operations
can do: gather minus logsumexp, no entropy at all.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from common import arguments, cpu_seconds, middle, parts, ratios, report, rounds
from torch import Tensor, nn

from swarmnode.machine.hardware import cpu_has_bf16
from swarmnode.model.head import head_logprobs

TOKENS, VOCABULARY, WIDTH = 2048, 32_768, 896
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = ("naive", "leanest", "recompute", "ours")
WARM_TOKENS = 64
"""Of a first step that loads libraries, before the memory is looked at."""
Step = Callable[[int], Tensor]
Measured = dict[str, tuple[Sequence[float], Sequence[float]]]


def step_of(side: str, dtype: torch.dtype) -> Step:
    """A function that runs forward and backward for its first so many tokens, and returns the gradient."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype).requires_grad_(False)
    all_hidden_ND, all_targets_N = torch.randn(TOKENS, WIDTH).to(dtype), torch.randint(VOCABULARY, (TOKENS,))
    all_weights_N = torch.randn(TOKENS)
    if side == "recompute":
        # Another `forward` on the instance: the head counts as a module of unknown content.
        head.forward = lambda hidden_ND: nn.functional.linear(hidden_ND, head.weight)

    def naive(hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        all_NV = head(hidden_ND).float().log_softmax(-1)
        with torch.no_grad():
            -(all_NV.exp() * all_NV).sum(-1)
        return all_NV.gather(-1, targets_N[:, None])[:, 0]

    def leanest(hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        logits_NV = head(hidden_ND).float()
        return logits_NV.gather(-1, targets_N[:, None])[:, 0] - logits_NV.logsumexp(-1)

    def chunked(hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return head_logprobs(head, hidden_ND, targets_N).logprobs_N

    logprobs = {"naive": naive, "leanest": leanest}.get(side, chunked)

    def step(tokens: int) -> Tensor:
        hidden_ND = all_hidden_ND[:tokens].clone().requires_grad_()
        loss = (logprobs(hidden_ND, all_targets_N[:tokens]) * all_weights_N[:tokens]).sum()
        return torch.autograd.grad(loss, hidden_ND)[0]

    return step


def resident_bytes(kind: str) -> int:
    """VmRSS: now. VmHWM: the most since the process started or the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def measure_here(side: str, dtype: str, steps: int) -> None:
    step = step_of(side, DTYPES[dtype])
    step(WARM_TOKENS)
    # 5 resets the high-water mark of this process (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    gradient = step(TOKENS)
    peak = resident_bytes("VmHWM") - before
    seconds = min(cpu_seconds(lambda: step(TOKENS)) for _ in range(steps))
    print(json.dumps([seconds, peak, gradient.double().norm().item()]))


def measure(side: str, dtype: str, steps: int) -> tuple[float, float, float]:
    """(CPU seconds of the fastest step, peak bytes, norm of the gradient), in a process of its own."""
    command = [sys.executable, __file__, "--side", side, dtype, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def compare(dtype: str, most_rounds: int, steps: int, share: float) -> Measured:
    """side -> (seconds, bytes) of each round."""
    found: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
    for _ in rounds(most_rounds, share):
        for side in SIDES:
            found[side].append(measure(side, dtype, steps))
    reference = found["naive"][0][2]
    for side, rows in found.items():
        # The exactness is for the tests; here only: all sides did the work.
        assert all(abs(norm / reference - 1) < 0.01 for _, _, norm in rows), (side, rows, reference)
    return {side: ([row[0] for row in rows], [row[1] for row in rows]) for side, rows in found.items()}


def main() -> None:
    options = arguments(__doc__ or "")
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    dtypes = list(DTYPES) if cpu_has_bf16() and not options.quick else ["fp32"]
    for dtype, share in parts(dtypes):
        sides = compare(dtype, 1 if options.quick else 5, steps=1 if options.quick else 2, share=share)
        for side, (seconds, peaks) in sides.items():
            (time_s, (low, high)), (peak, _) = middle(seconds), middle(peaks)
            print(
                f"{dtype} {side:10s} {time_s:6.2f} CPU s ({low:.2f}-{high:.2f})  {peak / 2**20:6.0f} MiB",
                flush=True,
            )
        suffix = "" if dtype == "fp32" else f"_{dtype}"
        for against in ("naive", "leanest"):
            for what, index in (("time", 0), ("memory", 1)):
                name = f"{what}_vs_{against}{suffix}"
                claims[name], spread[name] = middle(ratios(sides["ours"][index], sides[against][index]))
    report("logprob", claims, spread, options.json, {"tokens": TOKENS, "vocabulary": VOCABULARY})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        measure_here(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
