"""Code that vLLM imports in every process that runs a model, before it loads one, and mixes into its
worker."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from swarmnode.extensions.vllm.compat import end_with_whoever_started_us, install_workarounds

end_with_whoever_started_us()
install_workarounds()


class Worker:
    """Additional methods for vLLM's worker."""

    model_runner: Any

    def scrub_keys_and_values(self) -> None:
        """Clears keys and values. Attention multiplies a block's old content by zero, and zero times NaN is
        NaN: a policy that diverged would otherwise spoil everything after it."""
        for cache in _tensors(self.model_runner.kv_caches):
            cache.zero_()


def _tensors(caches: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the tensors of a layer's cache, since some models have several per layer."""
    for cache in caches:
        yield from [cache] if isinstance(cache, Tensor) else cache
