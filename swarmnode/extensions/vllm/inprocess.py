"""vLLM inside this process: a step of ours is a step of its scheduler and its model.

vllm_engine.py -> vllm_driver.py (Start) -> [inprocess] -> EngineCore.step (scheduler.py) -> Delta

This speaks to the engine core, one layer below `LLMEngine.step`: that layer makes a dozen objects per token
for callers who want text, and takes a sixth of the time on a small model.
"""

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.extensions.vllm.compat import require_vllm, runs_on_cpu, starting_vllm
from swarmnode.extensions.vllm.vllm_driver import (
    Delta,
    DriverSettings,
    Start,
    engine_arguments,
    finish_reason,
    lora_request,
    starting_model,
    vllm_sampling,
)

SCHEDULER = "swarmnode.extensions.vllm.scheduler.DecodingScheduler"


class InProcessDriver:
    """A `Driver` in this process, for a CPU."""

    def __init__(self, settings: DriverSettings) -> None:
        require_vllm()
        with starting_vllm(in_process=True), starting_model(settings.model):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            arguments = EngineArgs(**engine_arguments(settings, runs_on_cpu()), scheduler_cls=SCHEDULER)
            self._engine: Any = LLMEngine.from_engine_args(arguments)
            self._noise = torch.get_rng_state()
        self._client: Any = self._engine.engine_core
        self._core: Any = self._client.engine_core
        self._added = 0

    def start(self, starts: Sequence[Start]) -> None:
        for start in starts:
            sampling = vllm_sampling(start)
            self._add(start.key, start.token_ids, sampling, start.adapter, start.salt, start.priority)

    def step(self) -> list[Delta]:
        return [_delta(output) for output in self._advance()]

    def abort(self, keys: Collection[str]) -> list[Delta]:
        self._client.abort_requests(list(keys))
        return []

    @contextmanager
    def standstill(self) -> Iterator[list[Delta]]:
        yield []

    def load_adapter(self, adapter: int, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        # Only here: a sequence whose request says `load_inplace` reads the folder again at every step.
        self._engine.add_lora(LoRARequest(str(adapter), adapter, str(folder), load_inplace=True))

    def drop_adapter(self, adapter: int) -> None:
        self._engine.remove_lora(adapter)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def scrub(self) -> None:
        self._engine.reset_prefix_cache()
        self._engine.collective_rpc("scrub_keys_and_values")

    def kv_use(self) -> float | None:
        return self._core.scheduler.kv_cache_manager.usage

    def sleep(self) -> None:
        """Forgets what is cached. The memory of a CPU is not given back."""
        self._engine.reset_prefix_cache()

    def wake(self) -> None:
        pass

    def close(self) -> None:
        """Ends the engine without `EngineCore.shutdown`, which tears down process groups that other engines
        of this process use."""
        if self._engine is None:
            return
        self._client._finalizer.detach()
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()
        gc.unfreeze()
        self._engine = self._client = self._core = None

    def _advance(self) -> list[Any]:
        """Runs one step of vLLM. It draws from torch's global generator, where it gets one of its own."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._noise)
        try:
            return self._client.get_output().outputs
        finally:
            self._noise = torch.get_rng_state()
            torch.set_rng_state(outside)

    def _add(
        self, key: str, token_ids: list[int], sampling: Any, adapter: int | None, salt: str, priority: int
    ) -> None:
        from vllm.v1.engine import EngineCoreRequest

        self._added += 1
        self._client.add_request(
            EngineCoreRequest(
                request_id=key,
                external_req_id=key,
                prompt_token_ids=token_ids,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                # Its order only: under pressure the latest gives way.
                arrival_time=float(self._added),
                lora_request=lora_request(adapter),
                cache_salt=salt,
                data_parallel_rank=None,
                priority=priority,
            )
        )


def _delta(output: Any) -> Delta:
    """Returns a `Delta` for vLLM's `EngineCoreOutput`; a decoding step of scheduler.py gives one already."""
    if isinstance(output, Delta):
        return output
    reason, prefill, logprobs = output.finish_reason, output.prefill_stats, output.new_logprobs
    return Delta(
        output.request_id,
        output.new_token_ids,
        [] if logprobs is None else logprobs.logprobs[:, 0].tolist(),
        None if reason is None else finish_reason(str(reason)),
        None if prefill is None else prefill.num_cached_tokens,
    )
