"""What vLLM imports in every process that runs a model, before it loads one, and mixes into its worker.

driver.engine_arguments (`worker_extension_cls`) -> [worker] -> compat.install_workarounds
driver.Driver.scrub -> collective_rpc by name -----------^

An engine's worker may live in a process that we never see otherwise; this is how we get there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from swarmnode.rollout.vllm.compat import end_with_whoever_started_us, install_workarounds

end_with_whoever_started_us()
install_workarounds()


class Worker:
    """Methods that vLLM's worker has on top of its own."""

    model_runner: Any

    def scrub_keys_and_values(self) -> None:
        """Attention multiplies what a block held before by zero, and zero times NaN is NaN: without this, one
        policy that diverged would spoil whatever comes after it."""
        for cache in _tensors(self.model_runner.kv_caches):
            cache.zero_()


def _tensors(caches: Sequence[Any]) -> Iterator[Tensor]:
    """Some models have several caches per layer."""
    for cache in caches:
        yield from [cache] if isinstance(cache, Tensor) else cache
