"""vLLM inside this process: each of our steps is one step of its scheduler and its model.

vllm_engine.py -> vllm_driver.py -> [inprocess] -> EngineCore.step (scheduler.py) -> Delta
"""

import gc
from operator import methodcaller
from typing import Any

import torch

from swarmnode.extensions.vllm.compat import require_vllm, starting_vllm
from swarmnode.extensions.vllm.vllm_driver import (
    Delta,
    Driver,
    DriverSettings,
    core_client,
    delta_of,
    starting_model,
)

SCHEDULER = "swarmnode.extensions.vllm.scheduler.DecodingScheduler"


class InProcessDriver(Driver):
    """A `Driver` in this process, for a CPU."""

    def __init__(self, settings: DriverSettings) -> None:
        require_vllm()
        super().__init__()
        with starting_vllm(in_process=True), starting_model(settings.model):
            self._client = core_client(settings, multiprocess=False, scheduler_cls=SCHEDULER)
            self._noise = torch.get_rng_state()
        self._core: Any = self._client.engine_core

    def step(self) -> list[Delta]:
        # A decoding step of scheduler.py already returns Deltas.
        return [out if isinstance(out, Delta) else delta_of(out) for out in self._advance()]

    def kv_use(self) -> float | None:
        return self._core.scheduler.kv_cache_manager.usage

    def close(self) -> None:
        """Ends the engine without `EngineCore.shutdown`, which would tear down process groups that other
        engines in this process use."""
        if self._closed:
            return
        self._closed = True
        self._client._finalizer.detach()
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()
        gc.unfreeze()
        self._client = self._core = None

    def _call(self, method: str, *arguments: object) -> object:
        return methodcaller(method, *arguments)(self._core)

    def _advance(self) -> list[Any]:
        """Runs one step of vLLM. It draws from torch's global generator, so we give it a state of its own
        there."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._noise)
        try:
            return self._client.get_output().outputs
        finally:
            self._noise = torch.get_rng_state()
            torch.set_rng_state(outside)
