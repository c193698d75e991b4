"""The seam between `VllmEngine` and vLLM's engine core: the driver that it needs, and what that reports."""

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


class Delta(NamedTuple):
    """The tokens that one sequence sampled since the last report."""

    key: str
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    cached_tokens: int | None
    """Leading tokens whose keys and values were there already. None unless the sequence just started."""


class Driver(ABC):
    """vLLM's engine core as `VllmEngine` needs it. One caller at a time.

    It stands one layer below `LLMEngine` and `AsyncLLM`, which make a dozen objects per token for callers who
    want text, and take a sixth of the time on a small model.
    """

    _client: Any
    """vLLM's `EngineCoreClient`."""

    def __init__(self) -> None:
        self._unheard: list[Delta] = []
        self._closed = False

    def start(self, requests: Sequence[Any]) -> None:
        """Takes vLLM's `EngineCoreRequest`s, each with an id that is never used again: vLLM forgets an
        aborted one only at its next step."""
        for request in requests:
            self._client.add_request(request)

    @abstractmethod
    def step(self) -> list[Delta]:
        """Returns everything sampled since the last call, at least one token. Called while something runs."""

    def abort(self, keys: Collection[str]) -> list[Delta]:
        """Stops these sequences. Returns their tokens that were not reported yet."""
        self._client.abort_requests(list(keys))
        theirs = [delta for delta in self._unheard if delta.key in keys]
        self._unheard = [delta for delta in self._unheard if delta.key not in keys]
        return theirs

    @contextmanager
    def standstill(self) -> Iterator[list[Delta]]:
        """Context without computation inside. Yields everything sampled before."""
        # Its answer comes behind everything that it has sampled.
        self._call("pause_scheduler", "keep", False)
        heard, self._unheard = self._unheard, []
        try:
            yield heard
        finally:
            self._call("resume_scheduler")

    def load_adapter(self, adapter: int, folder: Path) -> None:
        """Loads a PEFT folder under this number, or replaces the adapter there, under running sequences as
        well."""
        from vllm.lora.request import LoRARequest

        # Only here: a sequence whose request says `load_inplace` reads the folder again at every step.
        self._call("add_lora", LoRARequest(str(adapter), adapter, str(folder), load_inplace=True))

    def drop_adapter(self, adapter: int) -> None:
        self._call("remove_lora", adapter)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces base weights, by the names they have in a checkpoint. They do not travel to another
        process."""
        self._call("collective_rpc", "reload_weights", None, (), {"weights_iterator": iter(weights)})

    def scrub(self) -> None:
        """Forgets all keys and values, cached ones too. Called while nothing runs."""
        self._call("reset_prefix_cache")
        self._call("collective_rpc", "scrub_keys_and_values")

    def kv_use(self) -> float | None:
        """Returns the share of keys and values in use, or None: vLLM's process does not tell."""
        return None

    def sleep(self) -> None:
        """Forgets what is cached, and gives the memory of a card back."""
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake_up")

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _call(self, method: str, *arguments: object) -> object:
        """Calls a method of vLLM's `EngineCore`."""


def core_client(settings: DriverSettings, multiprocess: bool, **more: Any) -> Any:
    """Returns vLLM's client of a new engine core, in this process or in one of its own. `more`: further
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
            hint="see its output above; --engine auto uses another engine",
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


def delta_of(output: Any) -> Delta:
    """Returns vLLM's `EngineCoreOutput` as a `Delta`."""
    reason, prefill, logprobs = output.finish_reason, output.prefill_stats, output.new_logprobs
    return Delta(
        output.request_id,
        output.new_token_ids,
        [] if logprobs is None else logprobs.logprobs[:, 0].tolist(),
        None if reason is None else finish_reason(str(reason)),
        None if prefill is None else prefill.num_cached_tokens,
    )


def finish_reason(name: str | None) -> FinishReason | None:
    """Returns our word for vLLM's reason of an end."""
    match name:
        case None | "stop" | "length" | "abort":
            return name
        case _:
            raise EngineError(f'vLLM ended a sequence with "{name}"', hint="see its log")


def head_size(base: PreTrainedModel) -> int:
    config = base.config.get_text_config()
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
