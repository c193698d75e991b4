"""One GRPO step, end to end (generation, scoring, update), against TRL's `GRPOTrainer`.

    python benchmarks/grpo.py [--quick] [--json FILE]

Same model, prompts, group size, longest completion, LoRA rank, reward and optimizer, one thread, samples per
CPU second. Each side is a process of its own that loads once; steps are asked for in turns, so that a noisy
minute falls on all alike. TRL is installed beside this file at the first run, into an environment of its own
(build/trl), which has torch, transformers and peft from swarmnode's.

Both are measured as they come (`default`: each chooses its precision; TRL takes bfloat16 by autocast, we take
it where the CPU multiplies it and the model is wide enough) and tuned: the precision of the row on both
sides, and TRL without gradient checkpointing (grpo_trl.py). `samples_vs_trl_*` is ours as it comes against
the faster of TRL's two, `samples_vs_trl_default_*` both as they come, and `samples_vs_trl_same_precision_*`
both tuned.

tiny: the policy of `--model tiny`, 16 prompts x 8 answers of at most 10 tokens.
3m:   3 million random parameters, 8 prompts x 8 answers of at most 64 tokens; in float32, in bfloat16, and in
      float32 with prompts of 125 tokens instead of 9.
30m, 120m: 27 and 113 million random parameters, 4 and 2 prompts x 8 answers of at most 32 tokens, in what
      the CPU multiplies fastest: the larger the model, the more of a step is products, alike for all.
Where a CPU does not multiply bfloat16, what computes in it is left out: TRL as it comes, and the row of
bfloat16. It would take minutes a step, and nobody would run it. --quick: the row `tiny`, ours as it comes and
TRL tuned, one turn.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from common import MODELS, arguments, interleaved, middle, parts, ratios, report
from grpo_job import Job
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from swarmnode.extensions.demonstration.tiny import VOCABULARY, build_tiny
from swarmnode.machine.hardware import cpu_has_bf16

ROOT = Path(__file__).parent.parent
TRL_HOME = ROOT / "build" / "trl"
TRL = "trl==1.16.0"
WARM_UP_TURNS = 2
TINY_STEPS = 5
"""Of the tiny policy in a turn: one takes a tenth of a second."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Side:
    """A process that takes steps whenever it is asked to."""

    def __init__(self, name: str, python: Path, module: str, job: Job, log: Path) -> None:
        self.name = name
        self._log = log
        self._errors = log.open("w")
        code = f"from {module} import serve; serve()"
        self._process = subprocess.Popen(
            [str(python), "-c", code, job.to_json()],
            cwd=Path(__file__).parent,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.tokens = self.samples = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def samples_per_cpu_s(self, steps: int) -> float:
        """Take some steps."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("STEP "):
                step = json.loads(line.removeprefix("STEP "))
                self.tokens += step["tokens"]
                self.samples += step["samples"]
                return step["samples"] / step["cpu_s"]
        raise SystemExit(f"{self.name} ended early:\n{self._log.read_text()[-2000:]}")


def main() -> None:
    options = arguments(__doc__ or "")
    turns = 1 if options.quick else 12
    python = trl_environment()
    claims: dict[str, float] = {}
    spread: dict[str, Sequence[float]] = {}
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="swarmnode-grpo-") as folder:
        rows = jobs(Path(folder), turns + WARM_UP_TURNS)
        if options.quick:
            rows = {"tiny": rows["tiny"]}
        else:
            rows |= larger_jobs(Path(folder), turns + WARM_UP_TURNS)
            if not cpu_has_bf16():
                del rows["3m_bf16"]
        for (name, job), share in parts(list(rows.items())):
            found = measure(job, python, Path(folder), turns, share, quick=options.quick)
            for side, values in found.items():
                rate, (low, high) = middle(values)
                rates[f"{name}/{side}"] = rate
                print(f"{name:5s} {side:12s} {rate:8.1f} samples per CPU s ({low:.1f}-{high:.1f})")
            peers = [side for side in found if side.startswith("trl")]
            best = max(peers, key=lambda side: rates[f"{name}/{side}"])
            pairs = {
                "samples_vs_trl": ("ours default", best),
                "samples_vs_trl_default": ("ours default", "trl default"),
                "samples_vs_trl_same_precision": ("ours", "trl"),
            }
            for claim, (ours, theirs) in pairs.items():
                if ours in found and theirs in found:
                    key = f"{claim}_{name}"
                    claims[key], spread[key] = middle(ratios(found[ours], found[theirs]))
    report("grpo", claims, spread, options.json, {"rates": rates})


def jobs(folder: Path, turns: int) -> dict[str, Job]:
    """The two models with the sizes of their steps."""
    tiny = build_tiny(MODELS)
    common = {"rank": 16, "learning_rate": 1e-4, "steps": turns * TINY_STEPS}
    model = random_model(tiny, folder / "3m", hidden=256, intermediate=704, layers=4, heads=4)
    small = Job(str(model), prompts=8, group=8, max_tokens=64, **common)
    return {
        "tiny": Job(str(tiny), prompts=16, group=8, max_tokens=10, steps_per_turn=TINY_STEPS, **common),
        "3m": small,
        "3m_bf16": replace(small, dtype="bfloat16"),
        "3m_long_prompts": replace(small, prompt_letters=120),
    }


def larger_jobs(folder: Path, turns: int) -> dict[str, Job]:
    """The rows that say what is left of the lead when the model grows."""
    tiny = build_tiny(MODELS)
    dtype = "bfloat16" if cpu_has_bf16() else "float32"
    common = {"group": 8, "max_tokens": 32, "rank": 16, "learning_rate": 1e-4, "steps": turns, "dtype": dtype}
    medium = random_model(tiny, folder / "30m", hidden=512, intermediate=1408, layers=9, heads=8)
    large = random_model(tiny, folder / "120m", hidden=768, intermediate=2560, layers=15, heads=12)
    return {
        "30m": Job(str(medium), prompts=4, **common),
        "120m": Job(str(large), prompts=2, **common),
    }


def random_model(
    tokenizer: Path, folder: Path, *, hidden: int, intermediate: int, layers: int, heads: int
) -> Path:
    """A Qwen3 of random parameters with the tiny policy's tokenizer, and half the heads for its keys."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=257,
        pad_token_id=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def measure(
    job: Job, trl_python: Path, folder: Path, turns: int, share: float, *, quick: bool = False
) -> dict[str, list[float]]:
    """Samples per CPU second, turn by turn, of all sides."""
    own = Path(sys.executable)
    kinds = {
        "ours": (own, "grpo_ours", job),
        "ours default": (own, "grpo_ours", replace(job, tuned=False)),
        "trl": (trl_python, "grpo_trl", job),
        "trl default": (trl_python, "grpo_trl", replace(job, tuned=False)),
    }
    if quick:
        kinds = {name: kinds[name] for name in ("ours default", "trl")}
    elif not cpu_has_bf16():
        del kinds["trl default"]
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side(name, python, module, its_job, folder / f"{name}.log"))
            for name, (python, module, its_job) in kinds.items()
        }
        takes = {name: partial(side.samples_per_cpu_s, job.steps_per_turn) for name, side in sides.items()}
        interleaved(takes, WARM_UP_TURNS, share)
        found = interleaved(takes, turns, share)
        for name, side in sides.items():
            print(f"      {name:12s} {side.tokens / side.samples:.1f} tokens a sample")
    return found


def trl_environment() -> Path:
    """The interpreter that has TRL; made at the first run."""
    python = TRL_HOME / "bin" / "python"
    ready = TRL_HOME / f".{TRL}"
    if not ready.exists():
        print(f"installing {TRL} into {TRL_HOME} (once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(TRL_HOME)], check=True)
        # What swarmnode has is taken from there: pip would fetch other builds of torch, gigabytes of them.
        (packages,) = TRL_HOME.glob("lib/python*/site-packages")
        (packages / "swarmnode.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, TRL], check=True)
        ready.touch()
    return python


if __name__ == "__main__":
    main()
