"""Counters of an engine: tokens sampled and recomputed, and policies adopted.

decode/, vLLM, shared_engine.py -> [EngineCounters] -> EngineStats
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter

from swarmnode.rollout.engine import EngineStats, Request

# ---- counters of engines ----


def read_again(request: Request, kept_tokens: int) -> int:
    """Returns the number of tokens that a starting request recomputes because their keys and values are not
    among the `kept_tokens` leading ones. Excludes an environment's text since the request stopped, which is
    read for the first time, and the token before it, which was only sampled."""
    prompt, sampled = len(request.prompt_ids), request.sampled
    if not sampled:
        return 0
    start, end = sampled.given[-1] if sampled.given else (0, 0)
    said = end - start if end == len(sampled) else 0
    return max(0, prompt + len(sampled) - said - 1 - kept_tokens)


@dataclass(slots=True)
class EngineCounters:
    """Counters of an engine since it was made."""

    reprefilled_tokens: int = 0
    kept_tokens: int = 0
    generated_tokens: int = 0
    swaps: int = 0
    swap_s: float = 0.0

    def started(self, request: Request, kept_tokens: int = 0) -> None:
        """Counts a request that got a row, for the first time or again. If again, the keys and values of
        `kept_tokens` of its leading tokens existed already."""
        self.reprefilled_tokens += read_again(request, kept_tokens)
        self.kept_tokens += kept_tokens

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Counts the time spent within as adopting a policy."""
        started = perf_counter()
        yield
        self.swap_s += perf_counter() - started
        self.swaps += 1

    def stats(
        self, running: int, waiting: int, live_versions: Iterable[int], kv_use: float | None = None
    ) -> EngineStats:
        return EngineStats(
            running=running,
            waiting=waiting,
            live_versions=tuple(sorted(live_versions)),
            kv_use=kv_use,
            **asdict(self),
        )
