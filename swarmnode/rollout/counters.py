"""What engines count, and how it becomes `EngineStats`.

decode/torch_engine.py, vllm/engine.py -> [counters] -> EngineStats
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from swarmnode.rollout.engine import EngineStats, Request


@dataclass(slots=True)
class EngineCounters:
    """What the engine did since it was made."""

    prompt_tokens: int = 0
    reprefilled_tokens: int = 0
    generated_tokens: int = 0
    generation_s: float = 0.0
    swaps: int = 0
    swap_s: float = 0.0

    def started(self, requests: Iterable[Request]) -> None:
        """These got a row, for the first time or again."""
        for request in requests:
            if request.sampled:
                self.reprefilled_tokens += len(request.prompt_ids) + len(request.sampled)
            else:
                self.prompt_tokens += len(request.prompt_ids)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time spent in here is spent generating."""
        started = perf_counter()
        yield
        self.generation_s += perf_counter() - started

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Time spent in here is spent taking a policy over."""
        started = perf_counter()
        yield
        self.swap_s += perf_counter() - started
        self.swaps += 1

    def stats(self, running: int, waiting: int, live_versions: Iterable[int]) -> EngineStats:
        return EngineStats(
            running=running,
            waiting=waiting,
            prompt_tokens=self.prompt_tokens,
            reprefilled_tokens=self.reprefilled_tokens,
            generated_tokens=self.generated_tokens,
            generation_s=self.generation_s,
            live_versions=tuple(sorted(live_versions)),
            swaps=self.swaps,
            swap_s=self.swap_s,
            kv_use=None,
        )
