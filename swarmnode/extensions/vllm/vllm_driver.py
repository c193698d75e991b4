"""The interface between `VllmEngine` and vLLM's engine core: the driver, and its reports."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import EngineError, ModelError
from swarmnode.extensions.vllm.compat import GPU_MEMORY_SHARE, runs_on_cpu
from swarmnode.types import FinishReason

CPU_BLOCK_TOKENS = 32
"""Tokens per block of keys and values on a CPU. With vLLM's 128, short prompts would never be shared."""

CPU_STEP_TOKENS = 8192
"""Most tokens in one step. Prompts that do not fit as a whole wait for the next step."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can reserve room."""

EngineDtype = Literal["float32", "bfloat16"]

TORCH_DTYPES: dict[EngineDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """The settings for starting vLLM."""

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
    """CUDA's number of the card in this process. None: the first card, or a CPU."""


class Delta(NamedTuple):
    """The tokens that one sequence sampled since the last report."""

    key: str
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    cached_tokens: int | None
    """Number of leading tokens whose keys and values were cached. None unless the sequence has just
    started."""


class Driver(ABC):
    """vLLM's engine core in the form that `VllmEngine` needs. For one caller at a time.

    It is one layer below `LLMEngine` and `AsyncLLM`. These create a dozen objects per token for callers that
    want text, and take a sixth of the time on a small model.
    """

    _client: Any
    """vLLM's `EngineCoreClient`."""

    def __init__(self) -> None:
        self._unheard: list[Delta] = []
        self._closed = False

    def start(self, requests: Sequence[Any]) -> None:
        """Starts vLLM's `EngineCoreRequest`s. No id may be used twice, because vLLM forgets an aborted
        request only at its next step."""
        for request in requests:
            self._client.add_request(request)

    @abstractmethod
    def step(self) -> list[Delta]:
        """Returns everything sampled since the last call, at least one token. Call it only while something
        runs."""

    def abort(self, keys: Collection[str]) -> list[Delta]:
        """Stops these sequences. Returns their tokens that have not been reported yet."""
        self._client.abort_requests(list(keys))
        theirs = [delta for delta in self._unheard if delta.key in keys]
        self._unheard = [delta for delta in self._unheard if delta.key not in keys]
        return theirs

    @contextmanager
    def standstill(self) -> Iterator[list[Delta]]:
        """Context in which nothing is computed. Yields everything sampled before."""
        # The answer arrives after everything that was sampled.
        self._call("pause_scheduler", "keep", False)
        heard, self._unheard = self._unheard, []
        try:
            yield heard
        finally:
            self._call("resume_scheduler")

    def load_adapter(self, adapter: int, folder: Path) -> None:
        """Loads a PEFT folder under this number, or replaces the adapter with the number, even under running
        sequences."""
        from vllm.lora.request import LoRARequest

        # Only here: with `load_inplace` in its request, a sequence would read the folder again at every step.
        self._call("add_lora", LoRARequest(str(adapter), adapter, str(folder), load_inplace=True))

    def drop_adapter(self, adapter: int) -> None:
        self._call("remove_lora", adapter)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces base weights, by their names in a checkpoint. Does not work with vLLM in another
        process."""
        self._call("collective_rpc", "reload_weights", None, (), {"weights_iterator": iter(weights)})

    def scrub(self) -> None:
        """Forgets all keys and values, including cached ones. Call it only while nothing runs."""
        self._call("reset_prefix_cache")
        self._call("collective_rpc", "scrub_keys_and_values")

    def kv_use(self) -> float | None:
        """Returns the share of keys and values in use, or None if unknown (vLLM's process does not report
        it)."""
        return None

    def sleep(self) -> None:
        """Forgets cached data, and frees the memory of a card."""
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake_up")

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _call(self, method: str, *arguments: object) -> object:
        """Calls a method of vLLM's `EngineCore`."""


def core_client(settings: DriverSettings, multiprocess: bool, **more: Any) -> Any:
    """Returns vLLM's client for a new engine core, in this process or in a separate one. `more`: further
    arguments of `EngineArgs`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    arguments = EngineArgs(**engine_arguments(settings, runs_on_cpu()), **more)
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    return EngineCoreClient.make_client(multiprocess, False, config, Executor.get_class(config), False)


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
        # With its prompt in chunks, a seeded request rewinds its random generator; a CPU's cannot do that.
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
        # Two nodes must not draw the same numbers, nor one node before and after a restart.
        "seed": secrets.randbits(31),
        "worker_extension_cls": "swarmnode.extensions.vllm.vllm_worker.Worker",
        **(lora if settings.lora_modules else {}),
        **(cpu if on_cpu else cuda),
    }


@contextmanager
def starting_model(model: str) -> Iterator[None]:
    """Converts errors during vLLM's start to ModelError."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        raise ModelError(
            f"vLLM cannot start with {model}: {error}",
            hint="see its output above; --engine auto uses another engine",
        ) from error


def reserved_rank(rank: int) -> int:
    """Returns the smallest rank that vLLM can reserve room for and that is at least `rank`.

    >>> reserved_rank(4), reserved_rank(16)
    (8, 16)
    """
    fitting = [reserved for reserved in RANKS if reserved >= rank]
    if not fitting:
        raise EngineError(f"LoRA rank {rank} is more than vLLM's {RANKS[-1]}", hint="lower policy.lora_rank")
    return fitting[0]


def delta_of(output: Any) -> Delta:
    """Converts vLLM's `EngineCoreOutput` to a `Delta`."""
    reason, prefill, logprobs = output.finish_reason, output.prefill_stats, output.new_logprobs
    return Delta(
        output.request_id,
        output.new_token_ids,
        [] if logprobs is None else logprobs.logprobs[:, 0].tolist(),
        None if reason is None else finish_reason(str(reason)),
        None if prefill is None else prefill.num_cached_tokens,
    )


def finish_reason(name: str | None) -> FinishReason | None:
    """Returns our finish reason for vLLM's."""
    match name:
        case None | "stop" | "length" | "abort":
            return name
        case _:
            raise EngineError(f'vLLM ended a sequence with "{name}"', hint="see its log")


def head_size(base: PreTrainedModel) -> int:
    config = base.config.get_text_config()
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
