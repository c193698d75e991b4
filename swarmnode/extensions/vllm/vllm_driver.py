"""The seam between our requests and vLLM: the driver that `VllmEngine` needs, and the messages between
them."""

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
from swarmnode.extensions.vllm.compat import GPU_MEMORY_SHARE
from swarmnode.rollout.engine import SamplingParams
from swarmnode.types import FinishReason

CPU_BLOCK_TOKENS = 32
"""Tokens per block of keys and values on a CPU. vLLM takes 128 there: short prompts would never be shared."""

CPU_STEP_TOKENS = 8192
"""Most tokens of one step. Prompts that do not fit whole wait for the next one."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can reserve room."""

EngineDtype = Literal["float32", "bfloat16"]

TORCH_DTYPES: dict[EngineDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """The settings of vLLM's start."""

    model: str
    dtype: EngineDtype
    max_slots: int
    max_length: int
    lora_modules: tuple[str, ...]
    """Last parts of the names of modules that adapters may change. Empty: no adapters at all."""
    lora_rank: int
    lora_slots: int
    kv_bytes: int | None
    """Bytes for keys and values. None: the rest of GPU_MEMORY_SHARE."""
    card: int | None = None
    """CUDA's number of the card in this process. None: its first, or a CPU."""


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence to start or continue."""

    key: str
    """Key that is never used again: vLLM forgets an aborted key only at its next step."""
    token_ids: list[int]
    """Tokens of the prompt and those sampled behind it."""
    sampling: SamplingParams
    stop_token_ids: list[int]
    max_tokens: int
    """Most tokens still to sample."""
    seed: int | None
    adapter: int | None
    priority: int
    """Precedence: of two that do not both fit, the one with the higher number gives way, or else the later
    one."""
    salt: str
    """Salt of the cache: sequences share keys and values only with those of the same salt."""


class Delta(NamedTuple):
    """The tokens that one sequence sampled since the last report."""

    key: str
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    cached_tokens: int | None
    """Leading tokens whose keys and values were there already. None unless the sequence just started."""


class Driver(Protocol):
    """vLLM as `VllmEngine` needs it. One caller at a time."""

    def start(self, starts: Sequence[Start]) -> None: ...

    def step(self) -> list[Delta]:
        """Returns everything sampled since the last call, at least one token. Called while something runs."""
        ...

    def abort(self, keys: Collection[str]) -> list[Delta]:
        """Stops these sequences. Returns their tokens that were not reported yet."""
        ...

    def standstill(self) -> AbstractContextManager[list[Delta]]:
        """Context without computation inside. Yields everything sampled before."""
        ...

    def load_adapter(self, adapter: int, folder: Path) -> None:
        """Loads a PEFT folder under this number, or replaces the adapter there, under running sequences as
        well."""
        ...

    def drop_adapter(self, adapter: int) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces base weights, by the names they have in a checkpoint."""
        ...

    def scrub(self) -> None:
        """Forgets all keys and values, cached ones too. Called while nothing runs."""
        ...

    def kv_use(self) -> float | None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def engine_arguments(settings: DriverSettings, on_cpu: bool) -> dict[str, Any]:
    """Returns the arguments of `EngineArgs` that both drivers share."""
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
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, settings.max_length),
    }
    cuda = {"enable_sleep_mode": True, "gpu_memory_utilization": GPU_MEMORY_SHARE}
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_length,
        "max_num_seqs": settings.max_slots,
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
        "worker_extension_cls": "swarmnode.extensions.vllm.vllm_worker.Worker",
        **(lora if settings.lora_modules else {}),
        **(cpu if on_cpu else cuda),
    }


@contextmanager
def starting_model(model: str) -> Iterator[None]:
    """Turns errors of vLLM's start into ModelError."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        raise ModelError(
            f"vLLM cannot start with {model}: {error}",
            hint="look at its lines above; --engine auto takes another",
        ) from error


def reserved_rank(rank: int) -> int:
    """Returns the smallest rank, among those that vLLM can reserve room for, that holds `rank`.

    >>> reserved_rank(4), reserved_rank(16)
    (8, 16)
    """
    fitting = [reserved for reserved in RANKS if reserved >= rank]
    if not fitting:
        raise EngineError(f"LoRA rank {rank} is more than vLLM's {RANKS[-1]}", hint="lower policy.lora_rank")
    return fitting[0]


def vllm_sampling(start: Start) -> Any:
    """Returns our sampling parameters as vLLM's. Only our end tokens count: none comes from the model's
    files."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        temperature=start.sampling.temperature,
        top_p=start.sampling.top_p,
        seed=start.seed,
        max_tokens=start.max_tokens,
        stop_token_ids=start.stop_token_ids,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def lora_request(adapter: int | None) -> Any:
    """Returns the request for a loaded adapter. Its folder is gone by then, and never read again."""
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(str(adapter), adapter, "loaded")


def finish_reason(name: str | None) -> FinishReason | None:
    """Returns our word for vLLM's reason of an end."""
    match name:
        case None | "stop" | "length" | "abort":
            return name
        case _:
            raise EngineError(f'vLLM ended a sequence with "{name}"', hint="look at its log")


def head_size(base: PreTrainedModel) -> int:
    config = base.config.get_text_config()
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
