"""What `VllmEngine` needs of vLLM, and what it tells it: the seam between our requests and theirs.

engine.py -> Start -> [Driver] -> Delta
                        |
                        +-- inprocess.py (CPU: we own the step loop)
                        +-- separate.py (CUDA: a process of its own that never waits for us)
"""

import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import EngineError, ModelError
from swarmnode.rollout.engine import SamplingParams
from swarmnode.types import FinishReason

CPU_BLOCK_TOKENS = 32
"""Tokens per block of keys and values. vLLM takes 128 on a CPU: short prompts would never be shared."""

CPU_STEP_TOKENS = 8192
"""Most tokens of one step. Prompts that do not fit whole wait for the next one."""

SCORED_AT_ONCE = 8
"""Sequences that may be scored beside everything that runs. Each holds [tokens, vocab] logits."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can reserve room."""

EngineDtype = Literal["float32", "bfloat16"]

TORCH_DTYPES: dict[EngineDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """How to start vLLM."""

    model: str
    dtype: EngineDtype
    max_slots: int
    max_length: int
    lora_modules: tuple[str, ...]
    """Last parts of the names of modules that adapters may change; empty: no adapters at all."""
    lora_rank: int
    lora_slots: int
    kv_bytes: int | None
    """Room for keys and values; None: what `gpu_memory_share` leaves."""
    gpu_memory_share: float
    card: int | None = None
    """The number that CUDA has for the card in this process; None: its first, or a CPU."""


@dataclass(frozen=True, slots=True)
class Start:
    """One sequence to go on with."""

    key: str
    """Unique for ever: vLLM forgets an aborted key only at its next step."""
    token_ids: list[int]
    """The prompt and what was sampled behind it."""
    sampling: SamplingParams
    stop_token_ids: list[int]
    max_tokens: int
    """How many more."""
    seed: int | None
    adapter: int | None
    priority: int
    """Precedence: of two that do not both fit, the one with the higher number gives way, or the one that came
    later."""
    salt: str
    """Sequences share keys and values only with those of the same salt."""


class Delta(NamedTuple):
    """What one sequence sampled since it was last heard of."""

    key: str
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    cached_tokens: int | None
    """Leading tokens whose keys and values were there already; None unless the sequence just started."""


class Driver(Protocol):
    """vLLM as `VllmEngine` needs it. One caller at a time."""

    def start(self, starts: Sequence[Start]) -> None: ...

    def step(self) -> list[Delta]:
        """Everything sampled since the last call, at least one token; called while something runs."""
        ...

    def abort(self, keys: Collection[str]) -> list[Delta]:
        """Stop these sequences; what they sampled and nobody heard of."""
        ...

    def standstill(self) -> AbstractContextManager[list[Delta]]:
        """Nothing is computed inside; gives everything sampled before."""
        ...

    def load_adapter(self, adapter: int, folder: Path) -> None:
        """Load a PEFT folder under this number, or replace what is there, under running sequences as well."""
        ...

    def drop_adapter(self, adapter: int) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace base weights, by the names they have in a checkpoint."""
        ...

    def score(
        self, sequences: Sequence[tuple[list[int], int]], adapter: int | None
    ) -> list[tuple[float, ...]]:
        """Log-probabilities of each sequence from its n-th token on."""
        ...

    def scrub(self) -> None:
        """Forget all keys and values, cached ones too; called while nothing runs."""
        ...

    def kv_use(self) -> float | None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def engine_arguments(settings: DriverSettings, on_cpu: bool) -> dict[str, Any]:
    """The arguments of `EngineArgs` that both drivers share."""
    lora = {
        "enable_lora": True,
        "max_loras": settings.lora_slots,
        "max_cpu_loras": settings.lora_slots,
        "max_lora_rank": reserved_rank(settings.lora_rank),
        "lora_target_modules": list(settings.lora_modules),
    }
    cpu = {
        "block_size": CPU_BLOCK_TOKENS,
        "enforce_eager": True,
        # A seeded request whose prompt is cut into chunks rewinds its random generator, which a CPU's cannot.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, settings.max_length + 1),
    }
    cuda = {"enable_sleep_mode": True, "gpu_memory_utilization": settings.gpu_memory_share}
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_length + 1,
        "max_num_seqs": settings.max_slots + SCORED_AT_ONCE,
        "kv_cache_memory_bytes": settings.kv_bytes,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # Two nodes must not draw alike, nor one node after a restart.
        "seed": secrets.randbits(31),
        "worker_extension_cls": "swarmnode.rollout.vllm.worker.Worker",
        **(lora if settings.lora_modules else {}),
        **(cpu if on_cpu else cuda),
    }


@contextmanager
def starting_model(model: str) -> Iterator[None]:
    """What goes wrong inside is said in our words."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        raise ModelError(
            f"vLLM cannot start with {model}: {error}",
            hint="look at its lines above; --engine auto takes another",
        ) from error


def reserved_rank(rank: int) -> int:
    """The smallest rank vLLM can reserve room for that holds `rank`.

    >>> reserved_rank(4), reserved_rank(16)
    (8, 16)
    """
    fitting = [reserved for reserved in RANKS if reserved >= rank]
    if not fitting:
        raise EngineError(f"LoRA rank {rank} is more than vLLM's {RANKS[-1]}", hint="lower policy.lora_rank")
    return fitting[0]


def vllm_sampling(start: Start) -> Any:
    """Our sampling parameters as vLLM's. End tokens are ours to name: none comes from the model's files."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        temperature=start.sampling.temperature,
        top_p=start.sampling.top_p,
        top_k=start.sampling.top_k,
        seed=start.seed,
        max_tokens=start.max_tokens,
        stop_token_ids=start.stop_token_ids,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def scoring_sampling(last_token: int) -> Any:
    """Log-probabilities of the prompt, and of one token behind it."""
    from vllm import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=1, prompt_logprobs=0, logprob_token_ids=[last_token], ignore_eos=True, detokenize=False
    )


def lora_request(adapter: int | None) -> Any:
    """How a sequence names an adapter that is loaded. Its folder is gone by then, and never read again."""
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(str(adapter), adapter, "loaded")


def finish_reason(name: str | None) -> FinishReason | None:
    """vLLM's word for how a sequence ended, as ours."""
    match name:
        case None | "stop" | "length" | "abort":
            return name
        case _:
            raise EngineError(f'vLLM ended a sequence with "{name}"', hint="look at its log")


def unscored() -> EngineError:
    """The error for a sequence that vLLM ended without saying what was asked for."""
    return EngineError(
        "vLLM returned no log-probabilities for a sequence to be scored", hint="look at its log"
    )


def head_size(base: PreTrainedModel) -> int:
    config = base.config.get_text_config()
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
